"""Findings: what a check reports about a model or a number, in the one shape that `results.json` holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Verdict = Literal["ok", "suspicious", "broken"]
OK: Verdict = "ok"
SUSPICIOUS: Verdict = "suspicious"
BROKEN: Verdict = "broken"

Evidence = str | Mapping[str, Any]


class CheckName(NamedTuple):
    """How a check is called: an identifier in kebab-case, and a title that says what is wrong if it is raised."""

    identifier: str
    title: str

    def finding(self, verdict: Verdict, evidence: Evidence, advice: str) -> Finding:
        """What this check found."""
        return Finding(self.identifier, verdict, evidence, advice, self.title)


# Checks that both an audit and a diagnosis make.
TRAIN_MODE = CheckName("train-mode", "Modules are in train mode")
RANDOM_OUTPUTS = CheckName("random-outputs", "Outputs differ between two identical calls")
PROBABILITY_OUTPUTS = CheckName("probability-outputs", "Outputs are probabilities, not logits")
LOG_PROBABILITY_OUTPUTS = CheckName("log-probability-outputs", "Outputs are log-probabilities, not logits")
CLEAN_ACCURACY = CheckName("clean-accuracy", "Clean accuracy is at chance level")
PRECHECK = CheckName("precheck", "Checks before the audit")

MODULES = "modules"
"""The evidence that names the modules to attack through."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `check` is its identifier; `advice` is empty where there is nothing to do."""

    check: str
    verdict: Verdict
    evidence: Evidence
    advice: str
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The entry in `results.json`."""
        evidence = self.evidence
        if not isinstance(evidence, str):
            evidence = {name: _json_value(value) for name, value in evidence.items()}
        names = {"check": self.check, "title": self.title or self.check}
        return {**names, "verdict": self.verdict, "evidence": evidence, "advice": self.advice}


def _json_value(value: Any) -> Any:
    """Infinity and NaN as text, because JSON has neither."""
    if isinstance(value, list):
        return [_json_value(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def title_of(finding: Mapping[str, Any]) -> str:
    """What to show for an entry of `results.json`; earlier versions wrote a phrase into `check`, and no title."""
    return str(finding.get("title") or finding["check"])


def attacks_through_modules(raised: Mapping[str, Evidence]) -> str | None:
    """The attacks through the modules that a raised finding names as the cause, if any does.

    `raised` has the evidence of each raised check.
    """
    for evidence in raised.values():
        if isinstance(evidence, Mapping) and evidence.get(MODULES):
            eot = "eot:20+" if RANDOM_OUTPUTS.identifier in raised else ""
            return f"{eot}bpda(modules={';'.join(evidence[MODULES])})+pgd-100,square"
    return None
