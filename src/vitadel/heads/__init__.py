"""Heads on frozen features by recipe: linear probes and linear segmentation, with or without robustness tokens."""
