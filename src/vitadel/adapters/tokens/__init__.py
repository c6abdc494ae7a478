"""Robustness tokens: the module and its files."""
