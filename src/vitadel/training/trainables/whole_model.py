"""The default adapter: train and save all weights of the classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from torch import Tensor, nn

from vitadel.backbones.checkpoints import load_classifier, load_strict, read_checkpoint, read_record, save_classifier
from vitadel.backbones.classifier import Classifier


@dataclass(frozen=True)
class WholeModel:
    secret: ClassVar[bool] = False
    trains_model: ClassVar[bool] = True

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
        classifier = cast(Classifier, adapted)
        if classifier.record.can_be_rebuilt:
            return load_classifier(path)
        # A user's own module cannot be rebuilt from a record, and not every module can be copied: load into this one.
        load_strict(classifier.backbone, read_checkpoint(path).weights, str(path))
        return Classifier(classifier.backbone, read_record(path) or classifier.record).eval()
