"""Weight files: read them without running code, load them strictly, and save or load classifiers with their record."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.compatibility import describe_mismatch
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.small_images import adapt_to_small_images
from vitadel.backbones.timm_models import create_backbone
from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.safe_reading import check_regular_file

_METADATA_KEY = "vitadel"

# Averaged weights come first: timm evaluates them first, and papers report them.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
_CONTAINERS = (*_AVERAGED, "state_dict", "model_state_dict", "model", "module", "net")
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_MOST_LAYERS = 4  # of containers or prefixes around the weights


@dataclass(frozen=True)
class Checkpoint:
    """What a weight file holds. `metadata` is empty for torch files; `notes` are the choices made when reading it."""

    weights: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fitted:
    """Weights whose keys are those of the model. `normalizer` is the (mean, std) layer that was saved around it."""

    weights: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    normalizer: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a safetensors or torch file, recognized by its content: suffixes are often wrong."""
    path = Path(path)
    if _is_safetensors(path):
        try:
            with safe_open(path, "pt") as file:
                weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
                metadata = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise _damaged(path, "safetensors", error) from error
        if not weights:
            raise UserError(f"'{path}' holds no tensors. Give a file with the weights of a model.")
        return Checkpoint(weights, metadata)
    content = _torch_load(path)
    notes: list[str] = []
    weights = _unwrap(content, path, notes)
    return Checkpoint(weights, {}, tuple(notes))


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file without its tensors; empty for other kinds of file."""
    path = Path(path)
    if not _is_safetensors(path):
        return {}
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _damaged(path, "safetensors", error) from error


def metadata_in(content: bytes) -> dict[str, str]:
    """The metadata in the bytes of a safetensors file; `ValueError` or `AttributeError` if they are damaged."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(header.get("__metadata__", {}))


def tensor_hash(weights: Mapping[str, Tensor], more: str = "") -> str:
    """A short hash of named tensors, and of further text."""
    digest = hashlib.sha256(more.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _is_safetensors(path: Path) -> bool:
    """Whether a weight file is safetensors; refuses files that are no weights, with the likely reason."""
    if path.is_dir():
        raise UserError(f"'{path}' is a folder, a weight file was expected. Give one of the files in it.")
    try:
        check_regular_file(path, "weight file")
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UserError(
            f"weight file '{path}' cannot be read: {error.strerror or error}. Check its permissions."
        ) from error
    if not head:
        raise UserError(f"weight file '{path}' is empty. Download or copy it again.")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"'{path}' is a Git LFS pointer, not the weights themselves. Run `git lfs pull` to fetch them.")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UserError(
            f"'{path}' is a web page, not a weight file. The download probably got an error page; repeat it."
        )
    return head[8:9] == b"{" or path.suffix == ".safetensors"


