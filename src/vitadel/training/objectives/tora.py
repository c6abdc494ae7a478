"""TORA-ViT (Li & Xu, CVPR 2023): one branch learns from clean images, one from attacked ones, then what joins them.

Phase 1: each loss teaches its own branch, and both teach the fusion. Phase 2: the fusion alone learns from the weighted
sum of both losses; which phase it is, and the weight, is told by the model's lambda.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.adapters.tora.tora_vit import Tora, trainable_parameters
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.training.objectives.terms import accuracy, check_share, check_weight, cross_entropy, kl_divergence
from vitadel.types import Attack

__all__ = ["TwoBranches"]


@dataclass(frozen=True)
class TwoBranches:
    """L_ACC = CE(f_ACC(x), y) and L_ROB = CE(f_ROB(z), y); with `beta`, L_ROB is that of TRADES on the robust branch.

    Attacks see the robust branch alone. AdapterFusion's pull of its value matrices towards the identity is added for
    that baseline.
    """

    adapter: ClassVar[str] = "tora"

    attack: Attack
    beta: float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_share("label_smoothing", self.label_smoothing)
        if self.beta is not None:
            check_weight("beta", self.beta)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        tora = _inside(model)
        independent = tora.trade_off is None
        acc, rob = _branches(model, tora, x)
        clean = cross_entropy(acc, y, self.label_smoothing).mean()
        taught: dict[str, Tensor] = {}
        if independent and torch.is_grad_enabled():
            # At once, so that only one pass's activations are held, unless TRADES needs this one's again.
            taught = _gradients(clean, trainable_parameters(tora, 1, "acc"), keep=self.beta is not None)
        _, perturbed = _branches(model, tora, z)
        robust = self._robust(rob, perturbed, y)
        if not independent:
            weight = tora.trade_off or 0.0
            loss = weight * robust + (1 - weight) * clean + tora.identity_penalty()
        elif torch.is_grad_enabled():
            loss = clean.detach() + robust.detach() + self._pulled(tora, taught, robust)
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

    def _pulled(self, tora: Tora, taught: Mapping[str, Tensor], robust: Tensor) -> Tensor:
        """Zero, with the gradients that each loss has for the parameters that it may teach.

        A product with numbers, instead of two backward passes, so that the loop, its scaling of losses and several
        processes need to know nothing of masks.
        """
        also = _gradients(robust, trainable_parameters(tora, 1, "rob"))
        named = dict(tora.named_parameters())
        penalty = tora.identity_penalty()
        pull = penalty + sum(
            ((named[name] * gradient).sum() for each in (taught, also) for name, gradient in each.items()),
            start=penalty.new_zeros(()),
        )
        return pull - pull.detach() + penalty.detach()


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter], keep: bool = False) -> dict[str, Tensor]:
    """Of those parameters that the loss depends on."""
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
    return {name: each.detach() for name, each in zip(parameters, found, strict=True) if each is not None}


def _branches(model: nn.Module, tora: Tora, x: Tensor) -> tuple[Tensor, Tensor]:
    """What both heads give, from one pass through whatever is wrapped around the model."""
    heads = [getattr(tora, name).head for name in tora.settings.branches]
    seen: list[Tensor] = []
    with hooked(model, [Edge("head", head, seen.append) for head in heads]):
        model(x)
    return seen[0], seen[-1]


def _inside(model: nn.Module) -> Tora:
    found = next((module for module in model.modules() if isinstance(module, Tora)), None)
    if found is None:
        raise UserError("the objective tora trains two branches: give the recipe `adapter: {use: tora}`")
    return found
