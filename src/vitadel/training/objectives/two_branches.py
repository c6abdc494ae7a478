"""The objective of TORA-ViT (Li & Xu, CVPR 2023): an accuracy branch, a robustness branch and their fusion.

Phase 1: each loss trains its own branch, and both train the fusion. Phase 2: only the fusion is trained, on the
weighted sum of both losses. The model's lambda is None in phase 1 and that weight in phase 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.adapters.tora.tora_vit import Tora, find_tora, trainable_parameters
from vitadel.attacks.losses import kl_divergence
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.quantities import NOT_NEGATIVE, SHARE, check_ranges
from vitadel.training.objectives.cross_entropy import accuracy, cross_entropy
from vitadel.types import Attack


@dataclass(frozen=True)
class TwoBranches:
    """L_ACC = CE(f_ACC(x), y) and L_ROB = CE(f_ROB(z), y); with `beta`, L_ROB is that of TRADES on the robust branch.

    Attacks see the robust branch alone. With `adapter.loss_at: joint` attacks and both losses see the joint prediction
    instead; what each loss trains stays the same. For the AdapterFusion baseline its penalty on value matrices, their
    distance from the identity, is added.
    """

    adapter: ClassVar[str] = "tora"

    attack: Attack
    beta: float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, label_smoothing=SHARE, beta=NOT_NEGATIVE)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        tora = find_tora(model)
        if tora is None:
            raise UserError("the objective tora trains two branches: give the recipe `adapter: {use: tora}`")
        independent = tora.trade_off is None
        acc, rob = _branches(model, tora, x)
        clean = cross_entropy(acc, y, self.label_smoothing).mean()
        clean_gradients: dict[str, Tensor] = {}
        if independent and torch.is_grad_enabled():
            # Now, so that the activations of only one pass are in memory, unless TRADES needs them again.
            clean_gradients = _gradients(clean, trainable_parameters(tora, 1, "acc"), keep=self.beta is not None)
        _, perturbed = _branches(model, tora, z)
        robust = self._robust(rob, perturbed, y)
        if not independent:
            weight = tora.trade_off or 0.0
            loss = weight * robust + (1 - weight) * clean + tora.identity_penalty()
        elif torch.is_grad_enabled():
            loss = clean.detach() + robust.detach() + _with_gradients(tora, clean_gradients, robust)
        else:
            loss = clean + robust + tora.identity_penalty()
        return {
            "loss": loss,
            "natural": clean.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(perturbed, y),
            "clean_accuracy": accuracy(acc, y),
        }

    def _robust(self, clean: Tensor, perturbed: Tensor, y: Tensor) -> Tensor:
        if self.beta is None:
            return cross_entropy(perturbed, y, self.label_smoothing).mean()
        natural = cross_entropy(clean, y, self.label_smoothing).mean()
        return natural + self.beta * kl_divergence(clean, perturbed).mean()


def _with_gradients(tora: Tora, clean_gradients: Mapping[str, Tensor], robust: Tensor) -> Tensor:
    """The identity penalty, plus a zero whose gradients are those of each loss for the parameters it may train.

    A product of parameters and gradients instead of two backward passes, so that the loop, its gradient scaler and
    several processes need not know which loss trains what.
    """
    robust_gradients = _gradients(robust, trainable_parameters(tora, 1, "rob"))
    named = dict(tora.named_parameters())
    penalty = tora.identity_penalty()
    total = penalty + sum(
        ((named[name] * grad).sum() for each in (clean_gradients, robust_gradients) for name, grad in each.items()),
        start=penalty.new_zeros(()),
    )
    return total - total.detach() + penalty.detach()


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter], keep: bool = False) -> dict[str, Tensor]:
    """Gradients of the parameters that the loss depends on."""
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
    return {name: each.detach() for name, each in zip(parameters, found, strict=True) if each is not None}


def _branches(model: nn.Module, tora: Tora, x: Tensor) -> tuple[Tensor, Tensor]:
    """What both losses look at, from one forward pass through the model and what is wrapped around it."""
    if tora.loss_at == "joint":
        joint = model(x)
        return joint, joint
    heads = [getattr(tora, name).head for name in tora.settings.branches]
    seen: list[Tensor] = []
    with hooked(model, [Edge("head", head, seen.append) for head in heads]):
        model(x)
    return seen[0], seen[-1]
