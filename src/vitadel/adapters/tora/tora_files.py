"""TORA on disk: the trained parameters as safetensors, tied to the backbone, and one more file per trade-off.

`save_tora` writes what phase 1 trained. For each lambda, `save_fusion` writes what phase 2 may change: the fusion and
the heads. It only fits the adapters it was trained with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitadel.adapters.adapter_file import AdapterFile
from vitadel.adapters.tora.tora_settings import ToraSettings, check_host, check_trade_off
from vitadel.adapters.tora.tora_vit import Tora, part_of
from vitadel.backbones.checkpoints import read_metadata, tensor_hash
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.safe_reading import parse_json_object

__all__ = [
    "Fusion",
    "backbone_of_parts",
    "classes_of_parts",
    "fusion_of",
    "interpolate_fusions",
    "load_tora",
    "parts_file",
    "put_fusion",
    "read_fusion",
    "save_fusion",
    "save_tora",
]

_METADATA_KEY = "vitadel_tora"
_PARTS, _FUSION = "parts", "fusion"
_FILES = {
    _PARTS: AdapterFile("the parts of TORA", _METADATA_KEY),
    _FUSION: AdapterFile("a fusion of TORA", _METADATA_KEY),
}


@dataclass(frozen=True)
class Fusion:
    """A fusion with its heads. `trade_off` is its lambda, None if interpolated; `base` identifies its adapters."""

    weights: Mapping[str, Tensor] = field(repr=False)
    trade_off: float | None
    base: str
    training: Mapping[str, Any] = field(default_factory=dict)


def save_tora(tora: Tora, path: str | Path, training: Mapping[str, Any] | None = None) -> None:
    """Write all trained parameters, without the backbone. `training` must be plain values."""
    _write(tora, path, _PARTS, _trained(tora), tora.trade_off, training)


def save_fusion(
    tora: Tora, path: str | Path, trade_off: float | None = None, training: Mapping[str, Any] | None = None
) -> None:
    """Write only fusion and heads, trained for a `trade_off` (by default the model's)."""
    lean = tora.trade_off if trade_off is None else check_trade_off(trade_off)
    _write(tora, path, _FUSION, dict(fusion_of(tora).weights), lean, training)


def load_tora(path: str | Path, classifier: Classifier, fusion: str | Path | Fusion | None = None) -> Tora:
    """Add the adapters of a file to the classifier they were trained for, with another fusion if given.

    Image size and head may differ.
    """
    about, weights = _read(path, _PARTS)
    check_host(classifier)
    _FILES[_PARTS].check_backbone(path, about, classifier, _width(classifier))
    with _FILES[_PARTS].reading(path):
        settings = ToraSettings(**about["settings"])
        classes, trade_off = int(about["num_classes"]), about["trade_off"]
        if about.get("attention_factors") is not None:
            classifier.set_attention_factors([float(each) for each in about["attention_factors"]])
    tora = Tora(classifier, settings, num_classes=classes, trade_off=trade_off)
    _fill(tora, weights, set(_trained(tora)), path)
    if fusion is not None:
        put_fusion(tora, fusion)
    return tora.eval()


def parts_file(start: str | Path) -> Path:
    """The file of phase 1: a run folder's best epoch, or the file itself."""
    path = Path(os.path.expanduser(start))
    return path / "weights" / "best.safetensors" if path.is_dir() else path


def backbone_of_parts(path: str | Path) -> str | None:
    """The MODEL that a parts file of TORA names, which `save_tora` got as `training["model"]`; otherwise None."""
    training = _description(path).get("training")
    model = training.get("model") if isinstance(training, dict) else None
    return None if model is None else str(model)


def classes_of_parts(path: str | Path) -> int | None:
    """The number of classes that the parts in a file were trained for; None for other files."""
    classes = _description(path).get("num_classes")
    return classes if isinstance(classes, int) else None


def _description(path: str | Path) -> dict[str, Any]:
    text = read_metadata(path).get(_METADATA_KEY)
    return {} if text is None else parse_json_object(text, f"'{path}'")


def read_fusion(path: str | Path) -> Fusion:
    """Read a fusion and check it for damage; `put_fusion` checks whether it fits."""
    return _as_fusion(path, *_read(path, _FUSION))


def fusion_of(tora: Tora) -> Fusion:
    """A copy of the model's current fusion."""
    if not tora.settings.fuses:
        raise UserError(
            f"kind '{tora.settings.kind}' has no fusion to save separately. Save the whole of it for each lambda with "
            "save_tora."
        )
    weights = {name: each for name, each in _trained(tora).items() if _of_fusion(name)}
    return Fusion(weights, tora.trade_off, _base(tora))


def put_fusion(tora: Tora, fusion: str | Path | Fusion) -> None:
    """Replace a model's fusion by another one that was trained with the same adapters."""
    if isinstance(fusion, Fusion):
        source, found = "the fusion", fusion
    else:
        source = f"'{fusion}'"
        about, weights = _read(fusion, _FUSION)
        _FILES[_FUSION].check_backbone(fusion, about, tora.classifier, _width(tora.classifier))
        found = _as_fusion(fusion, about, weights)
    own = fusion_of(tora)
    if found.base != own.base:
        raise UserError(
            f"{source} was trained with other adapters than this model's. Load it with the parts of the first phase "
            "of its own training."
        )
    _fill(tora, found.weights, set(own.weights), source)
    tora.trade_off = found.trade_off


def interpolate_fusions(first: Fusion, second: Fusion, t: float) -> Fusion:
    """Interpolate between two fusions of the same training at test time: 0 is the first, 1 the second."""
    if not 0 <= t <= 1:
        raise UserError(
            f"t, the position between two fusions, must be in [0, 1], got {t}: 0 is the first, 1 the second."
        )
    if first.base != second.base or first.weights.keys() != second.weights.keys():
        raise UserError("these two fusions were trained with different adapters and cannot be interpolated.")
    if t in (0, 1):
        return second if t else first
    between = {name: torch.lerp(each, second.weights[name], t) for name, each in first.weights.items()}
    ends = {"from": first.trade_off, "to": second.trade_off, "at": t}
    return Fusion(between, None, first.base, {"interpolated": ends})


def _trained(tora: Tora) -> dict[str, Tensor]:
    """Copies by name, on the CPU."""
    return {
        name: each.detach().cpu().clone().contiguous()
        for name, each in tora.named_parameters()
        if part_of(name) != "backbone"
    }


def _of_fusion(name: str) -> bool:
    return part_of(name) == "fusion" or name.split(".")[1] == "head"


def _base(tora: Tora) -> str:
    """A hash of what a fusion belongs to: adapters, tokens, settings, and attention factors if there are any."""
    fixed = {name: each for name, each in _trained(tora).items() if not _of_fusion(name)}
    factors = tora.classifier.record.attention_factors
    scaled = {} if factors is None else {"attention_factors": factors}
    return tensor_hash(fixed, json.dumps(asdict(tora.settings) | {"joint": None} | scaled, sort_keys=True))


def _write(
    tora: Tora,
    path: str | Path,
    content: str,
    weights: dict[str, Tensor],
    trade_off: float | None,
    training: Mapping[str, Any] | None,
) -> None:
    about = {
        "content": content,
        "num_classes": tora.num_classes,
        "settings": asdict(tora.settings),
        "trade_off": trade_off,
        "attention_factors": tora.classifier.record.attention_factors,
        "base": _base(tora),
        "fingerprint": tensor_hash(weights),
        "training": dict(training or {}),
    }
    write_atomically(Path(path), _FILES[content].pack(weights, tora.classifier, _width(tora.classifier), about))


def _read(path: str | Path, content: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and weights of a file with the wanted `content`, checked for damage."""
    file = _FILES[content]
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}. Give {file.what}.") from error
    about, weights = file.unpack(path, raw)
    with file.reading(path):
        other, trade_off = str(about["content"]), about.get("trade_off")
    if other != content:
        raise UserError(f"'{path}' holds {_FILES[other].what if other in _FILES else other}; give {file.what}.")
    if trade_off is not None:
        if isinstance(trade_off, bool) or not isinstance(trade_off, int | float):
            raise file.damaged(path, "its lambda is not a number")
        check_trade_off(trade_off)
    if tensor_hash(weights) != about.get("fingerprint"):
        raise file.damaged(path, "its weights do not match its fingerprint")
    return about, weights


def _as_fusion(path: str | Path, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Fusion:
    with _FILES[_FUSION].reading(path):
        return Fusion(weights, about["trade_off"], str(about["base"]), dict(about["training"]))


def _fill(tora: Tora, weights: Mapping[str, Tensor], wanted: set[str], path: str | Path) -> None:
    own = dict(tora.named_parameters())
    if set(weights) != wanted or any(weights[name].shape != own[name].shape for name in wanted):
        odd = sorted(set(weights) ^ wanted) or [name for name in wanted if weights[name].shape != own[name].shape]
        raise UserError(
            f"{path}: its parameters do not fit this model, e.g. '{odd[0]}'. It was made for another number of classes "
            "or blocks, or is damaged."
        )
    with torch.no_grad():
        for name in wanted:
            own[name].copy_(weights[name])


def _width(classifier: Classifier) -> int:
    width: Any = classifier.backbone.embed_dim
    return int(width)
