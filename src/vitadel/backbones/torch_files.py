"""Files of `torch.save`: read without running code, opened down to the state dict, refused with what was found."""

from __future__ import annotations

import argparse
import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitadel.errors import UserError

# Averaged weights come first: timm evaluates them first, and papers report them.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_state", "ema", "params_ema")
_CONTAINERS = (
    *_AVERAGED,
    *("state_dict", "model_state_dict", "model_state", "vision_encoder_state_dict", "model", "module", "net"),
    *("network", "weights", "params"),
)
_MOST_LAYERS = 4  # of containers around the weights
_OTHER_PROGRAMS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"GGUF", "a GGUF file"),
    (b"BZh", "a bzip2 archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"model_checkpoint_path:", "TensorFlow's list of its checkpoints"),
)
_TENSORS = (  # what files of tensors name
    *("collections.OrderedDict", "torch._utils._rebuild", "torch.storage.", "torch._tensor.", "torch.serialization."),
    *("__builtin__.set", "builtins.set", "__builtin__.bytearray", "builtins.bytearray", "torch.Size", "torch.device"),
)
_TENSORFLOW_END = bytes.fromhex("57fb808b247547db")  # of its checkpoints in one file, and of the index of several
CONVERT = "Convert it to PyTorch first, and save its state_dict with safetensors.torch.save_file or torch.save."


