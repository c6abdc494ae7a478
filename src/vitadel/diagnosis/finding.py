"""What a check found: a verdict, the numbers behind it, and what to do; and when two numbers differ for good."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vitadel.evaluation.intervals import wilson

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
        return {"check": self.check, "verdict": self.verdict, "evidence": dict(self.evidence), "advice": self.advice}


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


def surprising(count: int, n: int, expected: float) -> bool:
    """Whether more than the `expected` share shows something, by the lower end of the 95 % interval."""
    return wilson(count, n)[0] > expected
