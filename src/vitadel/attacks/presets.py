"""Attacks by name: 'pgd-100(step=1/255,restarts=5)' becomes an attack; one line here adds a name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from vitadel.amounts import amount_text, read_amount, read_value
from vitadel.attacks import losses
from vitadel.attacks.goals import Gama, OnLogits
from vitadel.attacks.losses import margin
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Dropping, Fading, Momentum, Steepest, usual_length
from vitadel.attacks.threats import L1, threat
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import Mistake, nearest_names
from vitadel.types import Attack, Threat

__all__ = ["CATALOGUE", "AttackName", "Preset", "make", "read_attack_name", "settings_of", "split_attack_list"]


def fgsm(threat: Threat) -> Attack:
    if isinstance(threat, L1):
        threat = dataclasses.replace(threat, sparsity=0.0)
    return PGD(threat, stepper=Steepest(threat.eps), steps=1, random_start=False)


def fgsm_rs(threat: Threat, reach: float = 1.25, restarts: int = 1) -> Attack:
    return _repeated(PGD(threat, stepper=Steepest(reach * threat.eps), steps=1), restarts)


def pgd(
    threat: Threat, steps: int = 20, step: float | None = None, restarts: int = 1, random_start: bool = True
) -> Attack:
    length = usual_length(threat, max(steps, 1)) if step is None else step
    return _repeated(PGD(threat, stepper=Steepest(length), steps=steps, random_start=random_start), restarts)


def cw(threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1) -> Attack:
    return _climbing(OnLogits(margin), threat, steps, step, restarts)


def dlr(threat: Threat, steps: int = 100, step: float | None = None, restarts: int = 1) -> Attack:
    return _climbing(OnLogits(losses.dlr), threat, steps, step, restarts)


def gama(
    threat: Threat, steps: int = 100, weight: float = 50.0, until: float = 0.25, reach: float = 2.0, restarts: int = 1
) -> Attack:
    return _repeated(PGD(threat, Gama(weight, until), Dropping(reach), steps, surface_start=True), restarts)


def mifpe(threat: Threat, steps: int = 100, gap: float = 10.0, reach: float = 2.0, restarts: int = 1) -> Attack:
    goal = OnLogits(partial(losses.rescaled_cross_entropy, gap=gap))
    return _repeated(PGD(threat, goal, Fading(reach), steps, surface_start=True), restarts)


def mi_fgsm(threat: Threat, steps: int = 10, decay: float = 1.0, step: float | None = None) -> Attack:
    return PGD(threat, stepper=Momentum(decay, step), steps=steps, random_start=False)


def _climbing(goal: OnLogits, threat: Threat, steps: int, step: float | None, restarts: int) -> Attack:
    length = usual_length(threat, max(steps, 1)) if step is None else step
    return _repeated(PGD(threat, goal, Steepest(length), steps), restarts)


def _repeated(attack: Attack, restarts: int) -> Attack:
    return attack if restarts == 1 else Restarts(attack, restarts)


@dataclass(frozen=True)
class Preset:
    """A builder from a threat and settings, with the line that `vitadel list attacks` shows.

    `exact`: on a linear model it reaches the boundary whenever the budget does, which `vitadel selftest` checks.
    """

    build: Callable[..., Attack]
    about: str
    exact: bool = True

    @property
    def settings(self) -> dict[str, object]:
        """Names and defaults of what may stand in brackets."""
        parameters = list(inspect.signature(self.build).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def describe(self) -> str:
        """The line for a list, with the settings that may stand in brackets."""
        names = ", ".join(name for name in self.settings if name != "steps")
        return f"{self.about}{f' [{names}]' if names else ''}"


CATALOGUE: dict[str, Preset] = {
    "fgsm": Preset(fgsm, "one step of size eps along the gradient (Goodfellow et al. 2015)"),
    "fgsm-rs": Preset(fgsm_rs, "one longer step from a random start (Wong et al. 2020)", exact=False),
    "pgd": Preset(pgd, "projected gradient ascent on the cross-entropy, K steps (Madry et al. 2018)"),
    "cw": Preset(cw, "PGD on the logit margin, without a floor (Carlini & Wagner 2017)"),
    "dlr": Preset(dlr, "PGD on the difference of logits ratio (Croce & Hein 2020)"),
    "gama": Preset(gama, "PGD on the probability margin and a pull from the clean one (Sriramanan et al. 2020)"),
    "mifpe": Preset(mifpe, "PGD on the cross-entropy of rescaled logits (Yu & Xu 2023)"),
    "mi-fgsm": Preset(mi_fgsm, "ascent along gathered gradients, for transfer (Dong et al. 2018)"),
}


@dataclass(frozen=True)
class AttackName:
    """What an attack's name says, before anything is built."""

    base: str
    settings: dict[str, float | int | bool | str] = field(default_factory=dict)


