"""What all runs share: requests, stages, verdicts, run folders."""
