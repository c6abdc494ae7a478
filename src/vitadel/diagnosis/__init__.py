"""The doctor: can a robustness number of this model be trusted? Checks, what they found, and liars to try them on."""
