"""Recipe files: find, read and write YAML with fractions as numbers, and rename the keys of earlier versions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import read_quantity

TEXTS = ("about", "paper", "expected", "hardware")
"""Keys for human readers; `expected` is what the paper reports, `hardware` what it ran on and for how long."""

_MOST_NODES = 100_000
FILE_ENDINGS = (".yaml", ".yml")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?( ?/ ?(\d+\.?\d*|\.\d+))?", re.IGNORECASE)


def shipped_recipes() -> list[str]:
    """The recipes that come with the package, as 'paper/job'."""
    folders = [folder for folder in _shipped_folder().iterdir() if folder.is_dir()]
    files = [f"{folder.name}/{file.name}" for folder in folders for file in folder.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def _shipped_folder() -> Traversable:
    return resources.files("vitadel") / "recipes"


def find_recipe(name: str, beside: Traversable | None = None) -> Traversable:
    """The file of a recipe; a path is relative to the folder of the file that names it, or to the working folder."""
    if name.endswith(FILE_ENDINGS):
        path = Path(os.path.expanduser(name))
        if isinstance(beside, Path):
            path = beside.parent / path
        if not path.is_file():
            raise UserError(f"there is no recipe file '{path}'; make one with `vitadel recipes copy NAME {name}`")
        return path
    known = shipped_recipes()
    if name not in known:
        raise UserError(
            f"unknown recipe '{name}'{nearest_names(name, known) or '.'} See `vitadel list recipes`; "
            "name a file of your own by its path, ending in .yaml"
        )
    return _shipped_folder() / f"{name}.yaml"


def read_text(file: Traversable, name: str) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{name}' cannot be read: {error}") from error


@lru_cache(maxsize=256)
def parse_recipe(text: str, name: str) -> Mapping[str, Any]:
    """The document of a recipe's text. Cached, as many recipes extend the same ones; do not change it in place."""
    document = read_yaml(text, f"recipe '{name}'")
    if not isinstance(document, dict):
        raise UserError(
            f"recipe '{name}' is not a document of keys and values; see `vitadel recipes show shapes/pgd-at`"
        )
    return {
        str(key): _with_published(value) if key in TEXTS else convert_numbers(value) for key, value in document.items()
    }


def _with_published(text: Any) -> Any:
    """A text with its line 'paper: PAPER/TABLE, ...' replaced by what the papers report there."""
    if not isinstance(text, str) or "paper: " not in text:
        return text
    from vitadel.papers.paper_documents import published_text

    lines = (published_text(line[7:]) if line.startswith("paper: ") else line for line in text.splitlines())
    return "\n".join(lines)


def read_yaml(text: str, what: str) -> Any:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_node(root, what)
        if _expanded_size(root, {}) > _MOST_NODES:
            raise UserError(f"{what} stands for more than {_MOST_NODES} values once its aliases (*) are expanded")
        return yaml.safe_load(text)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{what} is nested too deeply to be read") from None
    except Exception as error:  # values such as !!int x or 2020-99-99 raise whatever Python raises for them
        raise UserError(f"{what} is not readable as YAML: {error}") from error


def _expanded_size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """How many values a node stands for; what an alias repeats is counted each time, but visited once."""
    if isinstance(node, yaml.CollectionNode) and id(node) not in known:
        parts = [each for entry in node.value for each in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known.get(id(node), 1)


def _check_node(
    node: yaml.Node | None, what: str, around: tuple[yaml.Node, ...] = (), checked: set[int] | None = None
) -> None:
    """Refuse equal keys, of which YAML's reader silently keeps the last, and lists that contain themselves."""
    checked = set() if checked is None else checked
    if any(node is outer for outer in around):
        raise UserError(f"{what} has something that contains itself in line {around[-1].start_mark.line + 1}")
    if id(node) in checked:  # an alias
        return
    checked.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # others are refused when the document is made
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise UserError(
                        f"{what} has '{key.value}' twice in one place, again in line {line}; keep one of them"
                    )
                seen.add(key.value)
            _check_node(value, what, (*around, node), checked)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_node(value, what, (*around, node), checked)


def convert_numbers(value: Any) -> Any:
    """Convert fractions, 1e-3 (a text in YAML), numpy scalars and tensors of one number to Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): convert_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [convert_numbers(entry) for entry in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value) and ("/" in value or "e" in value.lower()):
        return read_quantity(value)
    single = isinstance(value, np.generic) or getattr(value, "ndim", None) == 0
    return value.item() if single else value


def recipe_text(document: Mapping[str, Any]) -> str:
    """A document as YAML, texts first, fractions as fractions; it reads back as the same document."""
    texts = "".join(_text_entry(key, document[key]) for key in TEXTS if key in document)
    rest = {key: _with_fractions(value) for key, value in document.items() if key not in TEXTS}
    return texts + yaml.safe_dump(rest, sort_keys=False, allow_unicode=True, width=118)


def _text_entry(key: str, text: object) -> str:
    lines = str(text).strip().splitlines()
    if len(lines) < 2:
        return yaml.safe_dump({key: str(text).strip()}, allow_unicode=True, width=118)
    return f"{key}: |-\n" + "".join(f"  {line}\n" for line in lines)


def _with_fractions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_fractions(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_fractions(entry) for entry in value]
    if isinstance(value, float) and len(repr(value)) > 12:  # not 0.2, which is 51/255 as well
        near, levels = Fraction(value).limit_denominator(12), round(value * 255, 6)
        if float(near) == value:
            return str(near)
        return f"{levels:g}/255" if levels / 255 == value else value
    return value


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
    return without_full_precision(_translated(settings, _objective(settings), "the recorded recipe", {}))


def without_full_precision(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are compared: fp32 is not among them, as runs of earlier versions did not record it."""
    return {key: value for key, value in settings.items() if (key, value) != ("train.amp_dtype", "fp32")}


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
