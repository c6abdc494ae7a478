"""What is known of a model's classes: names in its configuration, or ImageNet by timm's label lists."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

CLASS_FILE = "classes.txt"
_LIBRARIES = ("timm.", "torchvision.", "vitadel.backbones.families.")
"""Homes of architectures whose heads of ImageNet's size are ImageNet's, unless something else is known."""


def names_in_model(backbone: nn.Module, outputs: int | None) -> tuple[tuple[str, ...], str] | None:
    """The names of a module's outputs, and where they are known from; None if nothing is known."""
    config: Any = getattr(backbone, "config", None)
    labels = getattr(config, "id2label", None)
    if isinstance(labels, Mapping) and len(labels) == (outputs or len(labels)):
        names = tuple(str(labels.get(number, labels.get(str(number)))) for number in range(len(labels)))
        if not all(name.upper().startswith("LABEL_") for name in names):
            return names, "the model's id2label"
    own: Any = getattr(backbone, "pretrained_cfg", None)
    listed = own.get("label_names") if isinstance(own, Mapping) else None
    if isinstance(listed, list | tuple) and len(listed) == outputs:
        return tuple(map(str, listed)), "timm's configuration of the model"
    if outputs is None or not type(backbone).__module__.startswith(_LIBRARIES):
        return None
    return imagenet_names(outputs)


def imagenet_names(outputs: int) -> tuple[tuple[str, ...], str] | None:
    """Names such as 'tench (n01440764)' of the ImageNet set with this number of classes, where timm knows one."""
    subset = infer_imagenet_subset({"num_classes": outputs})
    if subset is None:
        return None
    return _label_names(subset), f"{subset.replace('imagenet', 'ImageNet')} assumed from its {outputs} outputs"


@lru_cache(maxsize=2)
def _label_names(subset: str) -> tuple[str, ...]:
    return tuple(f"{(lemmas_of(wnid) or (wnid,))[0]} ({wnid})" for wnid in ImageNetInfo(subset).label_names())


@lru_cache(maxsize=1)
def _imagenet() -> Any:
    return ImageNetInfo()


def lemmas_of(wnid: str) -> tuple[str, ...]:
    """The synonyms of a WordNet id, the most usual first; none for an id that ImageNet does not have."""
    try:
        text = _imagenet().label_name_to_description(wnid)
    except KeyError:
        return ()
    return tuple(part.strip() for part in text.split(",") if part.strip())


def class_file_beside(spec: str, weights: str | Path | None) -> Path | None:
    """A `classes.txt` beside the weight file, or in the run folder, that a model was loaded from."""
    named = weights if weights not in (None, "random", "pretrained") else spec
    path = Path(os.path.expanduser(str(named)))
    if not path.exists():
        return None
    found = (path if path.is_dir() else path.parent) / CLASS_FILE
    return found if found.is_file() else None
