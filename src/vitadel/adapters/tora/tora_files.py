"""TORA on disk: the trained parameters as safetensors, tied to the backbone, and one more file per trade-off.

`save_tora` writes what phase 1 trained. For each lambda, `save_fusion` writes what phase 2 may change: the fusion and
the heads. It only fits the adapters it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from vitadel.adapters.tokens.token_files import backbone_fingerprint
from vitadel.adapters.tora.tora_settings import ToraSettings, check_host, check_trade_off
from vitadel.adapters.tora.tora_vit import Tora, part_of
from vitadel.backbones.checkpoints import metadata_in, read_metadata, tensor_hash
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically

__all__ = [
    "Fusion",
    "backbone_of_parts",
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
_SCHEMA = 1
_PARTS, _FUSION = "parts", "fusion"
_WHAT = {_PARTS: "the parts of TORA", _FUSION: "a fusion of TORA"}


@dataclass(frozen=True)
class Fusion:
    """A fusion with its heads. `trade_off` is its lambda, None if interpolated; `base` identifies its adapters."""

    weights: Mapping[str, Tensor] = field(repr=False)
    trade_off: float | None
    base: str
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _File:
    about: Mapping[str, Any]
    weights: dict[str, Tensor]


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
    file = _read(path, _PARTS)
    check_host(classifier)
    _check_backbone(path, file.about, classifier)
    try:
        settings = ToraSettings(**file.about["settings"])
        classes, trade_off = int(file.about["num_classes"]), file.about["trade_off"]
        if file.about.get("attention_factors") is not None:
            classifier.set_attention_factors([float(each) for each in file.about["attention_factors"]])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, _PARTS, f"{type(error).__name__}: {error}") from error
    tora = Tora(classifier, settings, num_classes=classes, trade_off=trade_off)
    _fill(tora, file.weights, set(_trained(tora)), path)
    if fusion is not None:
        put_fusion(tora, fusion)
    return tora.eval()


def parts_file(start: str | Path) -> Path:
    """The file of phase 1: a run folder's best epoch, or the file itself."""
    path = Path(start).expanduser()
    return path / "weights" / "best.safetensors" if path.is_dir() else path


def backbone_of_parts(path: str | Path) -> str | None:
    """The MODEL that a parts file of TORA names, which `save_tora` got as `training["model"]`; otherwise None."""
    text = read_metadata(path).get(_METADATA_KEY)
    model = None if text is None else json.loads(text).get("training", {}).get("model")
    return None if model is None else str(model)


def read_fusion(path: str | Path) -> Fusion:
    """Read a fusion and check it for damage; `put_fusion` checks whether it fits."""
    return _as_fusion(path, _read(path, _FUSION))


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
        file = _read(fusion, _FUSION)
        _check_backbone(fusion, file.about, tora.classifier)
        found = _as_fusion(fusion, file)
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
    if not all(bool(each.isfinite().all()) for each in weights.values()):
        raise UserError(
            "the trained parameters hold NaN or infinite values: the training diverged. Nothing was written."
        )
    about = {
        "schema": _SCHEMA,
        "content": content,
        "backbone": tora.classifier.record.name,
        "backbone_fingerprint": backbone_fingerprint(tora.classifier),
        "width": _width(tora.classifier),
        "num_classes": tora.num_classes,
        "settings": asdict(tora.settings),
        "trade_off": trade_off,
        "attention_factors": tora.classifier.record.attention_factors,
        "base": _base(tora),
        "fingerprint": tensor_hash(weights),
        "training": dict(training or {}),
    }
    try:
        text = json.dumps(about, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the settings of the training cannot be written: {error}. Use plain numbers and strings."
        ) from error
    write_atomically(Path(path), safetensors.torch.save(weights, metadata={_METADATA_KEY: text}))


def _read(path: str | Path, content: str) -> _File:
    """Read a file with the wanted `content` and check it for damage, without running code."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}. Give {_WHAT[content]}.") from error
    about = _about(path, raw, content)
    try:
        weights = safetensors.torch.load(raw)
    except SafetensorError as error:
        raise _damaged(path, content, str(error)) from error
    trade_off = about.get("trade_off")
    if trade_off is not None:
        if isinstance(trade_off, bool) or not isinstance(trade_off, int | float):
            raise _damaged(path, content, "its lambda is not a number")
        check_trade_off(trade_off)
    if tensor_hash(weights) != about.get("fingerprint"):
        raise _damaged(path, content, "its weights do not match its fingerprint")
    return _File(about, weights)


def _about(path: str | Path, raw: bytes, content: str) -> dict[str, Any]:
    """The file's description."""
    try:
        text = metadata_in(raw).get(_METADATA_KEY)
        about = None if text is None else dict(json.loads(text))
        schema, found = (None, None) if about is None else (about["schema"], about["content"])
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(path, content, f"{type(error).__name__} in its header") from error
    if about is None:
        raise UserError(f"'{path}' is a safetensors file, but not of TORA. Give {_WHAT[content]}.")
    if schema != _SCHEMA:
        raise UserError(f"'{path}' has TORA schema {schema}, this version reads {_SCHEMA}. Update vitadel.")
    if found != content:
        raise UserError(f"'{path}' holds {_WHAT.get(str(found), 'other content')}; give {_WHAT[content]}.")
    return about


def _as_fusion(path: str | Path, file: _File) -> Fusion:
    try:
        return Fusion(file.weights, file.about["trade_off"], str(file.about["base"]), dict(file.about["training"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, _FUSION, f"{type(error).__name__}: {error}") from error


def _check_backbone(path: str | Path, about: Mapping[str, Any], classifier: Classifier) -> None:
    name, width = classifier.record.name, _width(classifier)
    theirs = about.get("backbone", "an unknown model")
    if about.get("width") != width:
        raise UserError(
            f"'{path}' is for a backbone {about.get('width')} wide, '{theirs}'; '{name}' is {width} wide. Load the "
            "backbone it was made for."
        )
    if about.get("backbone_fingerprint") != backbone_fingerprint(classifier):
        raise UserError(
            f"'{path}' was trained on other weights, those of '{theirs}'; this is '{name}'. Load that backbone with "
            "the same weights in the same precision (only image size and head may differ), or train for this one."
        )


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


def _damaged(path: str | Path, content: str, reason: str) -> UserError:
    return UserError(
        f"'{path}' cannot be read as {_WHAT[content]}: {reason}. It is damaged, cut short, or of another kind. Copy it "
        "again from where it was saved."
    )
