"""What a check found: a verdict, the numbers behind it, and what to do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "BROKEN",
    "OK",
    "SUSPICIOUS",
    "Explanation",
    "Finding",
    "NotExamined",
    "Outcome",
    "Verdict",
    "explanation_of",
]

Verdict = Literal["ok", "suspicious", "broken"]
OK: Verdict = "ok"
SUSPICIOUS: Verdict = "suspicious"
BROKEN: Verdict = "broken"

Evidence = Mapping[str, Any]
Outcome = tuple[Verdict, Evidence]
"""What a check returns: its verdict and the numbers behind it."""


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
