"""Names of recipe keys: those of earlier versions are translated, those of other libraries suggest ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vitadel.errors import UserError

__all__ = ["OTHER_WORDS", "translate", "translate_settings"]

OTHER_WORDS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "max_norm": "clip_grad_norm",
    "clip_grad": "clip_grad_norm",
    "opt": "name",
    "sched": "shape",
    "grad_accum_steps": "grad_accum",
    "amp": "amp_dtype",
    "aa": "auto_augment",
    "random_erasing": "reprob",
    "smoothing": "label_smoothing",
    "num_workers": "workers",
    "lambda": "beta",
}
"""What PyTorch, timm and papers also call some of the keys, where no spelling leads from one to the other."""

_SECTIONS = {"optimiser": "optimizer"}

_KEYS: dict[str, dict[str, str]] = {
    "optimizer": {
        "rate": "lr",
        "rate_batch": "lr_reference_batch",
        "rate_scaling": "lr_scaling",
        "clip": "clip_grad_norm",
    },
    "schedule": {
        "warm_up": "warmup_epochs",
        "warm_up_rate": "warmup_lr",
        "final_rate": "min_lr",
        "cool_down": "cooldown_epochs",
        "peak": "pct_start",
        "factor": "decay_rate",
    },
    "train": {"accumulation": "grad_accum", "precision": "amp_dtype"},
    "augmentation": {
        "flip": "hflip",
        "colour_jitter": "color_jitter",
        "rand_augment": "auto_augment",
        "erasing": "reprob",
        "mix_probability": "mixup_prob",
        "mix_switch": "mixup_switch_prob",
        "repeats": "repeated_aug",
    },
    "head": {"rates": "lrs", "decay": "weight_decay", "warm_up": "warmup_share"},
    "objective.afat": {"rate": "lr", "side": "patch_size", "gradient_length": "grad_norm"},
    "plugins.epsilon_warmup": {"first": "start_eps"},
}
"""Section, or component of the section, to {old key: new key}."""

_reported: set[str] = set()


def translate(layer: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A recipe's mapping, or overrides with dotted keys, with new names for old ones, which are reported once.

    `base` is the document that the layer is merged into; it knows the objective where the layer does not name one.
    Raises `UserError` if the layer gives a value under its old and its new name.
    """
    renamed: dict[str, str] = {}
    translated = _translated(layer, _objective(layer) or _objective(base), where, renamed)
    if fresh := {old: new for old, new in renamed.items() if old not in _reported}:
        _reported.update(fresh)
        changes = ", ".join(f"'{old}' is now '{new}'" for old, new in fresh.items())
        sys.stderr.write(f"{where}: old names of recipe keys are accepted; {changes}\n")
    return translated


def translate_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with dotted keys, as a run folder or checkpoint of an earlier version recorded them, with new names."""
    return _translated(settings, _objective(settings), "the recorded recipe", {})


def _translated(
    layer: Mapping[str, Any], use: str, where: str, renamed: dict[str, str], old_path: str = "", new_path: str = ""
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in layer.items():
        full = _new_name(f"{new_path}{key}", use)
        new = full.removeprefix(new_path)
        if new in result:
            raise UserError(
                f"{where} gives both '{old_path}{given[new]}' and '{old_path}{key}', the old and the new name of one "
                f"key; keep '{full}'"
            )
        given[new] = key
        if new != key:
            renamed[f"{old_path}{key}"] = full
        if isinstance(value, Mapping):
            value = _translated(value, use, where, renamed, f"{old_path}{key}.", f"{full}.")
        result[new] = value
    return result


def _new_name(path: str, use: str) -> str:
    section, *keys = path.split(".")
    section = _SECTIONS.get(section, section)
    component = {"objective": [use], "plugins": keys[:1]}.get(section, [])
    place = 1 if section == "plugins" else 0
    if len(keys) > place:
        known = _KEYS.get(".".join([section, *component]).replace("-", "_"), {})
        keys[place] = known.get(keys[place].replace("-", "_"), keys[place])
    return ".".join([section, *keys])


def _objective(layer: Mapping[str, Any]) -> str:
    section = layer.get("objective")
    use = layer.get("objective.use", section.get("use") if isinstance(section, Mapping) else None)
    return use if isinstance(use, str) else ""
