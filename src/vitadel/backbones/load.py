"""One way to every model: `load_model` turns a MODEL spec into a classifier on pixels in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from timm.models.xcit import Xcit
from torch import nn

from vitadel.backbones.checkpoints import Checkpoint, fit_to, load_strict, read_checkpoint, read_weights
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.compatibility import class_count, find_mismatch
from vitadel.backbones.families.registration import own_names
from vitadel.backbones.families.small_images import adapt_to_small_images
from vitadel.backbones.head_classes import keep_classes
from vitadel.backbones.image_size import not_a_multiple
from vitadel.backbones.output_checks import modules_in_train_mode
from vitadel.backbones.projection import keep_projection
from vitadel.backbones.record import (
    DROP_RATES,
    ModelRecord,
    create_backbone,
    load_classifier,
    near_models,
    read_record,
    three_numbers,
)
from vitadel.backbones.third_party import call_factory, load_hugging_face
from vitadel.errors import UserError, nearest_names

__all__ = ["has_no_head", "load_model", "model_names", "zoo_file", "zoo_names"]

_PREFIXES = ("zoo", "hf", "python")
_FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt")
_PREFERRED = ("best", "model", "last")


@dataclass(frozen=True)
class _Wishes:
    """What the caller asked for beyond the model itself."""

    weights: str | Path | None
    num_classes: int | None
    normalisation: tuple[tuple[float, float, float], tuple[float, float, float]] | None
    input_size: int | None
    crop_pct: float | None
    interpolation: str | None
    patch_size: int | None
    new_head: bool
    head_classes: tuple[int, ...] | None
    kwargs: Mapping[str, Any]

    @property
    def dropping(self) -> dict[str, Any]:
        """Of the arguments, those that may be set anew for a model that has learnt."""
        return {key: value for key, value in self.kwargs.items() if key in DROP_RATES}

    @property
    def building(self) -> dict[str, Any]:
        return {key: value for key, value in self.kwargs.items() if key not in DROP_RATES}

    def weight_file(self) -> Path | None:
        return None if self.weights in (None, "random", "pretrained") else Path(str(self.weights)).expanduser()


def load_model(
    spec: str,
    *,
    weights: str | Path | None = None,
    num_classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_size: int | None = None,
    crop_pct: float | None = None,
    interpolation: str | None = None,
    small_images: bool | int = False,
    new_head: bool = False,
    head_classes: Sequence[int] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Classifier:
    """The model of a spec, in eval mode: pixels in [0, 1] in, logits out.

    `spec`: `zoo:NAME`, a timm name, `hf:ORG/NAME`, a folder or file that vitadel wrote, `python:module:function`.
    `weights`, for a timm name: a file, 'pretrained' (timm's download) or 'random'.
    Normalisation: `mean` and `std` if given, else the checkpoint's own record, else a normalising layer saved with the
    weights, else timm's data configuration (its training size, because that is what a ViT's positions are made for).
    `input_size`: resample the position embedding for images of another size. `small_images`: shrink the patches too
    (to 4 pixels, or to the number given; 32-pixel images unless `input_size` says otherwise). `crop_pct` and
    `interpolation`: how images of other sizes are brought to the model's, where it is not to be the model's own way.
    `new_head`: replace the classification layer by a fresh one with `num_classes`, for training on other data; without
    it a number of classes that is not the checkpoint's is a mistake. `head_classes`: keep these of the model's classes,
    in this order, for data that have no others. `kwargs` go to `timm.create_model`;
    of a model that vitadel wrote only the rates of dropout and drop-path may be set anew.
    """
    if (mean is None) != (std is None):
        raise UserError("give mean and std together: one alone would be mixed with another model's other half.")
    if new_head and head_classes is not None:
        raise UserError("a new head has no classes to keep: give new_head or head_classes, not both.")
    if head_classes is not None and num_classes not in (None, len(head_classes)):
        raise UserError(f"{len(head_classes)} classes are to be kept, but num_classes is {num_classes}; drop that.")
    if new_head and num_classes is None:
        raise UserError("a new head needs a number of classes: give num_classes.")
    wishes = _Wishes(
        weights=weights,
        num_classes=num_classes if head_classes is None else None,  # how many the checkpoint has is its own affair
        normalisation=None if mean is None or std is None else (three_numbers(mean, "mean"), three_numbers(std, "std")),
        input_size=input_size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        patch_size=(4 if small_images is True else small_images) if small_images is not False else None,
        new_head=new_head,
        head_classes=None if head_classes is None else tuple(head_classes),
        kwargs=kwargs or {},
    )
    backbone, record = _open(spec, wishes)
    classifier = _as_wished(backbone, record, wishes, spec).eval()
    try:
        return classifier.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model cannot be put on device '{device}': {reason}. Try --device cpu.") from error


def is_timm_name(spec: str) -> bool:
    """Whether timm builds it, with any number of classes; a name may carry a tag."""
    return bool(timm.is_model(spec.partition(".")[0]))


def has_no_head(spec: str, weights: str | None = None) -> bool:
    """Whether it is a timm name of a backbone that was released without a classifier, as DINOv2's, and no file of
    weights brings one after all."""
    config = timm.get_pretrained_cfg(spec) if is_timm_name(spec) else None
    return config is not None and config.num_classes == 0 and not _brings_head(weights)


def _brings_head(weights: str | None) -> bool:
    if weights is None or weights in ("pretrained", "random"):
        return False
    path = Path(weights).expanduser()
    return read_record(path) is not None or any(key.endswith("head.weight") for key in read_weights(path))


def _open(spec: str, wishes: _Wishes) -> tuple[nn.Module, ModelRecord]:
    prefix = re.match(r"([A-Za-z][\w-]+):", spec)
    if prefix:
        kind, rest = prefix.group(1), spec[prefix.end() :]
        if kind == "zoo":
            _refuse_own_weights(spec, wishes)
            return _take_apart(_from_zoo(spec, wishes.dropping))
        if kind == "hf":
            return _with_weight_file(
                *load_hugging_face(rest, needs_normalisation=wishes.normalisation is None), spec, wishes
            )
        if kind == "python":
            return _with_weight_file(*_from_factory(rest), spec, wishes)
        known = ", ".join(f"{name}:" for name in _PREFIXES)
        raise UserError(
            f"unknown kind of model '{kind}:' in '{spec}'{nearest_names(kind, _PREFIXES) or '.'} Known: {known}."
        )
    if is_timm_name(spec):
        return _from_timm(spec, wishes)
    path = Path(spec).expanduser()
    if path.exists() or "/" in spec or spec.startswith((".", "~")) or path.suffix in _FILE_SUFFIXES:
        _refuse_own_weights(spec, wishes)
        return _take_apart(load_classifier(_weights_in(path) if path.is_dir() else path, wishes.dropping))
    near = near_models(spec.partition(".")[0], zoo_names())
    raise UserError(
        f"unknown model '{spec}'{near} It is no timm name, no file and no folder. See `vitadel list models`."
    )


def _refuse_own_weights(spec: str, wishes: _Wishes) -> None:
    if wishes.weights is not None:
        raise UserError(
            f"'{spec}' brings its own weights; drop '{wishes.weights}' (--weights, in recipes model.weights), or "
            "name a timm model with it."
        )
    if wishes.building:
        raise UserError(f"'{spec}' is built as its record says; drop the arguments {', '.join(wishes.building)}.")


def _take_apart(classifier: Classifier) -> tuple[nn.Module, ModelRecord]:
    return classifier.backbone, classifier.record


def zoo_names() -> list[str]:
    """The models shipped with the package, as `zoo:NAME`."""
    folder = resources.files("vitadel") / "zoo"
    if not folder.is_dir():
        return []
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors"))
    return [f"zoo:{name.removesuffix('.safetensors')}" for name in files]


def model_names() -> dict[str, str]:
    """Every kind of spec with one line about it; the shipped models first."""
    about = {}
    for name in zoo_names():
        with zoo_file(name) as path:
            record = read_record(path)
            about[name] = record.notes.get("about", record.name) if record else _first_sentence(path.with_suffix(".md"))
    return (
        about
        | own_names()
        | {
            "TIMM_NAME": "any timm model, with --weights FILE, --weights pretrained or --weights random",
            "hf:ORG/NAME": "image classifier on the Hugging Face hub, or hf:./FOLDER",
            "FOLDER or FILE.safetensors": "what `vitadel harden` wrote",
            "python:package.module:function": "your function that returns an nn.Module on pixels in [0, 1]",
        }
    )


def _first_sentence(card: Path) -> str:
    """What a card says below its title, for models whose weight file has no record: backbones with adapters."""
    return next((line for line in card.read_text("utf-8").splitlines() if line and not line.startswith("#")), card.stem)


@contextmanager
def zoo_file(spec: str) -> Iterator[Path]:
    """The weight file of `zoo:NAME`; its card lies beside it."""
    known = zoo_names()
    if spec not in known:
        there = ", ".join(known) or "none in this installation"
        raise UserError(f"unknown zoo model '{spec}'{nearest_names(spec, known) or '.'} There are: {there}.")
    with resources.as_file(resources.files("vitadel") / "zoo" / f"{spec.removeprefix('zoo:')}.safetensors") as path:
        yield path


def _from_zoo(spec: str, dropping: Mapping[str, float]) -> Classifier:
    with zoo_file(spec) as path:
        if read_record(path) is None:
            raise UserError(
                f"'{spec}' is a backbone with adapters, and here a backbone alone is needed. Name another model; in "
                "Python, `open_model` opens it whole."
            )
        return load_classifier(path, dropping)


def _weights_in(folder: Path) -> Path:
    """The one checkpoint of a run folder that is meant: best, model or last, or the only one."""
    for place in (folder / "weights", folder):
        files = sorted(place.glob("*.safetensors"))
        by_name = {file.stem: file for file in files}
        for name in _PREFERRED:
            if name in by_name:
                return by_name[name]
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files)
            raise UserError(f"'{place}' has several checkpoints: {names}. Give one of these files as MODEL.")
    if (folder / "config.json").exists():
        raise UserError(f"'{folder}' looks like a Hugging Face model. Give it as hf:{folder}.")
    raise UserError(
        f"folder '{folder}' has no *.safetensors, neither in weights/ nor directly. Give a run of `harden`."
    )


def _from_factory(rest: str) -> tuple[nn.Module, ModelRecord]:
    classifier = wrap(call_factory(rest))
    name = f"python:{rest}" if classifier.record.name == "wrapped" else classifier.record.name
    notes = dict(classifier.record.notes)
    if modules_in_train_mode(classifier):
        notes["mode"] = "the factory returned a model in train mode; it was put into eval mode. Call .eval() in it."
    return classifier.backbone, replace(classifier.record, name=name, notes=notes)


def _with_weight_file(
    module: nn.Module, record: ModelRecord, spec: str, wishes: _Wishes
) -> tuple[nn.Module, ModelRecord]:
    """Models that bring their own weights take a file of others on request."""
    if wishes.kwargs:
        raise UserError(f"'{spec}' takes no arguments; drop {', '.join(wishes.kwargs)}.")
    path = wishes.weight_file()
    if path is None:
        if wishes.weights is not None:
            raise UserError(
                f"weights for '{spec}' must be a file, got '{wishes.weights}'; without --weights it brings its own."
            )
        return module, record
    return module, _load_plain(module, record, path, read_checkpoint(path))


def _load_plain(module: nn.Module, record: ModelRecord, path: Path, checkpoint: Checkpoint) -> ModelRecord:
    """Load strictly; the result tells what was chosen, and the file's normalisation if it has one."""
    fitted = load_strict(module, checkpoint.weights, str(path))
    notes = "; ".join((*checkpoint.notes, *fitted.notes))
    record = replace(record, notes=record.notes | ({"weights": notes} if notes else {}))
    own = read_record(path)
    if own is not None:
        return replace(record, mean=own.mean, std=own.std, attention_factors=own.attention_factors)
    if fitted.normaliser is not None:
        mean, std = fitted.normaliser
        return replace(record, mean=three_numbers(mean, "mean"), std=three_numbers(std, "std"))
    return record


