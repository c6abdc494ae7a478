"""Accuracy against robustness for models with several heads."""
