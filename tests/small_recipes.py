"""Recipes that train in a second: a two-block ViT on small shapes."""

from __future__ import annotations

from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import merge

BASE = {
    "model": {
        "name": "vit_tiny_patch16_224",
        "mean": [0.5],
        "std": [0.5],
        "kwargs": {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
    },
    "data": {"train": "shapes(size=16)@train", "test": "shapes(size=16)@test", "held_out": 40, "limit": 48},
    "augmentation": {"crop": "pad", "padding": 2, "hflip": 0.5},
    "objective": {"use": "adversarial", "attack": "pgd-2(step=5/255)"},
    "optimizer": {"lr": 1e-2, "clip_grad_norm": 1.0},
    "schedule": {"warmup_epochs": 0.5},
    "train": {"epochs": 2, "batch_size": 16, "tracker": "none", "checkpoint_every": 2},
    "validation": {"attack": "pgd-2", "limit": 20},
    "audit": {"attacks": ["fgsm"], "limit": 20},
}
TRADES = {"use": "trades", "attack": "kl-2(step=5/255)", "beta": 3.0}


def document(**changes):
    """The base recipe, with sections merged into it; an objective or plug-ins replace what is there."""
    changed = merge(BASE, changes)
    if "objective" in changes:
        changed["objective"] = changes["objective"]
    return changed


def recipe(**changes):
    return build_recipe(document(**changes), "small")
