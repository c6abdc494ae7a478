"""Models built by other code: Hugging Face transformers, and factories of the user."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from vitadel.backbones.record import ModelRecord, three_numbers
from vitadel.errors import UserError, nearest_names

Triple = tuple[float, float, float]

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers


@contextmanager
def user_code() -> Iterator[None]:
    """Import or call the user's code inside this block: modules in the working folder are found (a console script,
    unlike `python -m`, does not look there), and prints go to stderr."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _cause(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def import_function(spec: str) -> Callable[..., Any]:
    """Import `package.module:function`, the working folder included."""
    module_name, _, function_name = spec.rpartition(":")
    if not module_name or not function_name:
        raise UserError(f"'python:{spec}' names no function. Write python:package.module:function.")
    with user_code():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise UserError(f"importing '{module_name}' failed: {_cause(error)}. Install what it needs.") from error
            raise UserError(
                f"there is no Python module '{error.name}' for 'python:{spec}'. Install it, or run from the folder "
                f"it is in (now {Path.cwd()})."
            ) from error
        except (Exception, SystemExit) as error:  # the user's code may raise anything, or call sys.exit()
            raise UserError(f"importing '{module_name}' failed: {_cause(error)}. Repair the module.") from error
        factory = getattr(module, function_name, None)
        if factory is None:
            own = [name for name, each in vars(module).items() if getattr(each, "__module__", None) == module_name]
            near = nearest_names(function_name, own) or "."
            raise UserError(f"module '{module_name}' has no '{function_name}'{near}")
    if not callable(factory):
        raise UserError(f"'python:{spec}' is a {type(factory).__name__}, not a function.")
    return cast("Callable[..., Any]", factory)


def call_factory(spec: str) -> nn.Module:
    """Import `package.module:function` and call the function without arguments."""
    factory = import_function(spec)
    with user_code():
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise UserError(f"'python:{spec}' was called without arguments and failed: {_cause(error)}.") from error
    if not isinstance(made, nn.Module):
        raise UserError(
            f"'python:{spec}' returned {type(made).__name__}; it must return an nn.Module on pixels in [0, 1]."
        )
    return made


def load_hugging_face(name: str, *, needs_normalization: bool = True) -> tuple[nn.Module, ModelRecord]:
    """Load an image classifier of `transformers`, from the hub or a folder, with its processor's preprocessing."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(
            f"'hf:{name}' needs the package transformers. Install it: pip install 'vitadel[hf]'."
        ) from error
    location = str(Path(os.path.expanduser(name))) if name.startswith((".", "/", "~")) else name
    if name.startswith((".", "/", "~")) and not Path(location).is_dir():
        raise UserError(f"folder '{name}' for 'hf:{name}' does not exist. Check the path (now in {Path.cwd()}).")
    failures = (OSError, ValueError, KeyError, ImportError, RuntimeError)
    try:
        model, loading = transformers.AutoModelForImageClassification.from_pretrained(
            location, output_loading_info=True
        )
    except failures as error:
        raise UserError(
            f"'hf:{name}' could not be loaded as an image classifier: {_first_line(error)}. "
            "Check the name and the network; a folder on disk is written hf:./FOLDER."
        ) from error
    missing = sorted(loading.get("missing_keys", ()))
    if missing:  # transformers fills them with random numbers and only logs it
        raise UserError(
            f"'hf:{name}' has no trained weights for {', '.join(missing[:3])}: it is a backbone without a "
            "classification head. Choose a model that was trained to classify images."
        )
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(location)
    except failures as error:
        if needs_normalization:
            raise UserError(
                f"'hf:{name}' has no image processor that can be read: {_first_line(error)}. Give mean and std."
            ) from error
        processor = None
    try:
        return model, _hugging_face_record(name, model, processor)
    except (AttributeError, KeyError, TypeError) as error:
        if needs_normalization:
            raise UserError(
                f"'hf:{name}' has an image processor of an unknown kind ({error}). Give mean and std."
            ) from error
        return model, _hugging_face_record(name, model, None)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _hugging_face_record(name: str, model: nn.Module, processor: Any) -> ModelRecord:
    config: Any = getattr(model, "config", None)
    record = ModelRecord(name=f"hf:{name}", num_classes=int(config.num_labels))
    if processor is None:
        return record
    by_timm = getattr(processor, "data_config", None)
    if isinstance(by_timm, Mapping):  # a timm model in transformers: the processor holds timm's transform
        return replace(
            record,
            mean=three_numbers(by_timm["mean"], "mean"),
            std=three_numbers(by_timm["std"], "std"),
            input_size=tuple(by_timm["input_size"][1:]),
            crop_pct=float(by_timm["crop_pct"]),
            interpolation=by_timm["interpolation"],
            crop_mode=by_timm["crop_mode"],
        )
    mean, std = processor_normalization(processor)
    return replace(_with_geometry(record, processor), mean=mean, std=std)


def _with_geometry(record: ModelRecord, processor: Any) -> ModelRecord:
    """Size and crop in timm's terms: resize to size / crop_pct, then crop; 'squash' if the aspect ratio changes."""
    height, edge = (_entry(getattr(processor, "size", None), key) for key in ("height", "shortest_edge"))
    crop = _entry(getattr(processor, "crop_size", None), "height") if getattr(processor, "do_center_crop", 0) else None
    resized = height or edge
    final, share = crop or resized, crop / resized if crop and resized else 1.0
    squashes = height is not None
    own_share = getattr(processor, "crop_pct", None)  # ConvNeXt and PoolFormer crop inside their resizing
    if own_share and edge and not crop:
        share, squashes = (float(own_share), False) if edge < 384 else (1.0, True)
    resample = getattr(processor, "resample", None)
    return replace(
        record,
        input_size=None if final is None else (final, final),
        crop_pct=min(1.0, share),
        crop_mode="squash" if squashes else "center",
        interpolation=_RESAMPLING.get(int(resample), "bicubic") if isinstance(resample, int) else "bicubic",
    )


def _entry(size: object, key: str) -> int | None:
    """An entry of a size that is one number, a dictionary, or an object (newer `transformers`)."""
    found = size.get(key) if isinstance(size, Mapping) else getattr(size, key, size)
    return found if isinstance(found, int) else None


def processor_normalization(processor: Any) -> tuple[Triple, Triple]:
    """The mean and std on [0, 1] pixels that equal an image processor's rescaling and normalizing of 0..255 ones."""
    scale = 255.0 * float(processor.rescale_factor) if getattr(processor, "do_rescale", True) else 255.0
    shift = 1.0 if getattr(processor, "rescale_offset", False) else 0.0  # x / 127.5 - 1, as in EfficientNet's
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    if processor.do_normalize:
        mean, std = three_numbers(processor.image_mean, "mean"), three_numbers(processor.image_std, "std")
    # ((scale x - shift) - mean) / std  =  (x - (mean + shift) / scale) / (std / scale)
    shifted, scaled = [(value + shift) / scale for value in mean], [value / scale for value in std]
    return three_numbers(shifted, "mean"), three_numbers(scaled, "std")
