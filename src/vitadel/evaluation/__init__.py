"""Evaluation: attacks propose, the judge decides, results are written."""
