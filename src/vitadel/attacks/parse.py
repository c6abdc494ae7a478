"""Parse attack names such as 'aas+pgd-100(step=1/255,restarts=5)': prefixes, attack, steps and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

from torch import Tensor, nn

from vitadel.attacks.registry import ATTACKS, PREFIXES, AttackEntry, foreign_entry
from vitadel.attacks.threats import make_threat
from vitadel.errors import UserError, nearest_names
from vitadel.quantities import read_quantity, read_value
from vitadel.types import Attack

Setting = float | int | bool | str

_NAME = re.compile(r"^(?P<base>[a-z][a-z-]*?)(?:-(?P<steps>\d+))?(?:\((?P<settings>.*)\))?$")
_PREFIX = re.compile(r"^(?P<name>[a-z][a-z-]*)(?::(?P<value>[^()]+))?(?:\((?P<settings>.*)\))?$")
_FOREIGN = re.compile(r"^(?P<base>(?:torchattacks|foolbox|art|python):[\w.:]+)(?:\((?P<settings>.*)\))?$")
_LARGEST = 1_000_000  # more steps would not end, and larger numbers overflow single precision
_FLAGS = ("paper_style",)  # true or false, where leaving it out means neither
_MAY_BE_ZERO = (
    *("decay", "weight", "target", "psnr", "side", "alpha", "layer", "noise", "probability", "tokens"),
    *("least_chance", "audited_share", "most_missed"),
)


@dataclass(frozen=True)
class AttackName:
    """The parts of an attack's name, before anything is built; `prefixes` from the outermost inwards."""

    base: str
    settings: dict[str, Setting] = field(default_factory=dict)
    prefixes: tuple[tuple[str, dict[str, Setting]], ...] = ()


QUICK = {"quick": ("fgsm", "pgd-20")}
"""Names for lists of attacks: a smoke test, which takes a minute and measures no robustness."""


def split_attack_list(text: str) -> list[str]:
    """Split a list of attacks at the commas outside brackets; `quick` stands for a pair of fast ones."""
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    names = [name for part in parts for name in QUICK.get(part.lower(), (part,))]
    if not all(names):
        raise UserError(f"empty name in the attack list {text!r}; write it like fgsm,pgd-20(restarts=5)")
    return names


def read_attack_name(text: str) -> AttackName:
    """Parse an attack's name and check prefixes, attack and settings against the registry."""
    *prefixes, attack = re.split(r"\+(?![^(]*\))", _lower(text.strip()))
    around = tuple(_read_prefix(prefix) for prefix in prefixes)
    if [name for name, _ in around].count("targeted") > 1:
        raise UserError(
            f"attack {text!r} has two targets, but only the outer one would be used; keep one targeted:TARGET+"
        )
    if found := _FOREIGN.match(attack):
        return AttackName(found["base"], _foreign_settings(found["base"], found["settings"] or ""), around)
    match = _NAME.match(attack)
    base = match["base"] if match else attack
    if match is None or base not in ATTACKS:
        known = ", ".join(f"{n}-K" if "steps" in p.settings else n for n, p in ATTACKS.items())
        if attack.count("(") != attack.count(")") or re.search(r"\s", attack):
            raise UserError(f"attack {attack!r} cannot be parsed; write it like pgd-20(restarts=5), without spaces")
        near = nearest_names(base, ATTACKS) or "."
        raise UserError(f"unknown attack {attack!r}{near} Known: {known} (K = number of steps).")
    allowed = ATTACKS[base].settings
    settings = _read_settings(f"attack {base!r}", base, match["settings"], allowed)
    if match["steps"]:
        if "steps" not in allowed:
            raise UserError(f"attack {base!r} takes no number of steps, got {text!r}; write {base!r}")
        if "steps" in settings:
            raise UserError(f"attack {text!r} sets steps twice; set it once")
        _check_size(f"attack {base!r}", "steps", match["steps"], float(match["steps"]))
        settings["steps"] = int(match["steps"])
    return AttackName(base, settings, around)


def _foreign_settings(whose: str, text: str) -> dict[str, Setting]:
    """Settings of another library's attack, which are checked when it is built."""
    settings: dict[str, Setting] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals or not key.isidentifier() or key in settings:
            raise UserError(f"{whose}: cannot read {part.strip()!r}; write each setting once, like {whose}(steps=10)")
        settings[key] = read_value(value)
    return settings


def _lower(text: str) -> str:
    """Names in lower case, but for those of the user's functions and of other libraries' classes."""
    parts = re.split(r"((?<=backward=)[^,)]*|(?<![\w-])(?:torchattacks|foolbox|art|python):[^+]*)", text)
    return "".join(part if place % 2 else part.lower() for place, part in enumerate(parts))


def _read_prefix(text: str) -> tuple[str, dict[str, Setting]]:
    match = _PREFIX.match(text)
    name = match["name"] if match else text
    if match is None or name not in PREFIXES:
        known = ", ".join(prefix.title(name) for name, prefix in PREFIXES.items())
        raise UserError(f"unknown prefix {text!r}{nearest_names(name, PREFIXES) or '.'} Known: {known}.")
    prefix = PREFIXES[name]
    settings = _read_settings(f"prefix {name!r}", name, match["settings"], prefix.settings)
    if match["value"] is not None:
        if prefix.value is None or prefix.value in settings:
            raise UserError(f"prefix {text!r}: write {prefix.title(name)}")
        default = prefix.settings[prefix.value]
        settings[prefix.value] = _read_setting(f"prefix {name!r}", prefix.value, match["value"], default)
    return name, settings


