"""Backbones that timm does not have, and variants for small images."""
