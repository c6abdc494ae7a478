"""Whether a robustness number of a model can be trusted: checks, findings, and broken defenses that test the checks."""
