"""Switches of a recipe that change memory or speed, and not what is computed: memory format, checkpointing, compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import needs_known_family
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.training.recipes.build import Recipe

_PASSES_THROUGH = ("adversarial", "mart", "standard", "trades")
_LOOKS_INSIDE = ("attention_scaling", "random_dropping")


def apply_switches(recipe: Recipe, model: nn.Module) -> None:
    """Set memory format and activation checkpointing of the model to train, as the recipe says."""
    train = recipe.train
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    if train.compile and (train.fsdp or train.checkpointing):
        other = "fsdp" if train.fsdp else "checkpointing"
        raise UserError(f"train.compile and train.{other} do not work together; set one of them to false")
    if train.compile:
        refuse_looking_inside(recipe, model, "compile", "sees the hooks of its first run only")
    if train.checkpointing:
        refuse_looking_inside(recipe, model, "checkpointing", "computes blocks twice")
        _checkpoint_blocks(recipe, model)


def refuse_looking_inside(recipe: Recipe, model: nn.Module, switch: str, why: str) -> None:
    """Refuse a switch beside an adapter, and beside objectives, plug-ins and attacks that look inside the model."""
    section = recipe.document["objective"]
    objective = str(section.get("use", "")).replace("-", "_")
    inside = [f"plugins.{name}" for name, _ in recipe.plugins if name.replace("-", "_") in _LOOKS_INSIDE]
    inside = inside if objective in _PASSES_THROUGH else [f"objective.use {objective}", *inside]
    attack = section.get("attack")
    if isinstance(attack, str) and needs_known_family(attack):
        inside.append(f"objective.attack {attack}")
    if inside or not isinstance(model, Classifier):
        what = ", ".join(inside) or "an adapter"
        raise UserError(
            f"train.{switch} {why}, which does not work with {what}. It works with the objectives "
            f"{', '.join(_PASSES_THROUGH)} on the whole model; set train.{switch}=false."
        )


def _checkpoint_blocks(recipe: Recipe, model: nn.Module) -> None:
    """timm's own switch. What looks inside the model would see its blocks run twice, the second time without it."""
    assert isinstance(model, Classifier)
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


def compile_in_place(model: nn.Module, x: Tensor) -> str:
    """Compile the model's calls, for any batch size, and try it on `x`; a message for the user.

    The module stays what it is: its attributes, hooks and state are untouched. If the compiler fails here, so does the
    trial, and the model is left without.
    """
    try:
        model.compile(dynamic=True)
        with frozen(model), torch.enable_grad():
            z = x.clone().requires_grad_()
            torch.autograd.grad(model(z).sum(), z)
    except Exception as problem:  # compilers raise anything; everything works without
        model._compiled_call_impl = None
        return f"torch.compile failed here ({type(problem).__name__}); training without"
    return "compiled for steps and attacks; validation runs the model as it is"


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """The model as it is, whose hooks all run."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
