"""The common form of adapter files: trained tensors as safetensors, with a JSON description that names the backbone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vitadel.backbones.checkpoints import metadata_in, tensor_hash
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.safe_reading import parse_json_object

_SCHEMA = 1
_SIZED = "pos_embed"  # resampled for other image sizes
_HEADS = ("head.", "head_dist.")  # adapters end before them, and downstream tasks replace them


@dataclass(frozen=True)
class AdapterFile:
    """One kind of file: `what` it is in messages, and the metadata key of its description."""

    what: str
    key: str

    def pack(self, weights: dict[str, Tensor], classifier: Classifier, width: int, about: Mapping[str, Any]) -> bytes:
        """The content of a file. `about` must be plain values; the backbone is described, not stored."""
        if not all(bool(each.isfinite().all()) for each in weights.values()):
            raise UserError(f"{self.what}: NaN or infinite values, because the training diverged. Nothing was written.")
        backbone = {"backbone": classifier.record.name, "backbone_fingerprint": backbone_fingerprint(classifier)}
        try:
            text = json.dumps({"schema": _SCHEMA, "width": width, **backbone, **about}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.what}: the settings cannot be written: {error}. Use plain numbers and strings."
            ) from error
        content: bytes = safetensors.torch.save(weights, metadata={self.key: text})
        return content

    def unpack(self, path: str | Path, content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Description and tensors, without running code. Takes bytes, as the file may change between two reads."""
        with self.reading(path):
            text = metadata_in(content).get(self.key)
            about = None if text is None else parse_json_object(text, "its description")
            schema = None if about is None else about["schema"]
            weights = safetensors.torch.load(content)
        if about is None:
            raise UserError(f"'{path}' is a safetensors file, but not {self.what}. Give a file that vitadel wrote.")
        if schema != _SCHEMA:
            raise UserError(f"'{path}' has schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
        return about, weights

    @contextmanager
    def reading(self, path: str | Path) -> Iterator[None]:
        """Report missing and wrong fields that are read inside the block as damage."""
        try:
            yield
        except (SafetensorError, RecursionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.damaged(path, f"{type(error).__name__}: {error}") from error

    def damaged(self, path: str | Path, reason: str) -> UserError:
        return UserError(
            f"'{path}' cannot be read as {self.what}: {reason}. It is damaged, cut short, or of another kind. Copy it "
            "again from where it was saved."
        )

    def check_backbone(self, path: str | Path, about: Mapping[str, Any], classifier: Classifier, width: int) -> None:
        """Refuse a classifier with another backbone; image size and head may differ."""
        name, theirs = classifier.record.name, about.get("backbone", "an unknown model")
        if about.get("width") != width:
            same = " (same name, other arguments)" if name == theirs else ""
            raise UserError(
                f"'{path}' is for a backbone {about.get('width')} wide, '{theirs}'; '{name}' is {width} wide{same}. "
                "Load the backbone it was made for."
            )
        if about.get("backbone_fingerprint") != backbone_fingerprint(classifier):
            raise UserError(
                f"'{path}' was trained on other weights, those of '{theirs}'; this is '{name}'. Load that backbone "
                "with the same weights and precision (only image size and head may differ), or train for this one."
            )


def backbone_fingerprint(classifier: Classifier) -> str:
    """A hash of the weights that adapters interact with: all except the head and position embeddings."""
    weights = classifier.backbone.state_dict().items()
    return tensor_hash({k: v for k, v in weights if not k.startswith(_HEADS) and k.rpartition(".")[2] != _SIZED})
