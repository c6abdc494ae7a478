"""Stability under patch corruptions."""