def _from_timm(name: str, wishes: _Wishes) -> tuple[nn.Module, ModelRecord]:
    if wishes.weights is None:
        raise UserError(
            f"no weights for '{name}'. Give --weights FILE for a checkpoint, --weights pretrained for timm's own "
            "download, or --weights random for an untrained model."
        )
    path = wishes.weight_file()
    if path is not None:
        return _from_timm_file(name, path, wishes)
    pretrained = wishes.weights == "pretrained"
    # A pretrained model keeps its own head here: timm would otherwise put in an untrained one without a word.
    backbone = (
        _download(name, wishes.kwargs) if pretrained else create_backbone(name, wishes.num_classes, wishes.kwargs)
    )
    return backbone, _timm_record(name, backbone, wishes)


def _download(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        return create_backbone(name, None, kwargs, pretrained=True)
    except UserError:
        raise
    except Exception as error:  # timm, hub and network libraries each have exceptions of their own
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise UserError(
            f"timm could not get pretrained weights for '{name}': {reason}. "
            "Check the network, or give a file you have as --weights FILE."
        ) from error


def _timm_record(name: str, backbone: nn.Module, wishes: _Wishes) -> ModelRecord:
    config = resolve_model_data_config(backbone, use_test_size=False)
    classes: Any = getattr(backbone, "num_classes", None)
    if classes == 0 and not wishes.new_head:
        raise UserError(
            f"'{name}' has no classification head (num_classes=0). Give weights that have one and --num-classes."
        )
    size = wishes.kwargs.get("img_size", config["input_size"][1:])
    embed: Any = getattr(backbone, "patch_embed", None)
    if "img_size" in wishes.kwargs and isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        _check_multiple(embed.img_size, embed.patch_size, name)  # timm would not look at what is left over
    return ModelRecord(
        name=name,
        num_classes=classes or wishes.num_classes,
        kwargs=dict(wishes.kwargs),
        mean=config["mean"],
        std=config["std"],
        input_size=(size, size) if isinstance(size, int) else tuple(size),
        crop_pct=float(config["crop_pct"]),
        interpolation=config["interpolation"],
        crop_mode=config["crop_mode"],
    )


def _from_timm_file(name: str, path: Path, wishes: _Wishes) -> tuple[nn.Module, ModelRecord]:
    own = read_record(path)
    if own is not None and own.can_be_rebuilt:
        if own.name.partition(".")[0] != name.partition(".")[0]:
            raise UserError(
                f"'{path}' holds '{own.name}' by its own record, not '{name}'. Give the file itself as MODEL."
            )
        theirs = {key: value for key, value in own.kwargs.items() if key not in DROP_RATES}
        if wishes.building and wishes.building != theirs:
            raise UserError(f"'{path}' was built with {theirs} by its own record, not with {wishes.building}.")
        return _take_apart(load_classifier(path, wishes.dropping))
    checkpoint = read_checkpoint(path)
    backbone = create_backbone(name, wishes.num_classes, wishes.kwargs)
    fitted = fit_to(backbone, checkpoint.weights).weights
    if wishes.new_head or wishes.head_classes is not None:  # the head may have any size in the file
        backbone = create_backbone(name, class_count(backbone, fitted) or 0, wishes.kwargs)
    record = _timm_record(name, backbone, wishes)
    if find_mismatch(backbone, fitted).misshaped:
        record = _reshaped(backbone, record, wishes)  # the file may have been trained at the size that is wished for
    return backbone, _load_plain(backbone, record, path, checkpoint)


def _as_wished(backbone: nn.Module, record: ModelRecord, wishes: _Wishes, spec: str) -> Classifier:
    if wishes.new_head and wishes.num_classes is not None:
        reset = getattr(backbone, "reset_classifier", None)
        if reset is None:
            raise UserError(
                f"'{spec}' has no `reset_classifier`, so its head cannot be replaced. Do that in your own code."
            )
        keep_projection(backbone)
        reset(wishes.num_classes)
        record = replace(record, num_classes=wishes.num_classes)
    elif wishes.head_classes is not None:
        keep_classes(backbone, wishes.head_classes, spec)
        record = replace(record, num_classes=len(wishes.head_classes))
    elif wishes.num_classes is not None and wishes.num_classes != (record.num_classes or wishes.num_classes):
        raise UserError(
            f"'{spec}' has {record.num_classes} classes, --num-classes {wishes.num_classes} was given. "
            "Drop the flag, or choose weights trained for that number of classes."
        )
    else:
        record = replace(record, num_classes=record.num_classes or wishes.num_classes)
    record = _reshaped(backbone, record, wishes)
    if wishes.normalisation is not None:
        record = replace(record, mean=wishes.normalisation[0], std=wishes.normalisation[1])
    if wishes.crop_pct is not None:
        record = replace(record, crop_pct=wishes.crop_pct)
    if wishes.interpolation is not None:
        record = replace(record, interpolation=wishes.interpolation)
    return Classifier(backbone, record)


def _reshaped(backbone: nn.Module, record: ModelRecord, wishes: _Wishes) -> ModelRecord:
    """Change patch size and input size in place where wished and not done yet; the record of the result."""
    patch, size = wishes.patch_size or record.small_images, wishes.input_size
    if wishes.patch_size is not None and size is None and record.small_images is None:
        size = 32
    if size is None and record.input_size is not None:
        size = record.input_size[0]
    if size is None or (patch, (size, size)) == (record.small_images, record.input_size):
        return record
    if patch is not None:
        adapt_to_small_images(backbone, size, patch)
        return replace(record, small_images=patch, input_size=(size, size), crop_pct=1.0)
    return _resized(backbone, record, size)


def _check_multiple(size: tuple[int, int], patch: tuple[int, int], name: str) -> None:
    if size[0] % patch[0] or size[1] % patch[1]:
        raise not_a_multiple(size, patch, name)


def _resized(backbone: nn.Module, record: ModelRecord, size: int) -> ModelRecord:
    patch: Any = getattr(getattr(backbone, "patch_embed", None), "patch_size", 1)
    tall, wide = patch if isinstance(patch, tuple) else (patch, patch)
    if size < 1:
        raise UserError(f"images need at least 1 pixel, input size {size} was given for '{record.name}'.")
    _check_multiple((size, size), (tall, wide), record.name)
    resize = getattr(backbone, "set_input_size", None)
    told: Any = getattr(backbone, "pretrained_cfg", None)
    fixed = isinstance(told, Mapping) and told.get("fixed_input_size") and not isinstance(backbone, Xcit)
    if resize is not None:
        try:
            resize(img_size=(size, size))
        except (AssertionError, ValueError, RuntimeError) as error:
            raise UserError(f"'{record.name}' cannot take images of {size} pixels: {error}.") from error
        return replace(record, input_size=(size, size), kwargs=record.kwargs | {"img_size": size})
    if fixed:
        raise UserError(
            f"'{record.name}' takes images of {record.input_size} only. Choose a variant for {size} pixels."
        )
    return replace(record, input_size=(size, size))
