"""A model by its name, with what was added to it: token files, and run folders of a training that added something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from vitadel.adapters.robustness_tokens import Tokened
from vitadel.adapters.token_files import load_tokens
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head, load_model
from vitadel.errors import Mistake

__all__ = ["open_model", "options_for_features", "token_run"]

_OPTIONS = ("weights", "mean", "std", "input_size", "small_images", "kwargs")


def open_model(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
) -> Classifier | Tokened:
    """What `load_model` opens, with the robustness tokens of a file, or of the training whose run folder `spec` is.

    A token file that others can read is refused unless `allow_readable`.
    """
    given = {name: value for name, value in (options or {}).items() if value not in (None, False)}
    section = token_run(spec)
    if section is None:
        classifier = load_model(spec, **given)
        return classifier if tokens is None else load_tokens(tokens, classifier, allow_readable=allow_readable).eval()
    if tokens is not None:
        raise Mistake(f"'{spec}' is a training of tokens and has its own; to use those of {tokens}, name its backbone")
    known = {name: section[name] for name in _OPTIONS if section.get(name)}
    classifier = load_model(section["name"], **{**known, **given})
    file = Path(spec) / "weights" / "best.safetensors"
    return load_tokens(file, classifier, allow_readable=allow_readable).eval()


def token_run(spec: str) -> dict[str, Any] | None:
    """What the recipe of a token training says of its model; None if `spec` is no folder of one."""
    file = Path(spec) / "recipe.yaml"
    try:
        recipe = yaml.safe_load(file.read_text("utf-8"))
        return dict(recipe["model"]) if recipe["adapter"]["use"] == "tokens" else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def options_for_features(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `open_model` where only features count: a backbone released without a head gets one as stand-in."""
    name = (token_run(spec) or {}).get("name", spec)
    if not has_no_head(name):
        return dict(options)
    return {**options, "new_head": True, "num_classes": options.get("num_classes") or 2}
