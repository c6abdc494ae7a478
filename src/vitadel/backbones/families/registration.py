"""Models of our own in timm's registry, so that a name is all it takes to build one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vitadel.errors import UserError

__all__ = ["data_config", "own_names", "register_models"]

_OWN: dict[str, str] = {}


def data_config(side: int, crop_pct: float = 1.0, **more: Any) -> dict[str, Any]:
    """timm's data configuration of a model for square images, normalised as ImageNet's."""
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


def own_names() -> dict[str, str]:
    """The names registered so far, each with the first line of what its class says of itself."""
    return dict(_OWN)


def register_models(
    kind: type[nn.Module], models: Mapping[str, Mapping[str, Any]], configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Each name builds a `kind` with its settings; `configs`, by the same names, are timm's data configurations."""
    home = sys.modules[kind.__module__]
    vars(home)["default_cfgs"] = generate_default_cfgs(dict(configs))  # where timm looks for them
    for name, settings in models.items():
        _OWN[name] = (kind.__doc__ or "").partition("\n")[0]
        vars(home)[name] = register_model(_entry(kind, name, settings))  # timm adds the name to `__all__`


def _entry(kind: type[nn.Module], name: str, settings: Mapping[str, Any]) -> Callable[..., nn.Module]:
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
