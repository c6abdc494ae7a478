"""The objective of Robustness Tokens (Pulfer et al., ECCV 2024): features with tokens match clean features without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.attacks.features import check_kind, feature_cosine, final_features
from vitadel.errors import UserError
from vitadel.types import Attack


@dataclass(frozen=True)
class RobustnessTokens:
    """Two minus the mean cosines of f(tokens, x) and of f(tokens, z) with f(x); labels are not used.

    The released code runs `features-30(paper=true)`, which sees the backbone without tokens, and takes the cosine of
    each channel over tokens (`axis: channel`); per token over channels is the natural reading and our default. For
    OpenCLIP it compares projected embeddings instead (`features: pooled`), by their ordinary cosine (`axis: token`).
    `log_regular` also logs the cosine of f(z) and f(x), without tokens, which takes one more pass: the column "regular"
    of the paper's table 3.
    """

    measured_as: ClassVar[str] = "cosine"
    adapter: ClassVar[str] = "tokens"

    attack: Attack
    axis: str = "token"
    features: str = "tokens"
    invariance: float = 1.0
    recovery: float = 1.0
    log_regular: bool = False

    def __post_init__(self) -> None:
        check_kind(self.features, self.axis)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        clean, attacked = self.measure(model, x, z)
        loss = self.invariance * (1 - clean.mean()) + self.recovery * (1 - attacked.mean())
        logged = {"loss": loss, "invariance": clean.mean().detach(), "recovery": attacked.mean().detach()}
        return logged | ({"regular": self._regular(model, x, z).mean()} if self.log_regular else {})

    @torch.no_grad()
    def _regular(self, model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        here, there = final_features(_find_tokened(model).classifier, torch.cat([x, z]), self.features).chunk(2)
        return feature_cosine(there, here, self.axis)

    def measure(self, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Per image, cosines of features with tokens, clean and attacked, with clean features without tokens."""
        with torch.no_grad():
            target = final_features(_find_tokened(model).classifier, x, self.features)
        clean, attacked = final_features(model, torch.cat([x, z]), self.features).chunk(2)
        return feature_cosine(clean, target, self.axis), feature_cosine(attacked, target, self.axis)


def _find_tokened(model: nn.Module) -> TokenClassifier:
    found = next((module for module in model.modules() if isinstance(module, TokenClassifier)), None)
    if found is None:
        raise UserError("the objective robustness_tokens trains tokens: give the recipe `adapter: {use: tokens}`")
    return found
