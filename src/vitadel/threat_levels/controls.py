"""Controls: changes that are no defense, judged beside the tokens under the attack that knows none of them.

An image crafted on one model at a tiny budget fails on many slightly different models. Only what tokens gain beyond
these controls is learned robustness.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.runtime.rng import SampleRNG
from vitadel.threat_levels.levels import Head

NO_TOKENS = "no tokens"
"""The control that is the public backbone itself."""


class Resized(nn.Module):
    """A model behind a tiny resize: images are enlarged by `ratio` and shrunk back, bilinearly."""

    def __init__(self, model: nn.Module, ratio: float = 230 / 224) -> None:
        super().__init__()
        self.model = model
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        size = [max(1, round(side * self.ratio)) for side in x.shape[-2:]]
        if size == list(x.shape[-2:]):
            size = [side + 1 for side in size]  # on small images the ratio would round away
        larger = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
        logits: Tensor = self.model(F.interpolate(larger, size=x.shape[-2:], mode="bilinear", align_corners=False))
        return logits


def add_weight_noise(model: nn.Module, share: float = 0.01, seed: int = 0) -> nn.Module:
    """Copy the model and change its weights of more than one axis by about `share` of themselves."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for number, weight in enumerate(parameter for parameter in changed.parameters() if parameter.dim() > 1):
            noise = SampleRNG.of_samples(seed, [number]).stream("weight noise").normal(weight.numel())
            weight.mul_(1 + share * noise.view_as(weight).to(weight))
    return changed


def untrained_controls(victim: TokenClassifier, head: Head, seed: int, scale: float = 0.01) -> dict[str, nn.Module]:
    """The controls that need no training, by name; untrained tokens are `scale` times normal noise."""
    classifier, (count, width) = victim.classifier, victim.tokens.shape

    def with_tokens(tokens: Tensor) -> nn.Module:
        places: dict[str, Any] = {"placement": victim.placement, "layers": victim.layers}
        return head(TokenClassifier(classifier, tokens.to(victim.tokens.device), **places))

    return {
        NO_TOKENS: head(classifier),
        "untrained tokens": with_tokens(fresh_tokens(width, count, scale, seed)),
        "zero tokens": with_tokens(torch.zeros(count, width)),
        "tiny resize": Resized(head(classifier)),
        "tiny weight noise": add_weight_noise(head(classifier), seed=seed),
    }
