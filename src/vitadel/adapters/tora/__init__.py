"""TORA-ViT: adapters, gated fusion and their files."""
