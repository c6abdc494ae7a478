"""One file for each kind of run in the report."""
