"""Switches of a recipe that change how a model uses memory, and not what it computes."""

from __future__ import annotations

import torch
from torch import nn

from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.training.recipes.build import Recipe

_PASSES_THROUGH = ("adversarial", "mart", "standard", "trades")
_LOOKS_INSIDE = ("attention_scaling", "random_dropping")


def apply_switches(recipe: Recipe, model: nn.Module) -> None:
    """Set memory format and activation checkpointing of the model to train, as the recipe says."""
    if recipe.train.channels_last:
        model.to(memory_format=torch.channels_last)
    if recipe.train.checkpointing:
        _checkpoint_blocks(recipe, model)


def _checkpoint_blocks(recipe: Recipe, model: nn.Module) -> None:
    """timm's own switch. What looks inside the model would see its blocks run twice, the second time without it."""
    objective = str(recipe.document["objective"].get("use", "")).replace("-", "_")
    inside = [f"plugins.{name}" for name, _ in recipe.plugins if name.replace("-", "_") in _LOOKS_INSIDE]
    inside = inside if objective in _PASSES_THROUGH else [f"objective.use {objective}", *inside]
    if inside or not isinstance(model, Classifier):
        what = ", ".join(inside) or "an adapter"
        raise UserError(
            f"train.checkpointing computes blocks twice, which does not work with {what}. It works with the objectives "
            f"{', '.join(_PASSES_THROUGH)} on the whole model; set train.checkpointing=false."
        )
    switch = getattr(model.backbone, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise AttributeError
        switch(True)
    except (AttributeError, AssertionError, NotImplementedError):
        raise UserError(
            f"{recipe.model.name} cannot compute its activations again; set train.checkpointing=false, and a larger "
            "train.grad_accum to save memory"
        ) from None
