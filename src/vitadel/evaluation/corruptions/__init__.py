"""Corruption benchmarks: ImageNet-C, ImageNet-P and their like."""
