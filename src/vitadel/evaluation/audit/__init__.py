"""The audit: clean accuracy, attacks, worst case."""
