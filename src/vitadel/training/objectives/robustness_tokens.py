"""Robustness Tokens (Pulfer et al., ECCV 2024): with the tokens, clean and attacked images look as they did without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.attacks.features import check_kind, feature_cosine, final_features
from vitadel.errors import UserError
from vitadel.types import Attack

__all__ = ["RobustnessTokens"]


@dataclass(frozen=True)
class RobustnessTokens:
    """Two minus the cosines of f(tokens, x) and of f(tokens, z) with f(x), each a mean over the batch; no labels.

    The released code runs `features-30(paper=true)`, which sees the backbone without tokens, and takes the cosine of
    each channel over tokens (`axis: channel`); per token over channels is the natural reading and our default. For
    OpenCLIP it compares projected embeddings instead (`features: pooled`), by their ordinary cosine (`axis: token`).
    """

    measured_as: ClassVar[str] = "cosine"
    adapter: ClassVar[str] = "tokens"

    attack: Attack
    axis: str = "token"
    features: str = "tokens"
    invariance: float = 1.0
    recovery: float = 1.0

    def __post_init__(self) -> None:
        check_kind(self.features, self.axis)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        kept, regained = self.measure(model, x, z)
        loss = self.invariance * (1 - kept.mean()) + self.recovery * (1 - regained.mean())
        return {"loss": loss, "invariance": kept.mean().detach(), "recovery": regained.mean().detach()}

    def measure(self, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines of features with tokens, clean and attacked, with token-free clean ones; one of each per image."""
        with torch.no_grad():
            target = final_features(_tokened(model).classifier, x, self.features)
        clean, attacked = final_features(model, torch.cat([x, z]), self.features).chunk(2)
        return feature_cosine(clean, target, self.axis), feature_cosine(attacked, target, self.axis)


def _tokened(model: nn.Module) -> TokenClassifier:
    """Inside what several processes wrap around it."""
    found = next((module for module in model.modules() if isinstance(module, TokenClassifier)), None)
    if found is None:
        raise UserError("the objective robustness_tokens trains tokens: give the recipe `adapter: {use: tokens}`")
    return found
