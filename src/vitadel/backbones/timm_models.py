"""Build models by their timm name; models of `families/` join timm's registry when one of them is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from torch import nn

import vitadel.backbones.families
from vitadel.errors import UserError, nearest_names

__all__ = [
    "ATTENTION_SCALE",
    "DROP_RATES",
    "create_backbone",
    "data_config",
    "is_timm_name",
    "own_models",
    "published_top1",
    "register_models",
    "suggest_models",
]

DROP_RATES = ("drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate")
"""Arguments of timm's models that no weight depends on: dropout and drop-path rates."""

ATTENTION_SCALE = "attention_scale"
"""The argument that multiplies the scores of every softmax attention by a fixed number."""

_OWN: dict[str, str] = {}


@cache
def _families() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(vitadel.backbones.families.__path__))


def _register(families: Iterable[str]) -> None:
    """Import modules of `families/`; on import each registers its models."""
    for family in families:
        importlib.import_module(f"vitadel.backbones.families.{family}")


def is_timm_name(spec: str) -> bool:
    """Whether timm builds a model of this name, which may carry a tag as in `deit_tiny_patch16_224.fb_in1k`.

    Names of our own models begin with the name of their module in `families/`: `rvt_tiny`, `fan_micro_32`.
    """
    name = spec.partition(".")[0]
    _register(family for family in _families() if f"{name}_".startswith(f"{family}_"))
    return bool(timm.is_model(name))


def own_models() -> dict[str, str]:
    """The models of `families/`: name -> the first line of the class's docstring."""
    _register(sorted(_families()))
    return dict(_OWN)


def suggest_models(name: str, others: Iterable[str] = ()) -> str:
    """'; did you mean ...?' or '.': names that continue the given one come before names that resemble it."""
    own_models()
    known = [*timm.list_models(), *others]
    longer = [candidate for candidate in known if name and candidate.startswith(f"{name}_")]
    if longer:
        return f"; did you mean {', '.join(sorted(longer, key=lambda other: (len(other), other))[:3])}?"
    return nearest_names(name, known) or "."


@cache
def _top1() -> dict[str, float]:
    text = files("vitadel.backbones").joinpath("timm_top1.csv").read_text("utf-8")
    rows = (line.split(",") for line in text.splitlines()[1:])
    return {name: float(top1) / 100 for name, top1 in rows}


def published_top1(name: str) -> float | None:
    """The top-1 accuracy on ImageNet's validation images that timm publishes for a model; None if it has none.

    From results/results-imagenet.csv of pytorch-image-models. A name without a tag means its first weights.
    """
    tags = [f"{name}.{full.partition('.')[2]}" for full in get_arch_pretrained_cfgs(name)] if "." not in name else []
    return next((_top1()[each] for each in (name, *tags) if each in _top1()), None)


def timm_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and std of timm's weights of this name; None for names that timm does not have."""
    config = timm.get_pretrained_cfg(name) if is_timm_name(name) and name not in own_models() else None
    return None if config is None else (tuple(config.mean), tuple(config.std))


def create_backbone(
    name: str, num_classes: int | None, kwargs: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    """Call `timm.create_model`; unknown names, tags and arguments are user errors.

    `attention_scale` in `kwargs` is ours: a fixed factor on the pre-softmax scores of every softmax attention.
    """
    base, _, tag = name.partition(".")
    if not is_timm_name(base):
        raise UserError(f"unknown model '{name}'{suggest_models(base)} See `vitadel list models`.")
    if tag:
        tags = [full.partition(".")[2] for full in get_arch_pretrained_cfgs(base)]
        if tag not in tags:
            allowed = ", ".join(tags) or "none"
            raise UserError(
                f"model '{base}' has no weights called '{tag}'{nearest_names(tag, tags) or '.'} Known: {allowed}."
            )
    kwargs = dict(kwargs)
    scale = kwargs.pop(ATTENTION_SCALE, None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of sizes that are refused below
            model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **kwargs)
    except UserError:
        raise
    except (TypeError, AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"'{name}' cannot be built with {kwargs}: {error}. Check the arguments.") from error
    if scale is not None:
        from vitadel.backbones.attention_hooks import fix_attention_scale  # few models have one

        fix_attention_scale(model, scale)
    return model


def data_config(side: int, crop_pct: float = 1.0, **more: Any) -> dict[str, Any]:
    """timm's data configuration of a model for square images, with ImageNet's normalization."""
    return {
        "num_classes": 1000,
        "input_size": (3, side, side),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": "head",
        **more,
    }


def register_models(
    kind: Callable[..., nn.Module], models: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Let each name build a `kind`, a class or a function, with its settings; `configs`, by the same names, are timm's
    data configurations."""
    home = sys.modules[kind.__module__]
    vars(home)["default_cfgs"] = generate_default_cfgs(dict(configs))  # where timm looks for them
    for name, settings in models.items():
        _OWN[name] = (kind.__doc__ or "").partition("\n")[0]
        vars(home)[name] = register_model(_entry(kind, name, settings))  # timm adds the name to `__all__`


def _entry(kind: Callable[..., nn.Module], name: str, settings: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            raise UserError(
                f"there are no pretrained weights for '{name}' to download. Give a file of your own as --weights FILE, "
                "or train one from --weights random."
            )
        model: nn.Module = build_model_with_cfg(kind, name, False, **{**settings, **kwargs})
        return model

    # timm registers a function by its name, and in its module.
    build.__name__ = build.__qualname__ = name
    build.__module__ = kind.__module__
    return build
