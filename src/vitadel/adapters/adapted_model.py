"""Open a model with its adapters: robustness tokens of a file, or the tokens or TORA parts of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier
from vitadel.adapters.tokens.token_files import load_bank, load_tokens
from vitadel.adapters.tora.tora_files import backbone_of_parts, classes_of_parts, load_tora, parts_file
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.checkpoints import read_record, zoo_file, zoo_names
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head, load_model
from vitadel.errors import UserError
from vitadel.runtime.safe_reading import read_text_file
from vitadel.runtime.trusted_code import check_code_trusted, code_in_recipe

__all__ = ["open_model", "options_for_features", "token_run"]

_BEST = Path("weights") / "best.safetensors"
_OPTIONS = (
    *("weights", "num_classes", "mean", "std", "input_size", "crop_pct", "interpolation"),
    *("crop_mode", "small_images", "head_classes", "kwargs"),
)


def open_model(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
) -> Classifier | TokenClassifier | TokenBank | Tora:
    """Open any model of `load_model`, with robustness tokens of a file if given. A `spec` that is a run folder of token
    or TORA training, or a zoo model with adapters, is opened with its adapters.

    Several token files, separated by commas, form a bank: one set is drawn for each image of each call. A token file
    that other users can read is refused unless `allow_readable`.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None and value is not False}
    run = _adapted_run(spec)
    if run is None:
        shipped = _shipped_tora(spec, given) if tokens is None else None
        if shipped is not None:
            return shipped
        classifier = _load(spec, given)
        return classifier if tokens is None else _with_tokens(classifier, tokens, allow_readable)
    if tokens is not None:
        raise UserError(
            f"'{spec}' is a run of {run.use} with its own adapters; to use the tokens of {tokens}, name a backbone"
        )
    known = {name: run.model[name] for name in _OPTIONS if run.model.get(name)}
    classifier = _load(run.model["name"], {**known, **given})
    file = Path(spec) / _BEST
    if run.use == "tokens":
        return load_tokens(file, classifier, allow_readable=allow_readable).eval()
    start = run.adapter.get("start")
    parts = file if start is None else parts_file(start)
    classes = classes_of_parts(parts)
    if classes is not None and classifier.record.num_classes not in (None, classes):
        # As in the training: an unused head for its classes. That of ImageNet-21k alone has 16 M more parameters.
        classifier = _load(run.model["name"], {**known, **given, "num_classes": classes, "new_head": True})
    return load_tora(parts, classifier, None if start is None else file)


def _with_tokens(classifier: Classifier, tokens: str | Path, allow_readable: bool) -> TokenClassifier | TokenBank:
    files = [part.strip() for part in str(tokens).split(",") if part.strip()]
    if len(files) < 2 or Path(tokens).exists():  # a file name may contain a comma
        return load_tokens(tokens, classifier, allow_readable=allow_readable).eval()
    return load_bank(files, classifier, allow_readable=allow_readable).eval()


def _shipped_tora(spec: str, options: Mapping[str, Any]) -> Tora | None:
    """The TORA of the zoo with this name, on the backbone that its file names, or None."""
    if spec not in zoo_names():
        return None
    with zoo_file(spec) as path:
        backbone = backbone_of_parts(path) if read_record(path) is None else None
        return None if backbone is None else load_tora(path, load_model(backbone, **options))


@dataclass(frozen=True)
class _AdaptedRun:
    """The model and adapter sections of a training's recipe."""

    use: str
    model: Mapping[str, Any]
    adapter: Mapping[str, Any]


def _adapted_run(spec: str) -> _AdaptedRun | None:
    """The run of token or TORA training in folder `spec`, or None."""
    try:
        file = Path(spec) / "recipe.yaml"
        recipe = yaml.safe_load(read_text_file(file, "recipe")) if file.is_file() else {}
        run = _AdaptedRun(str(recipe["adapter"]["use"]), dict(recipe["model"]), dict(recipe["adapter"]))
    except (UserError, yaml.YAMLError, RecursionError, KeyError, TypeError, ValueError):
        return None
    if run.use not in ("tokens", "tora"):
        return None
    check_code_trusted(next(iter(code_in_recipe({"model": run.model})), None), f"the recipe of the run folder '{spec}'")
    return run


def token_run(spec: str) -> Mapping[str, Any] | None:
    """The model section of the recipe if `spec` is a run folder of token training, else None."""
    run = _adapted_run(spec)
    return run.model if run is not None and run.use == "tokens" else None


def _load(name: str, options: Mapping[str, Any]) -> Classifier:
    """Load a model; a new head is the same every time, as runs are identified by the weights of their models."""
    if not options.get("new_head"):
        return load_model(name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load_model(name, **options)


def options_for_features(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `open_model` if only features are used: a backbone released without a head gets a placeholder."""
    run = _adapted_run(spec)
    name = spec if run is None else str(run.model["name"])
    if not has_no_head(name):
        return dict(options)
    return {**options, "new_head": True, "num_classes": options.get("num_classes") or 2}