def _damaged(path: Path, kind: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return UserError(
        f"'{path}' cannot be read as a {kind} file: {reason}. "
        "It is damaged, cut short, or of another kind. Copy or download it again; "
        "safetensors files and files of torch.save are read."
    )


def _torch_load(path: Path) -> object:
    try:
        # argparse.Namespace only holds attributes; timm's and DeiT's training checkpoints contain one.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            is_pickle = file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        if not is_pickle:
            raise _damaged(path, "torch", error.__class__("neither safetensors nor torch's format")) from error
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            f"'{path}' was refused: it is a pickle that wants to run more than loading tensors needs"
            f"{f' ({wanted.group(1)})' if wanted else ''}, and reading such a file can run any code. Nothing was run. "
            "Ask for a safetensors file or a plain state_dict. If you trust its author, convert it once, where that "
            "can do no harm: load it there with torch.load(..., weights_only=False) and write its state_dict with "
            "safetensors.torch.save_file."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise _damaged(path, "torch", error) from error


def _unwrap(content: object, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The state dict inside the usual containers."""
    for _ in range(_MOST_LAYERS):
        if not isinstance(content, Mapping):
            break
        tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
        inner = [name for name in _CONTAINERS if isinstance(content.get(name), Mapping) and content[name]]
        if tensors and not inner:
            left = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
            if left:
                notes.append(f"skipped entries that are not tensors: {', '.join(left[:5])}")
            return tensors
        if not inner:
            break
        others = [name for name in inner[1:] if name != "module"]
        beside = f", not {', '.join(others)} which is there too" if others else ""
        notes.append(f"weights taken from '{inner[0]}'{beside}")
        content = content[inner[0]]
    found = (
        f"keys {', '.join(map(repr, list(content)[:5]))}" if isinstance(content, Mapping) else type(content).__name__
    )
    raise UserError(
        f"'{path}' holds no state dict: found {found}. "
        f"Expected a dictionary of tensors, directly or under one of {', '.join(_CONTAINERS)}."
    )


def fit_to(module: nn.Module, weights: Mapping[str, Tensor]) -> Fitted:
    """Rename keys so that all of them fit, or return the closest renaming.

    Tried in this order: the keys themselves; without the prefixes that wrappers add; without a normalization layer
    that was saved in front of the model; renamed by timm's converter for the family (only if no number is lost).
    """
    expected = set(module.state_dict())
    if set(weights) == expected:
        return Fitted(dict(weights))
    named = [renamed for start in _without_normalizer(dict(weights)) for renamed in _without_prefixes(start)]
    converted = [fit for renamed in named for fit in _by_timm(module, renamed)]
    closest = max(named, key=lambda fit: len(expected & set(fit.weights)))
    return next((fit for fit in named + converted if set(fit.weights) == expected), closest)


def _without_normalizer(weights: dict[str, Tensor]) -> list[Fitted]:
    """The weights, and the weights without a pair `X.mean`, `X.std` of three numbers each."""
    found = [Fitted(weights)]
    for key in weights:
        owner, _, last = key.rpartition(".")
        pair = (key, f"{owner}.std" if owner else "std")
        if last == "mean" and pair[1] in weights and all(weights[name].numel() == 3 for name in pair):
            rest = {name: value for name, value in weights.items() if name not in pair}
            mean, std = (tuple(float(v) for v in weights[name].flatten()) for name in pair)
            found.append(Fitted(rest, (f"normalization taken from '{key}' and '{pair[1]}'",), (mean, std)))
            break
    return found


def _without_prefixes(start: Fitted) -> list[Fitted]:
    """The weights as they are and after removing one known prefix after another, while all keys share one."""
    found = [start]
    for _ in range(_MOST_LAYERS):
        last = found[-1]
        numbered = re.match(r"\d+\.", next(iter(last.weights), ""))  # nn.Sequential(normalizer, model)
        prefixes = (*_PREFIXES, numbered.group()) if numbered and last.normalizer else _PREFIXES
        shared = next((p for p in prefixes if last.weights and all(key.startswith(p) for key in last.weights)), None)
        if shared is None:
            break
        weights = {key.removeprefix(shared): value for key, value in last.weights.items()}
        found.append(Fitted(weights, (*last.notes, f"prefix '{shared}' removed from all keys"), last.normalizer))
    return found


def _by_timm(module: nn.Module, start: Fitted) -> list[Fitted]:
    """The keys renamed by timm's converter for this family; nothing if there is none or it changes numbers."""
    home = type(module).__module__
    convert = getattr(sys.modules.get(home), "checkpoint_filter_fn", None) if home.startswith("timm.models.") else None
    if convert is None:
        return []
    try:
        converted = convert(dict(start.weights), module)
    except (KeyError, AttributeError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return []  # a layout that the converter does not know: the mismatch itself is reported instead
    # The converters also resample position embeddings; equal counts leave only renaming, splitting and reshaping.
    counts = [sum(value.numel() for value in side.values()) for side in (converted, start.weights)]
    if counts[0] != counts[1]:
        return []
    return [Fitted(dict(converted), (*start.notes, "keys renamed by timm's rules for this family"), start.normalizer)]


def load_strict(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> Fitted:
    """Load all keys or none; return the loaded weights, with notes on renamed keys."""
    fitted = fit_to(module, weights)
    own, file = ({k: v.shape for k, v in side.items()} for side in (module.state_dict(), fitted.weights))
    if own != file:
        raise UserError(describe_mismatch(module, fitted.weights, source, fitted.notes))
    _check_kinds(module, fitted.weights, source)
    _check_finite(module, fitted.weights, source)
    module.load_state_dict(fitted.weights, strict=True)
    stored = sorted(
        {str(value.dtype).removeprefix("torch.") for value in fitted.weights.values() if value.is_floating_point()}
    )
    if stored and stored != ["float32"]:
        return Fitted(fitted.weights, (*fitted.notes, f"weights stored as {', '.join(stored)}"), fitted.normalizer)
    return fitted


def _check_kinds(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Loading would silently truncate: whole numbers where the model has floating-point weights are quantized ones."""
    own = module.state_dict()
    odd = [key for key, value in weights.items() if own[key].is_floating_point() and not value.is_floating_point()]
    if odd:
        kind = str(weights[odd[0]].dtype).removeprefix("torch.")
        raise UserError(
            f"{source}: '{odd[0]}' is stored as {kind} ({len(odd)} tensors are), the model has floating-point weights. "
            "The file is quantized, or was converted wrongly. Give the weights before quantization."
        )


def _check_finite(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    own = module.state_dict()
    broken = {
        key: int((~value.isfinite()).sum())
        for key, value in weights.items()
        # Some models have minus infinity in a mask.
        if value.is_floating_point() and not value.isfinite().all() and bool(own[key].isfinite().all())
    }
    if broken:
        first, count = next(iter(broken.items()))
        more = f"; {len(broken)} tensors are affected" if len(broken) > 1 else ""
        raise UserError(
            f"{source}: '{first}' has {count} of {weights[first].numel()} values that are NaN or infinite{more}. "
            "The training that wrote this file diverged, or the file is damaged. Use an earlier checkpoint."
        )


def build_classifier(record: ModelRecord) -> Classifier:
    """Build the model of a record with untrained weights, in eval mode."""
    if not record.can_be_rebuilt:
        raise UserError(
            f"a model recorded as '{record.name}' cannot be built from its record. Load the code that made it, "
            "as `python:package.module:function` or `hf:ORG/NAME`, and give this file as --weights."
        )
    backbone = create_backbone(record.name, record.num_classes, record.kwargs)
    if record.small_images is not None:
        size = record.input_size[0] if record.input_size else 32
        backbone = adapt_to_small_images(backbone, size, record.small_images)
    return Classifier(backbone, record).eval()


def read_record(path: str | Path) -> ModelRecord | None:
    """Read the record of a weight file, if it has one, without its weights."""
    text = read_metadata(path).get(_METADATA_KEY)
    return None if text is None else ModelRecord.from_json(text, str(path))


def save_classifier(classifier: Classifier, path: str | Path) -> None:
    """Write weights and record as one safetensors file, atomically.

    Keys are those of the backbone, so that timm reads the file too.
    """
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    weights = {
        key: value.detach().cpu().clone().contiguous() for key, value in classifier.backbone.state_dict().items()
    }
    metadata = {_METADATA_KEY: classifier.record.to_json()}
    write_atomically(Path(path), safetensors.torch.save(weights, metadata=metadata))


def load_classifier(path: str | Path, dropping: Mapping[str, float] | None = None) -> Classifier:
    """Load what `save_classifier` wrote, in eval mode on the CPU; `dropping` replaces some of `DROP_RATES`."""
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
