"""A model by its name, with what was added to it: token files, and run folders of a training that added something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier
from vitadel.adapters.tokens.token_files import load_bank, load_tokens
from vitadel.adapters.tora.tora_files import backbone_of_parts, load_tora, parts_file
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head, load_model, zoo_file, zoo_names
from vitadel.errors import UserError

__all__ = ["open_model", "options_for_features", "token_run"]

_BEST = Path("weights") / "best.safetensors"
_OPTIONS = (
    *("weights", "num_classes", "mean", "std", "input_size", "crop_pct", "interpolation"),
    *("small_images", "head_classes", "kwargs"),
)


def open_model(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
) -> Classifier | TokenClassifier | TokenBank | Tora:
    """What `load_model` opens, with the robustness tokens of a file, or with what the training added whose run folder
    `spec` is: tokens, or the parts of TORA. A model of the zoo may be such a one, too.

    Several token files, with commas between them, are a bank: one set is drawn for each image of each call. A file
    that others can read is refused unless `allow_readable`.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None and value is not False}
    run = _adapted_run(spec)
    if run is None:
        shipped = _shipped_tora(spec, given) if tokens is None else None
        if shipped is not None:
            return shipped
        classifier = _loaded(spec, given)
        return classifier if tokens is None else _with_tokens(classifier, tokens, allow_readable)
    if tokens is not None:
        raise UserError(
            f"'{spec}' is a training of {run.use} and has its own; to use those of {tokens}, name a backbone"
        )
    known = {name: run.model[name] for name in _OPTIONS if run.model.get(name)}
    classifier = _loaded(run.model["name"], {**known, **given})
    file = Path(spec) / _BEST
    if run.use == "tokens":
        return load_tokens(file, classifier, allow_readable=allow_readable).eval()
    start = run.adapter.get("start")
    return load_tora(file, classifier) if start is None else load_tora(parts_file(start), classifier, file)


def _with_tokens(classifier: Classifier, tokens: str | Path, allow_readable: bool) -> TokenClassifier | TokenBank:
    files = [part.strip() for part in str(tokens).split(",") if part.strip()]
    if len(files) < 2 or Path(tokens).exists():  # a name may have a comma
        return load_tokens(tokens, classifier, allow_readable=allow_readable).eval()
    return load_bank(files, classifier, allow_readable=allow_readable).eval()


def _shipped_tora(spec: str, options: Mapping[str, Any]) -> Tora | None:
    """The TORA of the zoo by that name, on the backbone that its file names; None if there is none."""
    if spec not in zoo_names():
        return None
    with zoo_file(spec) as path:
        backbone = backbone_of_parts(path)
        return None if backbone is None else load_tora(path, load_model(backbone, **options))


@dataclass(frozen=True)
class _AdaptedRun:
    """What the recipe of a training says of its model, and of what was put on it."""

    use: str
    model: Mapping[str, Any]
    adapter: Mapping[str, Any]


def _adapted_run(spec: str) -> _AdaptedRun | None:
    """None if `spec` is no run folder, or one of a training of the whole model."""
    try:
        recipe = yaml.safe_load((Path(spec) / "recipe.yaml").read_text("utf-8"))
        run = _AdaptedRun(str(recipe["adapter"]["use"]), dict(recipe["model"]), dict(recipe["adapter"]))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None
    return run if run.use in ("tokens", "tora") else None


def token_run(spec: str) -> Mapping[str, Any] | None:
    """What the recipe of a token training says of its model; None if `spec` is no folder of one."""
    run = _adapted_run(spec)
    return run.model if run is not None and run.use == "tokens" else None


def _loaded(name: str, options: Mapping[str, Any]) -> Classifier:
    """A head that stands in for none is the same every time: runs are known by the weights of their models."""
    if not options.get("new_head"):
        return load_model(name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load_model(name, **options)


def options_for_features(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for `open_model` where only features count: a backbone released without a head gets one as stand-in."""
    run = _adapted_run(spec)
    name = spec if run is None else str(run.model["name"])
    if not has_no_head(name):
        return dict(options)
    return {**options, "new_head": True, "num_classes": options.get("num_classes") or 2}
