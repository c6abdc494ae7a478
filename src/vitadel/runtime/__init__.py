"""Runtime: random draws, run folders, processes and progress."""