def read_torch_file(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The state dict of a file, notes on how it was found, and the names of what else the file holds."""
    content = _load(path)
    beside = tuple(map(str, content)) if isinstance(content, Mapping) else ()
    notes: list[str] = []
    return _unwrap(content, path, notes), tuple(notes), beside


def damaged(path: Path, kind: str, error: Exception | str) -> UserError:
    """The error for a file that cannot be read as a file of `kind`."""
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return UserError(
        f"'{path}' cannot be read as a {kind} file: {reason}. "
        "It is damaged, cut short, or of another kind. Copy or download it again; "
        "safetensors files and files of torch.save are read."
    )


def _harmless() -> list[Any]:
    """Types that only hold values: options of a training script, numbers and arrays of NumPy by old and new names."""
    multiarray = getattr(np, "_core", None) or np.core
    scalar, rebuild = multiarray.multiarray.scalar, multiarray.multiarray._reconstruct
    kinds = {type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")}
    numpy: list[Any] = [np.dtype, np.ndarray, *kinds]
    for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
        numpy += [(scalar, f"{home}.scalar"), (rebuild, f"{home}._reconstruct")]
    encode = (_encode_latin, "_codecs.encode")  # how pickle writes the bytes of a NumPy number
    return [argparse.Namespace, *numpy, encode, (str, "pathlib.PosixPath"), PosixPath]


def _encode_latin(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"GLOBAL _codecs.encode with {encoding!r}")
    return text.encode("latin-1")


def _load(path: Path) -> object:
    _refuse_other_programs(path)
    try:
        with torch.serialization.safe_globals(_harmless()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch finds unusual about a file says less than the messages here
            # Mapped, a large file takes no memory beside the model that it is copied into; old files cannot be.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_starts_as_archive(path))
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            is_pickle = file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        if not is_pickle:
            raise damaged(path, "torch", "neither safetensors nor torch's format") from error
        wanted = ", ".join(_foreign_names(path)[:4])
        raise UserError(
            f"'{path}' was refused: it is a pickle that wants to run more than loading tensors needs"
            f"{f' ({wanted})' if wanted else ''}, and reading such a file can run any code. Nothing was run. "
            "Ask for a safetensors file or a plain state_dict. If you trust its author, convert it once, where that "
            "can do no harm: load it there with torch.load(..., weights_only=False) and write its state_dict with "
            "safetensors.torch.save_file."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        if _starts_as_archive(path) and "central directory" in str(error):
            size = path.stat().st_size
            reason = f"its directory, at the end of such a file, is missing after {size:,} bytes: it is not complete"
            raise damaged(path, "torch", reason) from error
        raise damaged(path, "torch", error) from error


def _refuse_other_programs(path: Path) -> None:
    """Refuse files of other frameworks and archives by their first bytes or, where these say little, their names."""
    with path.open("rb") as file:
        head = file.read(512)
        file.seek(-min(path.stat().st_size, len(_TENSORFLOW_END)), os.SEEK_END)
        end = file.read()
    found = next((what for magic, what in _OTHER_PROGRAMS if head.startswith(magic)), None)
    if head[4:8] == b"TFL3":
        found = "a TensorFlow Lite file"
    elif head[257:262] == b"ustar" and b"tensors" not in head:
        found = "a tar archive; torch's own files of that name are not real archives"
    elif path.suffix == ".onnx" or (head[:1] == b"\x08" and (b"pytorch" in head[:64] or b"onnx" in head[:64])):
        found = "an ONNX graph"
    elif end == _TENSORFLOW_END or path.suffix == ".index" or ".data-0000" in path.name:
        found = "a TensorFlow checkpoint or a part of one"
    elif found is None and path.suffix in (".h5", ".keras", ".pb", ".tflite", ".msgpack", ".engine", ".mlmodel"):
        found = f"a file of another framework, by its name ({path.suffix})"
    elif head.startswith(b"PK"):
        found = _other_archive(path)
    if found is not None:
        raise UserError(f"'{path}' is {found}, not PyTorch weights. {CONVERT}")


def _other_archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None  # torch's own message says what is wrong with it
    if any(name.endswith("/constants.pkl") or name == "constants.pkl" for name in names):
        return "a TorchScript program, which holds code"
    if any(name.endswith("data.pkl") for name in names):
        return None
    if all(name.endswith(".npy") for name in names):
        return "an archive of NumPy arrays, which cannot be read as a torch file"
    if any(name.endswith((".h5", "config.json")) for name in names):
        return "a Keras model"
    return f"a zip archive of {', '.join(names[:2])}{', ...' if len(names) > 2 else ''}; unpack it"


def _starts_as_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _foreign_names(path: Path) -> list[str]:
    """The classes and functions that a pickle names and that are not allowed, read without running it."""
    names: list[str] = []
    with suppress(ValueError, EOFError, pickle.UnpicklingError, IndexError, zipfile.BadZipFile, StopIteration):
        if _starts_as_archive(path):
            with zipfile.ZipFile(path) as archive:
                inner = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                names += _names_in(archive.read(inner))
        else:
            with path.open("rb") as file:
                for _ in range(4):  # older files are several pickles one after the other
                    names += _names_in(file)
    return sorted(set(names))


def _names_in(data: Any) -> list[str]:
    known = {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}" for entry in _harmless()
    }
    found, texts = [], []
    for code, argument, _ in pickletools.genops(data):
        if isinstance(argument, str) and code.name != "GLOBAL":
            texts.append(argument)
        name = ""
        if code.name == "GLOBAL":
            name = str(argument).replace(" ", ".")
        elif code.name == "STACK_GLOBAL" and len(texts) > 1:
            name = f"{texts[-2]}.{texts[-1]}"
        if name and name not in known and not name.startswith(_TENSORS) and not name.endswith("Storage"):
            found.append(name)
    return found


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
    raise UserError(f"'{path}' holds no state dict: found {_describe(content)}")


def _describe(content: object) -> str:
    expected = f"Expected a dictionary of tensors, directly or under one of {', '.join(_CONTAINERS)}."
    if not isinstance(content, Mapping):
        return f"{type(content).__name__}. {expected}"
    keys = f"keys {', '.join(map(repr, list(content)[:5]))}"
    inner = next((value for key, value in content.items() if "optim" in str(key) and isinstance(value, Mapping)), {})
    if "param_groups" in content or "param_groups" in inner:
        return f"the state of an optimizer only ({keys}). Give the file with the weights of the model."
    return f"{keys}. {expected}"