def _read_settings(whose: str, base: str, text: str | None, allowed: Mapping[str, object]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals and key in allowed:
            sample = {bool: "true", str: "NAME"}.get(type(allowed[key]), "N")
            raise UserError(f"setting {key!r} of {whose} has no value; write {key}={sample}")
        if key not in allowed:
            names = ", ".join(allowed) or "none"
            raise UserError(
                f"{whose} has no setting {key!r}{nearest_names(key, allowed) or '.'} It takes: {names}; "
                f"write them like {base}(name=value)."
            )
        if key in settings:
            raise UserError(f"{whose} sets {key} twice; set it once")
        settings[key] = _read_setting(whose, key, value, allowed[key])
    return settings


def _read_setting(whose: str, key: str, text: str, default: object) -> Setting:
    value = text if key == "modules" else read_value(text)  # a module's name may be a number
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        type(None): isinstance(value, (int, float)) and isinstance(value, bool) == (key in _FLAGS),
        str: isinstance(value, str) or (key == "target" and isinstance(value, int) and not isinstance(value, bool)),
    }
    if not fits.get(type(default), True):
        names = "a name or the number of a class" if key == "target" else "a name"
        wanted = {bool: "true or false", int: "a whole number", str: names}.get(type(default), "a number")
        wanted = "true or false" if key in _FLAGS else wanted
        raise UserError(f"setting {key!r} of {whose} must be {wanted}, got {text!r}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key in _MAY_BE_ZERO and value < 0:
            raise UserError(f"setting {key!r} of {whose} must not be negative, got {text!r}")
        if key not in _MAY_BE_ZERO and value <= 0:
            raise UserError(f"setting {key!r} of {whose} must be positive, got {text!r}")
        _check_size(whose, key, text, value)
    return value


def _check_size(whose: str, key: str, text: str, value: float) -> None:
    if value > _LARGEST:
        given = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f"setting {key!r} of {whose} must be at most {_LARGEST:,}, got {given}")


def entry_of(name: AttackName) -> AttackEntry:
    """The registry's entry of an attack without its prefixes."""
    return foreign_entry(name.base) if ":" in name.base else ATTACKS[name.base]


def needs_known_family(text: str) -> bool:
    """Whether the attack or one of its prefixes needs a model family whose attention or patches are known."""
    name = read_attack_name(text)
    return entry_of(name).needs_vit or any(PREFIXES[prefix].needs_vit for prefix, _ in name.prefixes)


def without_escalation(names: Sequence[str]) -> list[str]:
    """The names with `escalate=false` in the brackets of autoattack-fast, unless they set it themselves."""
    fast = re.compile(r"autoattack-fast(?:\((?P<settings>[^)]*)\))?")
    if not any(fast.search(name) for name in names):
        raise UserError(f"--no-escalate has an effect on autoattack-fast only, and the attacks are {', '.join(names)}")

    def rewrite(match: re.Match[str]) -> str:
        settings = match["settings"] or ""
        return (
            match[0]
            if "escalate" in settings
            else f"autoattack-fast({','.join(filter(None, (settings, 'escalate=false')))})"
        )

    return [fast.sub(rewrite, name) for name in names]


def numbered_targets(text: str) -> list[int]:
    """The target classes that a name gives as numbers."""
    given = [settings.get("target") for _, settings in read_attack_name(text).prefixes]
    return [target for target in given if isinstance(target, int)]


def check_targets(name: str, labels: Tensor) -> None:
    """Refuse an attack whose target class is the label of some of the samples."""
    for target_class in numbered_targets(name):
        count = int((labels == target_class).sum())
        if count:
            raise UserError(
                f"{name}: class {target_class} is the label of {count} of the {len(labels)} samples, so there is "
                "nothing to reach for them; choose targets by a rule: targeted:next+, :least+ or :random+"
            )


@overload
def make(text: str, *, eps: float | str = ..., norm: str = ..., model: None = None) -> Attack: ...
@overload
def make(text: str, *, eps: float | str = ..., norm: str = ..., model: nn.Module) -> Callable[..., Tensor]: ...
def make(
    text: str, *, eps: float | str = 8 / 255, norm: str = "linf", model: nn.Module | None = None
) -> Attack | Callable[..., Tensor]:
    """Build an attack by its name, e.g. `make("pgd-100", eps=8/255, norm="linf")`.

    With a `model`, the attack on it, which takes images and labels as those of torchattacks do.
    """
    if not isinstance(model, nn.Module | None):
        raise UserError(f"model must be an nn.Module on pixels in [0, 1], got {type(model).__name__}; try load_model")
    name = read_attack_name(text)
    entry, threat = entry_of(name), make_threat(norm, read_quantity(eps, "eps"))
    if norm not in entry.norms:
        raise UserError(f"attack {name.base!r} works in {', '.join(entry.norms)}, not in {norm}; choose another --norm")
    attack = entry.create(threat, **name.settings)
    for prefix, settings in reversed(name.prefixes):
        attack = PREFIXES[prefix].wrap(attack, **settings)
    return attack if model is None else partial(attack, model)
