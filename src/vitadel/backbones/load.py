"""`load_model` turns a MODEL spec into a classifier on pixels in [0, 1]."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from timm.models.xcit import Xcit
from torch import nn

from vitadel.backbones.checkpoints import (
    Checkpoint,
    fit_to,
    load_classifier,
    load_strict,
    read_checkpoint,
    read_record,
    zoo_file,
    zoo_names,
)
from vitadel.backbones.classifier import (
    Classifier,
    check_multiple,
    modules_in_train_mode,
    with_class_names,
    wrap,
)
from vitadel.backbones.classifier_head import keep_classes, keep_projection
from vitadel.backbones.compatibility import class_count, find_mismatch
from vitadel.backbones.record import ModelRecord, three_numbers
from vitadel.backbones.small_images import adapt_to_small_images
from vitadel.backbones.third_party import call_factory, load_hugging_face
from vitadel.backbones.timm_models import DROP_RATES, create_backbone, is_timm_name, own_models, suggest_models
from vitadel.errors import UserError, nearest_names

_PREFIXES = ("zoo", "published", "hf", "python")
_FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt")
_PREFERRED = ("best", "model", "last")


@dataclass(frozen=True)
class _Options:
    """The arguments of `load_model` other than the spec."""

    weights: str | Path | None
    num_classes: int | None
    normalization: tuple[tuple[float, float, float], tuple[float, float, float]] | None
    input_size: int | None
    crop_pct: float | None
    interpolation: str | None
    patch_size: int | None
    new_head: bool
    head_classes: tuple[int, ...] | None
    kwargs: Mapping[str, Any]
    crop_mode: str | None = None

    @property
    def dropping(self) -> dict[str, Any]:
        """The rates of dropout and drop-path, which may also be changed for a trained model."""
        return {key: value for key, value in self.kwargs.items() if key in DROP_RATES}

    @property
    def building(self) -> dict[str, Any]:
        return {key: value for key, value in self.kwargs.items() if key not in DROP_RATES}

    def weight_file(self) -> Path | None:
        return None if self.weights in (None, "random", "pretrained") else Path(os.path.expanduser(str(self.weights)))


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
    crop_mode: str | None = None,
    small_images: bool | int = False,
    new_head: bool = False,
    head_classes: Sequence[int] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> Classifier:
    """Load the model of a spec in eval mode: pixels in [0, 1] in, logits out.

    `spec`: `zoo:NAME`, a timm name, `published:NAME`, `hf:ORG/NAME`, a folder or file that vitadel wrote,
    `python:module:function`. `weights`, for a timm name: a file, 'pretrained' (timm's download) or 'random'; for a
    published model a file.
    Normalization: `mean` and `std` if given, else the checkpoint's record, else a normalization layer saved with the
    weights, else timm's data configuration (at the training size, which the position embedding is made for).
    `input_size`: resample the position embedding for images of another size. `small_images`: shrink the patches too
    (to 4 pixels, or to the given number; images have 32 pixels unless `input_size` is given). `crop_pct`,
    `interpolation` and `crop_mode` ('center', 'squash' or 'border') replace the model's own way to resize images.
    `new_head`: replace the classification layer by an untrained one with `num_classes`; otherwise `num_classes` must
    be that of the checkpoint. `head_classes`: keep only these classes of the model, in this order.
    `kwargs` go to `timm.create_model`, but for `attention_scale`, a fixed factor on all pre-softmax scores; of a model
    that vitadel wrote only dropout and drop-path rates can be changed.
    """
    if (mean is None) != (std is None):
        raise UserError("give mean and std together, not only one of them.")
    if new_head and head_classes is not None:
        raise UserError("a new head has no classes to keep: give new_head or head_classes, not both.")
    if head_classes is not None and num_classes not in (None, len(head_classes)):
        raise UserError(f"{len(head_classes)} classes are to be kept, but num_classes is {num_classes}; drop that.")
    if new_head and num_classes is None:
        raise UserError("a new head needs a number of classes: give num_classes.")
    options = _Options(
        weights=weights,
        num_classes=num_classes if head_classes is None else None,  # the checkpoint may have any number of classes
        normalization=None if mean is None or std is None else (three_numbers(mean, "mean"), three_numbers(std, "std")),
        input_size=input_size,
        crop_pct=crop_pct,
        interpolation=interpolation,
        patch_size=(4 if small_images is True else small_images) if small_images is not False else None,
        new_head=new_head,
        head_classes=None if head_classes is None else tuple(head_classes),
        kwargs=kwargs or {},
        crop_mode=crop_mode,
    )
    backbone, record = _open(spec, options)
    if options.weights != "random":
        record = with_class_names(backbone, record)
    classifier = _apply_options(backbone, record, options, spec).eval()
    if device is None:  # the CPU, or that of a `with torch.device(...)` around the call
        return classifier
    try:
        return classifier.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model cannot be put on device '{device}': {reason}. Try --device cpu.") from error


def has_no_head(spec: str, weights: str | None = None) -> bool:
    """Whether `spec` is a timm backbone released without a classifier, as DINOv2, and `weights` adds none."""
    config = timm.get_pretrained_cfg(spec) if is_timm_name(spec) else None
    return config is not None and config.num_classes == 0 and not _has_head(weights)


def _has_head(weights: str | None) -> bool:
    if weights is None or weights in ("pretrained", "random"):
        return False
    path = Path(os.path.expanduser(weights))
    return read_record(path) is not None or any(key.endswith("head.weight") for key in read_checkpoint(path).weights)


def _open(spec: str, options: _Options) -> tuple[nn.Module, ModelRecord]:
    prefix = re.match(r"([A-Za-z][\w-]+):", spec)
    if prefix:
        kind, rest = prefix.group(1), spec[prefix.end() :]
        if kind == "zoo":
            _refuse_own_weights(spec, options)
            return _parts_of(_open_zoo(spec, options.dropping))
        if kind == "published":
            return _open_published(rest, options)
        if kind == "hf":
            return _with_weight_file(
                *load_hugging_face(rest, needs_normalization=options.normalization is None), spec, options
            )
        if kind == "python":
            return _with_weight_file(*_open_factory(rest), spec, options)
        known = ", ".join(f"{name}:" for name in _PREFIXES)
        raise UserError(
            f"unknown kind of model '{kind}:' in '{spec}'{nearest_names(kind, _PREFIXES) or '.'} Known: {known}."
        )
    if is_timm_name(spec):
        return _open_timm(spec, options)
    path = Path(os.path.expanduser(spec))
    if path.exists() or "/" in spec or spec.startswith((".", "~")) or path.suffix in _FILE_SUFFIXES:
        _refuse_own_weights(spec, options)
        return _parts_of(load_classifier(_find_checkpoint(path) if path.is_dir() else path, options.dropping))
    near = suggest_models(spec.partition(".")[0], zoo_names())
    raise UserError(
        f"unknown model '{spec}'{near} It is not a timm name, a file or a folder. See `vitadel list models`."
    )


def _open_published(name: str, options: _Options) -> tuple[nn.Module, ModelRecord]:
    from vitadel.backbones.published_files import open_published

    if options.building:
        raise UserError(f"a published model is built as published; drop the arguments {', '.join(options.building)}.")
    given = options.normalization is not None
    return open_published(name, options.weights, options.dropping, own_normalization=given)


def _refuse_own_weights(spec: str, options: _Options) -> None:
    if options.weights is not None:
        raise UserError(
            f"'{spec}' brings its own weights; drop '{options.weights}' (--weights, in recipes model.weights), or "
            "name a timm model with it."
        )
    if options.building:
        raise UserError(f"'{spec}' is built as its record says; drop the arguments {', '.join(options.building)}.")


def _parts_of(classifier: Classifier) -> tuple[nn.Module, ModelRecord]:
    return classifier.backbone, classifier.record


def model_names() -> dict[str, str]:
    """Every kind of spec with a one-line description; the shipped models first."""
    about = {}
    for name in zoo_names():
        with zoo_file(name) as path:
            record = read_record(path)
            about[name] = record.notes.get("about", record.name) if record else _first_sentence(path.with_suffix(".md"))
    return (
        about
        | own_models()
        | {
            "TIMM_NAME": "any timm model, with --weights FILE, --weights pretrained or --weights random",
            "published:NAME": "published robust model, with --weights FILE; see `vitadel list models --published`",
            "hf:ORG/NAME": "image classifier on the Hugging Face hub, or hf:./FOLDER",
            "FOLDER or FILE.safetensors": "what `vitadel harden` wrote",
            "python:package.module:function": "your function that returns an nn.Module on pixels in [0, 1]",
        }
    )


def _first_sentence(card: Path) -> str:
    """The first line below the title of a model card, for weight files without a record: adapters."""
    return next((line for line in card.read_text("utf-8").splitlines() if line and not line.startswith("#")), card.stem)


def _open_zoo(spec: str, dropping: Mapping[str, float]) -> Classifier:
    with zoo_file(spec) as path:
        if read_record(path) is None:
            raise UserError(
                f"'{spec}' is a backbone with adapters, but a plain backbone is needed here. Name another model; in "
                "Python, `open_model` opens it with its adapters."
            )
        return load_classifier(path, dropping)


def _find_checkpoint(folder: Path) -> Path:
    """The checkpoint of a run folder: best, model or last, or the only one."""
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


def _open_factory(rest: str) -> tuple[nn.Module, ModelRecord]:
    classifier = wrap(call_factory(rest))
    name = f"python:{rest}" if classifier.record.name == "wrapped" else classifier.record.name
    notes = dict(classifier.record.notes)
    if modules_in_train_mode(classifier):
        notes["mode"] = "the factory returned a model in train mode; it was put into eval mode. Call .eval() in it."
    return classifier.backbone, replace(classifier.record, name=name, notes=notes)


def _with_weight_file(
    module: nn.Module, record: ModelRecord, spec: str, options: _Options
) -> tuple[nn.Module, ModelRecord]:
    """Load `weights`, if given, into a model that has weights of its own."""
    if options.kwargs:
        raise UserError(f"'{spec}' takes no arguments; drop {', '.join(options.kwargs)}.")
    path = options.weight_file()
    if path is None:
        if options.weights is not None:
            raise UserError(
                f"weights for '{spec}' must be a file, got '{options.weights}'; without --weights it brings its own."
            )
        return module, record
    return module, _load_weights(module, record, path, read_checkpoint(path))[0]


def _load_weights(
    module: nn.Module, record: ModelRecord, path: Path, checkpoint: Checkpoint
) -> tuple[ModelRecord, bool]:
    """Load strictly. The returned record has notes on the file, and its normalization if it has one (then True)."""
    fitted = load_strict(module, checkpoint.weights, str(path))
    notes = "; ".join((*checkpoint.notes, *fitted.notes))
    record = replace(record, notes=record.notes | ({"weights": notes} if notes else {}))
    own = read_record(path)
    if own is not None:
        kept = {name: getattr(own, name) for name in ("mean", "std", "attention_factors", "classes", "classes_from")}
        return replace(record, **kept), True
    if fitted.normalizer is not None:
        mean, std = fitted.normalizer
        return replace(record, mean=three_numbers(mean, "mean"), std=three_numbers(std, "std")), True
    return record, False


def _open_timm(name: str, options: _Options) -> tuple[nn.Module, ModelRecord]:
    if options.weights is None:
        raise UserError(
            f"no weights for '{name}'. Give --weights FILE for a checkpoint, --weights pretrained for timm's own "
            "download, or --weights random for an untrained model."
        )
    path = options.weight_file()
    if path is not None:
        return _open_timm_file(name, path, options)
    pretrained = options.weights == "pretrained"
    # A pretrained model keeps its own head here: timm would otherwise silently replace it by an untrained one.
    backbone = (
        _download(name, options.kwargs) if pretrained else create_backbone(name, options.num_classes, options.kwargs)
    )
    return backbone, _timm_record(name, backbone, options)


def _download(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        return create_backbone(name, None, kwargs, pretrained=True)
    except UserError:
        raise
    except Exception as error:  # timm, hub and network libraries have their own exceptions
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise UserError(
            f"timm could not get pretrained weights for '{name}': {reason}. "
            "Check the network, or give a file you have as --weights FILE."
        ) from error


def _timm_record(name: str, backbone: nn.Module, options: _Options) -> ModelRecord:
    config = resolve_model_data_config(backbone, use_test_size=False)
    classes: Any = getattr(backbone, "num_classes", None)
    if classes == 0 and not options.new_head:
        raise UserError(
            f"'{name}' has no classification head (num_classes=0). Give weights that have one and --num-classes."
        )
    size = options.kwargs.get("img_size", config["input_size"][1:])
    embed: Any = getattr(backbone, "patch_embed", None)
    if "img_size" in options.kwargs and isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        check_multiple(embed.img_size, embed.patch_size, name)  # timm would ignore the remaining pixels
    return ModelRecord(
        name=name,
        num_classes=classes or options.num_classes,
        kwargs=dict(options.kwargs),
        mean=config["mean"],
        std=config["std"],
        input_size=(size, size) if isinstance(size, int) else tuple(size),
        crop_pct=float(config["crop_pct"]),
        interpolation=config["interpolation"],
        crop_mode=config["crop_mode"],
    )


def _open_timm_file(name: str, path: Path, options: _Options) -> tuple[nn.Module, ModelRecord]:
    own = read_record(path)
    if own is not None and own.can_be_rebuilt:
        if own.name.partition(".")[0] != name.partition(".")[0]:
            raise UserError(
                f"'{path}' holds '{own.name}' by its own record, not '{name}'. Give the file itself as MODEL."
            )
        stored = {key: value for key, value in own.kwargs.items() if key not in DROP_RATES}
        given, recorded = (json.dumps(each, sort_keys=True, default=repr) for each in (options.building, stored))
        if options.building and given != recorded:
            raise UserError(f"'{path}' was built with {stored} by its own record, not with {options.building}.")
        return _parts_of(load_classifier(path, options.dropping))
    checkpoint = read_checkpoint(path)
    backbone = create_backbone(name, options.num_classes, options.kwargs)
    fitted = fit_to(backbone, checkpoint.weights).weights
    headless = options.num_classes is None and getattr(backbone, "num_classes", None) == 0
    if options.new_head or options.head_classes is not None or headless:  # the head may have any size in the file
        backbone = create_backbone(name, class_count(backbone, fitted) or 0, options.kwargs)
    record = _timm_record(name, backbone, options)
    if find_mismatch(backbone, fitted).misshaped:
        record = _set_sizes(backbone, record, options)  # the file may have been trained at the requested size
    return backbone, _load_foreign(backbone, record, path, checkpoint, options)


def _load_foreign(
    backbone: nn.Module, record: ModelRecord, path: Path, checkpoint: Checkpoint, options: _Options
) -> ModelRecord:
    """Load a file that vitadel did not write; the record notes what it leaves open, a refusal what it looks like."""
    from vitadel.backbones.published_files import describe_assumptions, suggest_published

    try:
        record, normalized = _load_weights(backbone, record, path, checkpoint)
    except UserError as error:
        raise UserError(f"{error}{suggest_published(checkpoint, path)}") from error
    opened = _with_preprocessing(record, options)
    assumed = describe_assumptions(
        opened,
        checkpoint,
        path,
        normalization=not normalized and options.normalization is None,
        resizing=options.crop_pct is None and options.patch_size is None,
    )
    return replace(record, notes=record.notes | assumed)


def _apply_options(backbone: nn.Module, record: ModelRecord, options: _Options, spec: str) -> Classifier:
    if options.new_head and options.num_classes is not None:
        reset = getattr(backbone, "reset_classifier", None)
        if reset is None:
            raise UserError(
                f"'{spec}' has no `reset_classifier`, so its head cannot be replaced. Do that in your own code."
            )
        keep_projection(backbone)
        reset(options.num_classes)
        notes = {key: note for key, note in record.notes.items() if key != "output"}  # it now has class scores
        record = replace(record, num_classes=options.num_classes, classes=None, classes_from=None, notes=notes)
    elif options.head_classes is not None:
        keep_classes(backbone, options.head_classes, spec)
        record = _with_classes_kept(record, options.head_classes)
    elif options.num_classes is not None and options.num_classes != (record.num_classes or options.num_classes):
        raise UserError(
            f"'{spec}' has {record.num_classes} classes, --num-classes {options.num_classes} was given. "
            "Drop the flag, or choose weights trained for that number of classes."
        )
    else:
        record = replace(record, num_classes=record.num_classes or options.num_classes)
    return Classifier(backbone, _with_preprocessing(_set_sizes(backbone, record, options), options))


def _with_preprocessing(record: ModelRecord, options: _Options) -> ModelRecord:
    """The record with the normalization and the way to resize images that were asked for."""
    if options.normalization is not None:
        record = replace(record, mean=options.normalization[0], std=options.normalization[1])
    if options.crop_pct is not None:
        record = replace(record, crop_pct=options.crop_pct)
    if options.interpolation is not None:
        record = replace(record, interpolation=options.interpolation)
    if options.crop_mode is not None:
        record = replace(record, crop_mode=options.crop_mode)
    return record


def _with_classes_kept(record: ModelRecord, kept: Sequence[int]) -> ModelRecord:
    names = None if record.classes is None else tuple(record.classes[number] for number in kept)
    note = f"{len(kept)} of {record.num_classes} outputs are kept (--head-classes)"
    return replace(record, num_classes=len(kept), classes=names, notes=record.notes | {"outputs": note})


def _set_sizes(backbone: nn.Module, record: ModelRecord, options: _Options) -> ModelRecord:
    """Change patch size and input size in place if requested and not done yet; return the new record."""
    patch, size = options.patch_size or record.small_images, options.input_size
    if options.patch_size is not None and size is None and record.small_images is None:
        size = 32
    if size is None and record.input_size is not None:
        size = record.input_size[0]
    if size is None or (patch, (size, size)) == (record.small_images, record.input_size):
        return record
    if patch is not None:
        adapt_to_small_images(backbone, size, patch)
        return replace(record, small_images=patch, input_size=(size, size), crop_pct=1.0)
    return _set_input_size(backbone, record, size)


def _set_input_size(backbone: nn.Module, record: ModelRecord, size: int) -> ModelRecord:
    patch: Any = getattr(getattr(backbone, "patch_embed", None), "patch_size", 1)
    tall, wide = patch if isinstance(patch, tuple) else (patch, patch)
    if size < 1:
        raise UserError(f"images need at least 1 pixel, input size {size} was given for '{record.name}'.")
    check_multiple((size, size), (tall, wide), record.name)
    resize = getattr(backbone, "set_input_size", None)
    config: Any = getattr(backbone, "pretrained_cfg", None)
    fixed = isinstance(config, Mapping) and config.get("fixed_input_size") and not isinstance(backbone, Xcit)
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
