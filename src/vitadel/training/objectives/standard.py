"""Ordinary training, on clean images only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.training.objectives.terms import accuracy, check_share, cross_entropy
from vitadel.types import Attack

__all__ = ["Standard"]


@dataclass(frozen=True)
class Standard:
    """Cross-entropy of the clean images: what robust training is compared with."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_share("label_smoothing", self.label_smoothing)

    @property
    def attack(self) -> Attack | None:
        return None

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        loss = cross_entropy(logits, y, self.label_smoothing).mean()
        return {"loss": loss, "natural": loss.detach(), "clean_accuracy": accuracy(logits, y)}
