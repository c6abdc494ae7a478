"""The usual case: every weight of the classifier is trained, and saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import load_classifier, save_classifier

__all__ = ["WholeModel"]


@dataclass(frozen=True)
class WholeModel:
    secret: ClassVar[bool] = False

    def attach(self, model: Classifier) -> nn.Module:
        return model

    def shown(self, adapted: nn.Module) -> nn.Module:
        return adapted

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        return adapted.state_dict()

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None:
        adapted.load_state_dict(state)

    def save(self, adapted: nn.Module, path: Path) -> None:
        save_classifier(cast(Classifier, adapted), path)

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        return load_classifier(path)
