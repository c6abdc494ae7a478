"""Recipes for heads that are trained in a second: a two-block ViT with random weights on small shapes."""

from __future__ import annotations

from vitadel.training.recipes.compose import merge

MODEL = {
    "name": "vit_tiny_patch16_224",
    "weights": "random",
    "num_classes": 10,
    "mean": [0.5],
    "std": [0.5],
    "kwargs": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
}
LINEAR = {
    "model": MODEL,
    "data": {"train": "shapes(size=16)@train", "test": "shapes(size=16)@test", "held_out": 40, "limit": 120},
    "head": {"use": "linear", "blocks": [1, 2], "lrs": [0.01, 0.1]},
    "train": {"steps": 20, "batch_size": 32},
    "audit": {"attacks": ["fgsm"], "eps": 2 / 255, "limit": 30},
}
MASKS = {
    "model": MODEL,
    "data": {"train": "shapes(size=16)@train", "test": "shapes(size=16)@test", "held_out": 10, "limit": 40},
    "head": {"use": "segmentation", "lrs": [1e-3, 1e-1]},
    "train": {"steps": 20, "batch_size": 16},
    "audit": {"attacks": ["pgd-3"], "eps": 8 / 255, "limit": 12, "batch_size": 5},
}


def linear(**changes):
    return merge(LINEAR, changes)


def masks(**changes):
    return merge(MASKS, changes)
