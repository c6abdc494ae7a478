"""How a check of the diagnosis is declared. Each module of this folder holds one symptom; all their checks are run."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitadel.findings import BROKEN, MODULES, OK, SUSPICIOUS, Evidence, Finding, Verdict

if TYPE_CHECKING:
    from vitadel.diagnosis.examination import Examination, Level

__all__ = [
    "BROKEN",
    "MODULES",
    "OK",
    "SUSPICIOUS",
    "Check",
    "Explanation",
    "Finding",
    "NotExamined",
    "Outcome",
    "Verdict",
    "check",
    "explanation_of",
    "load_checks",
]


Outcome = tuple[Verdict, Evidence]
"""What a check returns: its verdict and the numbers behind it."""

Cost = tuple[float, float]
"""(gradients, forwards) per image."""


class NotExamined(Exception):
    """Raised by a check that does not apply to this model; the message is the reason."""


@dataclass(frozen=True)
class Explanation:
    """The three paragraphs of a check's docstring, from which docs, report and advice are made."""

    raised_if: str
    why: str
    what_to_do: str


_OPENINGS = ("Raised if ", "Why it matters: ", "What to do: ")


def explanation_of(check: Callable[..., object]) -> Explanation:
    """Read the docstring, whose three paragraphs open with 'Raised if', 'Why it matters:' and 'What to do:'."""
    paragraphs = [" ".join(part.split()) for part in (inspect.getdoc(check) or "").split("\n\n")]
    fits = len(paragraphs) == len(_OPENINGS) and all(map(str.startswith, paragraphs, _OPENINGS))
    assert fits, f"{check.__name__} must be explained in three paragraphs: {', '.join(_OPENINGS)}"
    return Explanation(*(text.removeprefix(opening) for text, opening in zip(paragraphs, _OPENINGS, strict=True)))


@dataclass(frozen=True)
class Check:
    """A check, which is called with an `Examination`.

    `identifier` goes into results.json; `title` says what is wrong if the check is raised. `attacks` names the attacks
    it compares, which run once for all checks; `own_cost` is what it takes besides. `as_given`: the check sees the
    model in the mode it came in, not in eval mode. `vital`: if it is broken, the checks after it mean nothing.
    `if_random`: it applies only to models with random outputs. `next` are the attacks to run if it is raised.
    """

    identifier: str
    title: str
    run: Callable[[Examination], Outcome]
    own_cost: Callable[[Level], Cost]
    attacks: Callable[[Level], tuple[str, ...]] = lambda level: ()
    as_given: bool = False
    vital: bool = False
    if_random: bool = False
    next: str | None = None

    def __call__(self, e: Examination) -> Outcome:
        return self.run(e)

    @property
    def explanation(self) -> Explanation:
        return explanation_of(self.run)


def check(
    identifier: str, title: str, *, cost: Cost | Callable[[Level], Cost] = (0, 0), **more: Any
) -> Callable[[Callable[[Examination], Outcome]], Check]:
    """Declare a function below `diagnosis/checks/` as a check; `more` are further fields of `Check`."""
    own_cost = cost if callable(cost) else lambda level: cost
    return lambda run: Check(identifier, title, run, own_cost, **more)


_FIRST = ("inputs", "outputs", "gradients", "attack_comparisons", "attention_saturation")


def load_checks() -> tuple[Check, ...]:
    """All checks in the order they run: modules as in `_FIRST`, then others; checks of random models come last."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    ordered = [*_FIRST, *(name for name in names if name not in _FIRST)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in ordered]
    checks = [value for module in modules for value in vars(module).values() if isinstance(value, Check)]
    return tuple(sorted(dict.fromkeys(checks), key=lambda check: check.if_random))
