"""Weight files: read them without running code, load them strictly, save or load classifiers with their record; and
the files shipped with the package, checked against the recorded SHA-256 sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.compatibility import describe_mismatch
from vitadel.backbones.key_conversion import Fitted, convert_keys
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.small_images import adapt_to_small_images
from vitadel.backbones.timm_models import create_backbone
from vitadel.backbones.torch_files import CONVERT, damaged, read_torch_file
from vitadel.errors import UserError, nearest_names
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.safe_reading import check_regular_file

_METADATA_KEY = "vitadel"

CHECKSUMS = "SHA256SUMS"
"""Of the shipped weights, in the format of sha256sum, so that `sha256sum -c SHA256SUMS` checks it, too."""

_RETIRED = {
    "zoo:shapes-aas-at": "all its attention factors were 1, so it was a plain PGD-trained model. Use "
    "zoo:cifar10-aas-at, or train one by `vitadel harden aas/shapes-training --row scale-1+aas`",
}


@dataclass(frozen=True)
class Checkpoint:
    """What a weight file holds. `metadata` is empty for torch files; `notes` are the choices made when reading it;
    `container` are the outermost names in a torch file."""

    weights: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    container: tuple[str, ...] = ()


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a safetensors or torch file, recognized by its content: suffixes are often wrong."""
    path = Path(path)
    if _is_safetensors(path):
        try:
            with safe_open(path, "pt") as file:
                weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
                metadata = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise damaged(path, "safetensors", error) from error
        if not weights:
            raise UserError(f"'{path}' holds no tensors. Give a file with the weights of a model.")
        return Checkpoint(weights, metadata)
    weights, notes, container = read_torch_file(path)
    return Checkpoint(weights, {}, notes, container)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file without its tensors; empty for other kinds of file."""
    path = Path(path)
    if not _is_safetensors(path):
        return {}
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise damaged(path, "safetensors", error) from error


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
        if not path.exists() and Path(f"{path}.index").is_file():
            raise UserError(f"'{path}' is a TensorFlow checkpoint ('{path}.index'), not PyTorch weights. {CONVERT}")
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


def fit_to(module: nn.Module, weights: Mapping[str, Tensor]) -> Fitted:
    """Rename keys so that all of them fit, or return the closest renaming; see `key_conversion`."""
    if set(weights) == set(module.state_dict()):
        return Fitted(dict(weights))
    return convert_keys(module, weights)


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


def save_classifier(classifier: Classifier, path: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write weights and record as one safetensors file, atomically.

    Keys are those of the backbone, so that timm reads the file too. `dtype`: how floating-point weights are stored;
    loading makes float32 of half precision again.
    """
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    weights = {
        key: (value.to(dtype) if dtype and value.is_floating_point() else value).detach().cpu().clone().contiguous()
        for key, value in classifier.backbone.state_dict().items()
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


def zoo_names() -> list[str]:
    """The models shipped with the package, as `zoo:NAME`."""
    folder = resources.files("vitadel") / "zoo"
    if not folder.is_dir():
        return []
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    return [f"zoo:{name.removesuffix('.safetensors')}" for name in files]


@contextmanager
def zoo_file(spec: str) -> Iterator[Path]:
    """The weight file of `zoo:NAME`; the model card has the same path with suffix .md."""
    known = zoo_names()
    if spec in _RETIRED:
        raise UserError(f"'{spec}' is no longer shipped: {_RETIRED[spec]}.")
    if spec not in known:
        there = ", ".join(known) or "none in this installation"
        raise UserError(f"unknown zoo model '{spec}'{nearest_names(spec, known) or '.'} There are: {there}.")
    with resources.as_file(resources.files("vitadel") / "zoo" / f"{spec.removeprefix('zoo:')}.safetensors") as path:
        check_checksum(path)
        yield path


def check_checksum(path: Path) -> None:
    """Refuse a weight file that is not the one this version was released with."""
    released = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
    if released not in (path.parent / CHECKSUMS).read_text("utf-8").splitlines():
        raise UserError(
            f"the shipped weights '{path.name}' are not those of this version (see {CHECKSUMS}). "
            "The file was changed or damaged; install vitadel again."
        )


def write_checksums(folder: Path) -> None:
    """Record the files of a folder as released."""
    files = sorted(folder.glob("*.safetensors"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / CHECKSUMS).write_text("".join(lines))
