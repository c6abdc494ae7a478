"""Linear heads on disk: alone, as safetensors, with what they sit on in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from vitadel.adapters.adapter_file import backbone_fingerprint
from vitadel.backbones.checkpoints import read_checkpoint, read_metadata
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.heads.linear_probe import Probe, linear_layer, record_of
from vitadel.runtime.run_folder import write_atomically

__all__ = ["head_about", "load_head", "save_head"]

_METADATA_KEY = "vitadel-probe"
_SCHEMA = 1


def save_head(probe: Probe, path: str | Path, more: Mapping[str, Any] | None = None) -> None:
    """The head alone as safetensors, with what it sits on, and `more`, in the metadata; the model is not written."""
    about = {
        **(more or {}),
        "schema": _SCHEMA,
        "model": _record_name(probe.model),
        "blocks": probe.blocks,
        "average": probe.average,
        "classes": list(probe.classes),
    }
    weights = {key: value.detach().cpu().contiguous() for key, value in probe.head.state_dict().items()}
    write_atomically(Path(path), safetensors.torch.save(weights, metadata={_METADATA_KEY: json.dumps(about)}))


def head_about(path: str | Path) -> dict[str, Any]:
    """What `save_head` wrote beside the weights."""
    text = read_metadata(path).get(_METADATA_KEY)
    if text is None:
        raise UserError(
            f"'{path}' is no probe's head. Give the weights/head.safetensors of a run of `vitadel probe` (in "
            "Python: what save_head wrote)."
        )
    try:
        about = json.loads(text)
    except ValueError as error:
        raise UserError(f"'{path}' is a damaged probe's head ({error!r}). Train and save it again.") from error
    return about if isinstance(about, dict) else {}


def load_head(path: str | Path, model: nn.Module) -> Probe:
    """The head of `save_head` on `model` and on its device; refused if the model has another name or width.

    The same model with and without extra tokens has one name: an attacker may be given the defender's head.
    """
    checkpoint, about = read_checkpoint(path), head_about(path)
    try:
        schema, sits_on, blocks, average = about["schema"], about["model"], int(about["blocks"]), bool(about["average"])
        head = linear_layer(checkpoint.weights["weight"], checkpoint.weights["bias"])
        classes = [str(name) for name in about["classes"]]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"'{path}' is a damaged probe's head ({error!r}). Train and save it again.") from error
    if schema != _SCHEMA:
        raise UserError(f"'{path}' is a probe's head of schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
    here = _record_name(model)
    trained_on, bare = about.get("backbone_fingerprint"), getattr(model, "classifier", model)
    if trained_on is not None and isinstance(bare, Classifier):  # names differ for the same weights, e.g. by a tag
        if trained_on != backbone_fingerprint(bare):
            raise UserError(
                f"'{path}' is a head for other weights, those of '{sits_on}'; the model is '{here}'. Give the model "
                "that it was trained on."
            )
    elif sits_on is not None and here is not None and sits_on != here:
        raise UserError(f"'{path}' is a head for '{sits_on}', the model is '{here}'. Give the model it was trained on.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return Probe(model, head.to(device), blocks, average, classes)


def _record_name(model: nn.Module) -> str | None:
    record = record_of(model)
    return None if record is None else record.name
