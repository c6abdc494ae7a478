"""How a run opened its model and its images: the field `opening` of command.json, and the commands that repeat it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.quantities import SEED, read_quantity
from vitadel.runtime.safe_reading import check_name, validated

_SUITE_VERBS = ("corruptions", "stability", "threat-levels")  # their runs are recorded as audits

_MODEL_OPTIONS = [
    *("weights", "num_classes", "mean", "std", "input_size", "crop_pct", "interpolation", "small_images"),
    *("crop_mode", "head_classes", "new_head", "kwargs"),
]


@dataclass(frozen=True)
class Opening:
    """The flags that say how a model and its images are opened and read, as values.

    `model` and `data` are None where a Python caller passed objects.
    """

    model: str | None = None
    data: str | None = None
    weights: str | None = None
    num_classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    input_size: int | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    crop_mode: str | None = None
    head_classes: tuple[int, ...] | None = None
    class_file: str | None = None
    among: str = "all"
    small_images: bool | int = False
    tokens: str | None = None
    allow_readable: bool = False
    data_root: str | None = None
    skip_bad: bool = False
    batch_size: int = 64
    seed: int = 0
    device: str = "auto"
    new_head: bool = False  # has no flag: Python callers give it in `model_options`
    kwargs: Mapping[str, Any] | None = None  # --model-kwargs KEY=VALUE ...

    def __post_init__(self) -> None:
        if not SEED.holds(self.seed):
            raise UserError(f"--seed must be {SEED.words}, got {self.seed}")

    @classmethod
    def read(cls, **flags: Any) -> Opening:
        """From flags as typed, or values as Python callers give them; those that are not fields are left out."""
        if flags.get("no_normalize"):
            if flags.get("mean") is not None or flags.get("std") is not None:
                raise UserError("--no-normalize is --mean 0 --std 1; give it or --mean and --std, not both")
            flags |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        if flags.get("model_kwargs"):
            flags["kwargs"] = _arguments(flags["model_kwargs"], "--model-kwargs")
        known = {each.name: flags[each.name] for each in fields(cls) if flags.get(each.name) is not None}
        for name, value in known.items():
            if name in _READERS:
                known[name] = _READERS[name](value, f"--{name.replace('_', '-')}")
            elif isinstance(value, str | Path):
                known[name] = str(value)
                check_name(known[name], name.replace("_", " "))
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """The fields as command.json records them."""
        return asdict(self)

    def model_options(self) -> dict[str, Any]:
        """The fields about the model itself, as `load_model` takes them."""
        return {name: getattr(self, name) for name in _MODEL_OPTIONS}

    def flags(self) -> list[str]:
        """The words that say so on the command line, without model and data."""
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("model", "data", "new_head") or value == each.default:
                continue
            if each.name == "kwargs":
                words += [word for pair in (value or {}).items() for word in ("--model-kwargs", _argument(*pair))]
                continue
            flag = _flag(each.name)
            if each.default is False:  # `small_images` may also be the patch size, which has no flag
                words.append(flag)
            else:
                words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return words


def _flag(name: str) -> str:
    return "--classes" if name == "class_file" else f"--{name.replace('_', '-')}"


def recorded_opening(command: Mapping[str, Any]) -> Opening:
    """How the run of this command.json opened model and data; folders of older versions have only the words typed."""
    recorded = command.get("opening")
    if isinstance(recorded, Mapping):
        known = {each.name: recorded[each.name] for each in fields(Opening) if each.name in recorded}
        return validated(Opening, known, "command.json, field 'opening'")
    try:
        return Opening.read(**_flags_typed(typed_words(command)))
    except (TypeError, AttributeError, ValueError) as error:
        raise UserError(f"command.json does not say how model and data were opened: {error}") from error


def typed_words(command: Mapping[str, Any]) -> list[str]:
    """The words typed after `vitadel` for the run of this command.json; none if a Python program started it."""
    argv = command.get("argv")
    argv = [str(word) for word in argv] if isinstance(argv, list) else []
    return argv if argv and argv[0] in (command.get("verb"), *_SUITE_VERBS) else []


def _flags_typed(words: Sequence[str]) -> dict[str, Any]:
    """The values of the flags that open something, in the words of a command."""
    kinds = {_flag(each.name): each for each in fields(Opening) if each.name != "model"}
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        flag, joined, value = word.partition("=")
        if flag not in kinds:
            continue
        name, default = kinds[flag].name, kinds[flag].default
        if default is False:
            found[name] = True
        elif joined or place + 1 < len(words):
            text = value if joined else words[place + 1]
            found[name] = int(text) if name in ("num_classes", "input_size", "batch_size", "seed") else text
    return found


def next_command(opening: Opening, verb: str, model: str, data: str, norm: str, eps: str, *more: str) -> str:
    """The words to type for `vitadel verb` on the same model and images, opened in the same way; safe to paste."""
    words = ["vitadel", verb, model, "--data", data, *opening.flags(), "--norm", norm, "--eps", eps, *more]
    return shlex.join(words)


def _channels(value: str | Sequence[float], flag: str) -> tuple[float, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    numbers = tuple(read_quantity(part, flag) for part in parts)
    if len(numbers) not in (1, 3):
        raise UserError(f"{flag} takes one number or three, one per color channel; got {value!r}")
    return numbers * (3 // len(numbers))


def _arguments(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """Arguments of a constructor, typed as KEY=VALUE: numbers, true, false, [lists] and words."""
    import yaml  # rarely needed, and slow to import

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip().isidentifier() or not value.strip():
            raise UserError(f"{flag} takes KEY=VALUE, as in depth=12; got {pair!r}")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{flag}: the value of {name!r} cannot be read: {value!r}") from error
        found[name.strip()] = tuple(read) if isinstance(read, list) else read
    return found


def _argument(name: str, value: object) -> str:
    text = json.dumps(value) if isinstance(value, list | tuple | bool) or value is None else str(value)
    return f"{name}={text}"


def _classes(value: str | Sequence[int], flag: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(map(str, value))
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"{flag} takes class numbers separated by commas, as in 0,217,482; got {value!r}")
    return tuple(map(int, parts))


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "mean": _channels,
    "std": _channels,
    "head_classes": _classes,
    "crop_pct": read_quantity,
}