_NAME = re.compile(r"^(?P<base>[a-z][a-z-]*?)(?:-(?P<steps>\d+))?(?:\((?P<settings>.*)\))?$")


def split_attack_list(text: str) -> list[str]:
    """Split at commas, but not at those inside brackets."""
    names = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    if not all(names):
        raise Mistake(f"empty name in the attack list {text!r}; write it like fgsm,pgd-20(restarts=5)")
    return names


def read_attack_name(text: str) -> AttackName:
    """Check an attack's name and settings against the catalogue."""
    match = _NAME.match(text.strip().lower())
    base = match["base"] if match else text
    if match is None or base not in CATALOGUE:
        known = ", ".join(f"{n}-K" if "steps" in p.settings else n for n, p in CATALOGUE.items())
        near = nearest_names(base.lower(), CATALOGUE) or "."
        raise Mistake(f"unknown attack {text!r}{near} Known: {known} (K = number of steps).")
    allowed = CATALOGUE[base].settings
    settings: dict[str, float | int | bool | str] = {}
    for part in filter(None, (match["settings"] or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in allowed:
            names = ", ".join(allowed) or "none"
            raise Mistake(
                f"attack {base!r} has no setting {key!r}{nearest_names(key, allowed) or '.'} It takes: {names}; "
                f"write them like {base}(name=value)."
            )
        if key in settings or (key == "steps" and match["steps"]):
            raise Mistake(f"attack {text!r} sets {key} twice; set it once")
        settings[key] = _checked_setting(base, key, value, allowed[key])
    if match["steps"]:
        if "steps" not in allowed:
            raise Mistake(f"attack {base!r} takes no number of steps, got {text!r}; write {base!r}")
        settings["steps"] = int(match["steps"])
    return AttackName(base, settings)


def _checked_setting(base: str, key: str, text: str, default: object) -> float | int | bool | str:
    value = read_value(text)
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool),
        type(None): isinstance(value, (int, float)) and not isinstance(value, bool),
        str: isinstance(value, str),
    }
    if not fits.get(type(default), True):
        wanted = {bool: "true or false", int: "a whole number", str: "a name"}.get(type(default), "a number")
        raise Mistake(f"setting {key!r} of attack {base!r} must be {wanted}, got {text!r}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least_allowed = value >= 0 if key in ("decay", "weight") else value > 0
        if not least_allowed:
            raise Mistake(f"setting {key!r} of attack {base!r} must be positive, got {text!r}; it could not work")
    return value


def make(text: str, *, eps: float | str = 8 / 255, norm: str = "linf") -> Attack:
    """An attack by its contract name, e.g. `make("pgd-100", eps=8/255, norm="linf")`."""
    name = read_attack_name(text)
    return CATALOGUE[name.base].build(threat(norm, read_amount(eps, "eps")), **name.settings)


def settings_of(attack: Attack) -> dict[str, object]:
    """Every setting of a built attack, flat, as results record it: nothing about a number stays implicit."""
    settings: dict[str, object] = {"restarts": 1}
    for part in dataclasses.fields(attack):  # type: ignore[arg-type]
        value = getattr(attack, part.name)
        if part.name == "attack":
            settings = {**settings_of(value), **settings}
        elif part.name == "times":
            settings["restarts"] = value
        elif part.name == "attacks":
            settings["attacks"] = [{"attack": type(member).__name__, **settings_of(member)} for member in value]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            settings[part.name] = type(value).__name__
            inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            settings.update({f"{part.name}.{key}": _told(key, entry) for key, entry in inner.items()})
        else:
            settings[part.name] = _told(part.name, value)
    return settings


def _told(key: str, value: object) -> object:
    """Budgets and lengths as grey levels, everything else as it is."""
    return amount_text(value) if key in ("eps", "length") and isinstance(value, float) else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, partial):
        inside = ", ".join(f"{key}={_plain(entry)}" for key, entry in value.keywords.items())
        return f"{value.func.__name__}({inside})"
    return getattr(value, "__name__", value)
