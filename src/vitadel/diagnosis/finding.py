"""What a check found: a verdict, the numbers behind it, and what to do; and when two numbers differ for good."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

__all__ = [
    "BROKEN",
    "CHANCE",
    "OK",
    "SUSPICIOUS",
    "Explanation",
    "Finding",
    "NotExamined",
    "Outcome",
    "Verdict",
    "beaten",
    "binomial_tail",
    "explanation_of",
    "sign_test",
    "surprising",
]

Verdict = Literal["ok", "suspicious", "broken"]
OK: Verdict = "ok"
SUSPICIOUS: Verdict = "suspicious"
BROKEN: Verdict = "broken"

Evidence = Mapping[str, Any]
Outcome = tuple[Verdict, Evidence]
"""What a check returns: its verdict and the numbers behind it."""

CHANCE = 1e-3
"""How often a comparison may raise an alarm by chance; a visit makes about ten of them."""


@dataclass(frozen=True)
class Finding:
    """One check's result, as `results.json` holds it; `advice` is empty where there is nothing to do."""

    check: str
    verdict: Verdict
    evidence: Evidence
    advice: str

    def as_dict(self) -> dict[str, Any]:
        evidence = {name: _writable(value) for name, value in self.evidence.items()}
        return {"check": self.check, "verdict": self.verdict, "evidence": evidence, "advice": self.advice}


def _writable(value: Any) -> Any:
    """JSON has neither infinity nor NaN; a sick model's numbers must not end the run that is to tell of them."""
    if isinstance(value, list):
        return [_writable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class NotExamined(Exception):
    """A check that has nothing to say about this model; its message is the reason."""


@dataclass(frozen=True)
class Explanation:
    """The three paragraphs of a check's docstring, which the docs, the report and the advice are made from."""

    raised_if: str
    why: str
    what_to_do: str


_OPENINGS = ("Raised if ", "Why it matters: ", "What to do: ")


def explanation_of(check: Callable[..., object]) -> Explanation:
    """From the docstring, whose three paragraphs open with 'Raised if', 'Why it matters:' and 'What to do:'."""
    paragraphs = [" ".join(part.split()) for part in (inspect.getdoc(check) or "").split("\n\n")]
    fits = len(paragraphs) == len(_OPENINGS) and all(map(str.startswith, paragraphs, _OPENINGS))
    assert fits, f"{check.__name__} must be explained in three paragraphs: {', '.join(_OPENINGS)}"
    return Explanation(*(text.removeprefix(opening) for text, opening in zip(paragraphs, _OPENINGS, strict=True)))


def sign_test(more: int, less: int) -> float:
    """How often at least `more` of all differing samples would fall on one side if both sides were equally likely."""
    tosses = more + less
    return float(sum(math.comb(tosses, k) for k in range(more, tosses + 1)) / 2**tosses)


def beaten(first: Tensor, second: Tensor, floor: float) -> bool:
    """Whether the second list of held samples is shorter than the first: by more than `floor` of all, and not by luck.

    Both attacks ran on the same samples, so only samples that they disagree on count.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    gap = (only_first - only_second) / max(len(first), 1)
    return gap > floor and sign_test(only_first, only_second) < CHANCE


def binomial_tail(count: int, n: int, chance: float) -> float:
    """How often at least `count` of `n` samples show what each of them shows by this chance."""
    if count <= 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    rare, common = math.log(chance), math.log1p(-chance)

    def exactly(k: int) -> float:  # by logarithms: the number of ways to choose k of many overflows
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * rare + (n - k) * common)

    return min(1.0, math.fsum(exactly(k) for k in range(count, n + 1)))


def surprising(count: int, n: int, expected: float) -> bool:
    """Whether more show something than the `expected` share of all would by luck, by the exact binomial tail."""
    return binomial_tail(count, n, expected) < CHANCE
