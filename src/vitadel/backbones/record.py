"""What must be known to build a model again; a checkpoint of ours carries it in its safetensors metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import timm
from timm.models import get_arch_pretrained_cfgs
from torch import nn

from vitadel.backbones.checkpoints import load_strict, read_checkpoint, read_metadata
from vitadel.backbones.families.small_images import adapt_to_small_images
from vitadel.errors import UserError, nearest_names
from vitadel.runtime.run_folder import write_atomically

if TYPE_CHECKING:
    from vitadel.backbones.classifier import Classifier

__all__ = [
    "DROP_RATES",
    "ModelRecord",
    "build_classifier",
    "create_backbone",
    "load_classifier",
    "near_models",
    "read_record",
    "save_classifier",
    "three_numbers",
]

DROP_RATES = ("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate")
"""Arguments of timm's models that no weight depends on: what is left out at random while they train."""

_METADATA_KEY = "vitadel"
_SCHEMA = 1


def three_numbers(values: Sequence[float], what: str) -> tuple[float, float, float]:
    """One number per colour channel; a single one stands for all three."""
    numbers = tuple(float(value) for value in values)
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3 or not all(math.isfinite(n) for n in numbers) or (what == "std" and min(numbers) <= 0):
        kind = "positive numbers" if what == "std" else "numbers"
        raise UserError(f"{what} must be three {kind}, one per colour channel (or one for all), got {tuple(values)}.")
    return numbers[0], numbers[1], numbers[2]


@dataclass(frozen=True)
class ModelRecord:
    """A model's name, its arguments and its preprocessing.

    `name` is a timm name, or the spec of a model that cannot be built by name ('wrapped', 'python:...', 'hf:...').
    `kwargs` go to `timm.create_model`. `small_images` is the patch size that the model was adapted to, if it was.
    `attention_factors`, one per softmax attention, multiply pre-softmax scores, if the model was trained with any.
    `input_size` is (height, width); images are resized to `input_size / crop_pct` and cropped by whoever reads them.
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

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 2:
            raise UserError(f"a classifier needs at least 2 classes, got num_classes={self.num_classes}.")
        # JSON has no tuples; without this a record would differ from itself after a round trip.
        as_tuples = {key: tuple(v) if isinstance(v, list) else v for key, v in self.kwargs.items()}
        object.__setattr__(self, "kwargs", as_tuples)
        object.__setattr__(self, "mean", three_numbers(self.mean, "mean"))
        object.__setattr__(self, "std", three_numbers(self.std, "std"))
        if self.input_size is not None:
            object.__setattr__(self, "input_size", tuple(self.input_size))
        if self.attention_factors is not None:
            object.__setattr__(self, "attention_factors", tuple(self.attention_factors))

    @property
    def normalises(self) -> bool:
        return (self.mean, self.std) != ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

    @property
    def can_be_rebuilt(self) -> bool:
        return ":" not in self.name and self.name != "wrapped"

    def to_json(self) -> str:
        try:
            return json.dumps({"schema": _SCHEMA, **asdict(self)}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the record of '{self.name}' cannot be written: {error}. Use plain numbers and texts."
            ) from error

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> ModelRecord:
        try:
            values = json.loads(text)
            schema = values.pop("schema")
            if schema == _SCHEMA:
                return cls(**values)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"{source}: its model record cannot be read ({error}). Save the model again.") from error
        raise UserError(
            f"{source}: its model record has schema {schema}, this version reads {_SCHEMA}. Update vitadel."
        )


def near_models(name: str, others: Iterable[str] = ()) -> str:
    """'; did you mean ...?' or '.': names that continue the one given come before those that merely resemble it."""
    known = [*timm.list_models(), *others]
    longer = [candidate for candidate in known if name and candidate.startswith(f"{name}_")]
    if longer:
        return f"; did you mean {', '.join(sorted(longer, key=lambda other: (len(other), other))[:3])}?"
    return nearest_names(name, known) or "."


def create_backbone(
    name: str, num_classes: int | None, kwargs: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    """`timm.create_model` with messages for people; a name may carry a tag, as in `deit_tiny_patch16_224.fb_in1k`."""
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise UserError(f"unknown model '{name}'{near_models(base)} See `vitadel list models`.")
    if tag:
        tags = [full.partition(".")[2] for full in get_arch_pretrained_cfgs(base)]
        if tag not in tags:
            allowed = ", ".join(tags) or "none"
            raise UserError(
                f"model '{base}' has no weights called '{tag}'{nearest_names(tag, tags) or '.'} Known: {allowed}."
            )
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **kwargs)
    except UserError:
        raise
    except (TypeError, AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"'{name}' cannot be built with {dict(kwargs)}: {error}. Check the arguments.") from error
    return model


def build_classifier(record: ModelRecord) -> Classifier:
    """The model of a record with fresh weights, in eval mode."""
    # The record is part of the classifier and must exist before it.
    from vitadel.backbones.classifier import Classifier

    if not record.can_be_rebuilt:
        raise UserError(
            f"a model recorded as '{record.name}' cannot be built from its record alone. Load the code that made it, "
            "as `python:package.module:function` or `hf:ORG/NAME`, and give this file as --weights."
        )
    backbone = create_backbone(record.name, record.num_classes, record.kwargs)
    if record.small_images is not None:
        size = record.input_size[0] if record.input_size else 32
        backbone = adapt_to_small_images(backbone, size, record.small_images)
    return Classifier(backbone, record).eval()


def read_record(path: str | Path) -> ModelRecord | None:
    """The record in a weight file, if it has one; the weights are not read."""
    text = read_metadata(path).get(_METADATA_KEY)
    return None if text is None else ModelRecord.from_json(text, str(path))


def save_classifier(classifier: Classifier, path: str | Path) -> None:
    """Write weights and record as one safetensors file: the old file or the new one is there, never a part.

    Keys are those of the backbone, so timm reads the file too.
    """
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    weights = {
        key: value.detach().cpu().clone().contiguous() for key, value in classifier.backbone.state_dict().items()
    }
    metadata = {_METADATA_KEY: classifier.record.to_json()}
    write_atomically(Path(path), safetensors.torch.save(weights, metadata=metadata))


def load_classifier(path: str | Path, dropping: Mapping[str, float] | None = None) -> Classifier:
    """The model that `save_classifier` wrote, in eval mode on the CPU; `dropping` has `DROP_RATES` to be set anew."""
    checkpoint = read_checkpoint(path)
    text = checkpoint.metadata.get(_METADATA_KEY)
    if text is None:
        raise UserError(
            f"'{path}' has no model record: it was not written by vitadel. "
            "Name the model and give the file as its weights: vitadel audit TIMM_NAME --weights FILE."
        )
    record = ModelRecord.from_json(text, str(path))
    classifier = build_classifier(replace(record, kwargs=record.kwargs | dict(dropping or {})))
    load_strict(classifier.backbone, checkpoint.weights, str(path))
    return classifier
