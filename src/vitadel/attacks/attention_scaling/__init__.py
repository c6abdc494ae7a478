"""Adaptive attention scaling (AAS)."""
