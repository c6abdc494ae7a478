"""Attacks on a few patches of an image."""
