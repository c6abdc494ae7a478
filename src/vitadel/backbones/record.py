"""What is needed to rebuild a model; our checkpoints carry it in their safetensors metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vitadel.errors import UserError
from vitadel.runtime.safe_reading import parse_json_object, validated

_SCHEMA = 1
ASSUMED, LOOKS_LIKE = "assumed", "looks like"
"""Notes on a foreign file: what it leaves open and was taken from the model's name; what it may be."""
_PASSING_NOTES = ("about", ASSUMED, LOOKS_LIKE, "published")
_DESCRIPTIONS = ("outputs", "normalization")  # notes for readers, which change no output
_LATER = ("classes", "classes_from", "training")
LARGEST_SIDE = 16384
"""Pixels; a batch of larger images does not fit into any memory."""


def three_numbers(values: Sequence[float], what: str) -> tuple[float, float, float]:
    """One number per color channel; a single number is used for all three."""
    numbers = tuple(float(value) for value in values)
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or not all(math.isfinite(n) for n in numbers) or (what == "std" and min(numbers) <= 0):
        kind = "positive numbers" if what == "std" else "numbers"
        raise UserError(f"{what} must be three {kind}, one per color channel (or one for all), got {tuple(values)}.")
    return numbers[0], numbers[1], numbers[2]


@dataclass(frozen=True)
class ModelRecord:
    """A model's name, its arguments and its preprocessing.

    `name` is a timm name, or the spec of a model that cannot be built by name ('wrapped', 'python:...', 'hf:...').
    `kwargs` go to `timm.create_model`. `small_images` is the patch size that the model was adapted to, if it was.
    `attention_factors`, one per softmax attention, multiply pre-softmax scores, if the model was trained with them.
    `classes` are the names of the outputs and `classes_from` says where they are known from; None if not known.
    `training` is what the training measured on held-out images: clean, n, data.
    `input_size` is (height, width); images are resized to `input_size / crop_pct` and cropped when they are read.
    """

    name: str
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    input_size: tuple[int, int] | None = None
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    small_images: int | None = None
    attention_factors: tuple[float, ...] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    classes_from: str | None = None
    training: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 2:
            raise UserError(f"a classifier needs at least 2 classes, got num_classes={self.num_classes}.")
        # JSON has no tuples; a record must equal itself after a round trip.
        as_tuples = {key: tuple(v) if isinstance(v, list) else v for key, v in self.kwargs.items()}
        object.__setattr__(self, "kwargs", as_tuples)
        object.__setattr__(self, "mean", three_numbers(self.mean, "mean"))
        object.__setattr__(self, "std", three_numbers(self.std, "std"))
        if self.input_size is not None:
            if not all(1 <= side <= LARGEST_SIDE for side in self.input_size):
                raise UserError(f"input_size must be from 1 to {LARGEST_SIDE} pixels, got {self.input_size}.")
            object.__setattr__(self, "input_size", tuple(self.input_size))
        for name in ("attention_factors", "classes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def lasting_notes(self) -> dict[str, str]:
        """The notes that belong to the model: not its description, and not how a file was opened this time."""
        return {key: note for key, note in self.notes.items() if key not in _PASSING_NOTES}

    @property
    def assumptions(self) -> dict[str, str]:
        """The notes on what was not stated when the model was opened and had to be assumed."""
        return {key: self.notes[key] for key in (ASSUMED, LOOKS_LIKE) if key in self.notes}

    @property
    def normalizes(self) -> bool:
        return (self.mean, self.std) != ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

    @property
    def can_be_rebuilt(self) -> bool:
        return ":" not in self.name and self.name != "wrapped"

    def without_names(self) -> ModelRecord:
        """The record without what does not change an output: class names, descriptions and measurements."""
        notes = {key: note for key, note in self.lasting_notes.items() if key not in _DESCRIPTIONS}
        return replace(self, notes=notes, classes=None, classes_from=None, training=None)

    def to_json(self) -> str:
        try:
            # Fields of later versions are left out where they say nothing: fingerprints of old models stay.
            known = {name: value for name, value in asdict(self).items() if name not in _LATER or value is not None}
            return json.dumps({"schema": _SCHEMA, **known}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the record of '{self.name}' cannot be written: {error}. Use plain numbers and strings."
            ) from error

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> ModelRecord:
        values = parse_json_object(text, f"{source}: its model record")
        schema = values.pop("schema", None)
        if schema != _SCHEMA:
            raise UserError(
                f"{source}: its model record has schema {schema}, this version reads {_SCHEMA}. Update vitadel."
            )
        return validated(cls, values, f"{source}: its model record")
