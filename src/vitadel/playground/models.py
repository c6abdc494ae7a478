"""Models of the playground: opened on first use, the latest few kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitadel.backbones.checkpoints import zoo_names
from vitadel.backbones.classifier import check_logits
from vitadel.data import open_dataset
from vitadel.data.sources.cifar_c import CIFAR10_CLASSES
from vitadel.data.sources.imagenet import imagenet_classes
from vitadel.data.sources.shapes import CLASSES
from vitadel.data.spec import parse_spec
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.audit.audit import DEFAULT_MODEL
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.types import Source

_MOST_OPEN = 3
_ZOO_CLASSES = {"shapes": CLASSES, "cifar10": CIFAR10_CLASSES}


@dataclass(frozen=True)
class ChosenImage:
    """The image to attack; `index` and `label` if it comes from the data."""

    picture: Image.Image
    name: str
    index: int | None = None
    label: str | None = None


@dataclass(frozen=True)
class OpenedModel:
    """A model with the names of its classes; `knows_data` if the playground's data has the same classes."""

    target: Target
    names: tuple[str, ...]
    knows_data: bool
    device: torch.device

    def pixels(self, picture: Image.Image) -> Tensor:
        """The picture as the model's own preprocessing makes it: (1, 3, height, width) in [0, 1]."""
        return self.target.preprocess(picture).to(self.device).float().div(255)[None]


@dataclass(frozen=True)
class ModelCache:
    """The models to choose from: those named by the user, opened with `options`, then those of the zoo.

    With `data_is_named` the user named the data, and a model with as many classes is assumed to have its classes.
    """

    named: Sequence[str]
    data: str
    device: torch.device
    data_root: Path | None = None
    data_is_named: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `open_target` for the named models: model_options, tokens, allow_readable."""

    _open: OrderedDict[str, OpenedModel] = field(default_factory=OrderedDict)
    _sources: dict[str, Source] = field(default_factory=dict)

    @property
    def specs(self) -> list[str]:
        """Those named by the user, then those of the zoo, first the ones for these data."""
        return list(dict.fromkeys([*self.named, *sorted(zoo_names(), key=lambda spec: not self._is_for_data(spec))]))

    @property
    def pair(self) -> tuple[str, str]:
        """The first choice of the page: a model, and one trained without attacks to compare it with."""
        default = DEFAULT_MODEL if self._is_for_data(DEFAULT_MODEL) else self.specs[0]
        first = self.named[0] if self.named else default
        others = [spec for spec in self.specs if spec != first] or [first]
        plain = [spec for spec in others if spec.endswith("-standard") and self._is_for_data(spec)]
        return first, (plain or others)[0]

    def _is_for_data(self, spec: str) -> bool:
        kind = parse_spec(self.data, root=Path(), split=None).kind
        return spec.startswith(f"zoo:{kind}-")

    @property
    def source(self) -> Source:
        """The data whose images can be picked by number."""
        if self.data not in self._sources:
            self._sources[self.data] = open_dataset(self.data, root=self.data_root, skip_bad=True)
        return self._sources[self.data]

    def image(self, number: int) -> ChosenImage:
        """A sample of the data."""
        if not 0 <= number < len(self.source):
            raise UserError(f"{self.data} has images number 0 to {len(self.source) - 1}, got {number}")
        picture = self.source.read([number])[0]
        if isinstance(picture, Exception):
            raise UserError(f"{self.source.name(number)} cannot be read: {picture}. Choose another number.")
        label = int(self.source.labels()[number])
        known = self.source.classes[label] if 0 <= label < len(self.source.classes) else None
        return ChosenImage(picture, self.source.name(number), number, known)

    def open(self, spec: str) -> OpenedModel:
        """The model of this name; only listed names are opened, because names reach files and code."""
        if spec not in self.specs:
            near = nearest_names(spec, self.specs) or "."
            raise UserError(
                f"no model {spec!r} here{near} There are: {', '.join(self.specs)}. Name others when starting."
            )
        if spec not in self._open:
            self._open[spec] = self._load(spec)
        self._open.move_to_end(spec)
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[spec]

    def _load(self, spec: str) -> OpenedModel:
        options: Mapping[str, Any] = self.options if spec in self.named else {}
        # A zoo model of other data may be shown any image here: its answers are not counted, so its data stay unnamed.
        known = self._is_for_data(spec) or not spec.startswith("zoo:")
        data = self.data if known else self.source
        target = open_target(spec, data, data_root=self.data_root, skip_bad=True, match=False, **options)
        target.model.to(self.device)
        target.model.eval()
        with torch.no_grad():
            logits = target.model(torch.zeros(1, 3, *target.preprocess.shape, device=self.device))
        check_logits(logits)
        names = class_names(spec, logits.shape[1], self.source.classes if self.data_is_named else ())
        return OpenedModel(target, names, names == tuple(self.source.classes), self.device)


def class_names(spec: str, count: int, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of a zoo model's data set; else `given`, or ImageNet's, if there are `count` of them; else numbers."""
    kind, _, name = spec.partition(":")
    own = _ZOO_CLASSES.get(name.partition("-")[0], ()) if kind == "zoo" else ()
    fitting = (names for names in (own, given, () if kind == "zoo" else imagenet_classes()) if len(names) == count)
    return tuple(next(fitting, [f"class {number}" for number in range(count)]))
