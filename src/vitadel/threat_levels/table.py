"""Results of the threat levels: accuracies with intervals per level and budget, worst case per image, controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitadel.attacks.settings import settings_of
from vitadel.evaluation.engine.run import describe_target, result_header
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, costs_of, samples_table
from vitadel.quantities import quantity_text
from vitadel.statistics import share
from vitadel.threat_levels.controls import NO_TOKENS
from vitadel.threat_levels.extraction import Extracted
from vitadel.threat_levels.feature_cosines import cosine_columns
from vitadel.threat_levels.levels import LEVELS, RELEASED_PIXELS, AttackerAssets, LevelAttack
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.sanity import findings_about_order


def fields_of(attack: LevelAttack, eps: float) -> dict[str, Any]:
    """What is reported of an attack at a budget, whatever it is judged by."""
    settings = settings_of(attack.attack(eps))
    return {
        "level": attack.level,
        "title": LEVELS[attack.level].title,
        "knows": LEVELS[attack.level].knows,
        "attack": attack.name,
        "eps": eps,
        "eps_text": quantity_text(eps) if attack.in_pixels else settings["effective_eps"],
        "in_pixels": attack.in_pixels,
        "settings": settings,
    }


def attack_name(row: Mapping[str, Any]) -> str:
    """The name of one attack at one budget in results and columns of samples."""
    units = "" if row["in_pixels"] else " normalised"
    return f"{row['level']} {row['attack']} at {quantity_text(row['eps'])}{units}"


def _key(row: Mapping[str, Any]) -> tuple[str, float]:
    return f"{row['level']} {row['attack']}", row["eps"]


def _accuracy(robust: Tensor) -> dict[str, Any]:
    return share(int(robust.sum()), len(robust), "held", "robust_accuracy")


@dataclass
class ThreatLevelTable:
    """Verdicts as they come in; `robust` has a column per attack and budget, over all images that could be read."""

    request: ThreatLevelsRequest
    verdicts: Verdicts
    assets: AttackerAssets
    extracted: Mapping[str, Extracted]
    robust: dict[tuple[str, float], Tensor] = field(default_factory=dict)
    by_victim: dict[tuple[str, float], Tensor] = field(default_factory=dict)  # of the first set, if a bank is judged
    rows: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)
    bare: dict[str, Tensor] = field(
        default_factory=dict
    )  # columns of verdicts on the backbone without tokens, controls
    cosines: dict[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    correct: dict[str, Tensor] = field(default_factory=dict)  # of other models than the victim, on clean images

    def add_clean(self, name: str, records: Sequence[BatchRecord]) -> None:
        self.correct[name] = torch.from_numpy(_column(records, "prediction").astype(np.int64)) == self.verdicts.label

    def add(self, attack: LevelAttack, eps: float, records: Sequence[BatchRecord], exposed: Tensor) -> Tensor:
        """Add an attack's verdicts at one budget; returns, for all images, which are robust to it."""
        counts: dict[str, Any] = {"counts": "this attack alone"}
        if attack.judges:
            sets = [_over_all(records, f"right:set {k}", exposed) for k in range(1, len(attack.judges) + 1)]
            each = torch.stack([clean & right for clean, right in zip(self._bank(), sets, strict=True)])
            robust = each.all(0)
            self.by_victim[attack.title, eps] = each[0]
            counts["counts"] = "right with every set of the bank; expected_accuracy is that of one random draw"
            counts["expected_accuracy"] = float(each.double().mean())
        else:
            robust = self._before(attack, eps) & _over_all(records, "right:tokens", exposed)
        row = {**self._row(attack, eps, records, robust), "attacked": int(exposed.sum()), **counts}
        self.rows.append(row)
        if moved := cosine_columns(records):
            self.cosines[attack_name(row)] = moved
        self.robust[attack.title, eps] = robust
        for name, clean in self.correct.items():
            if records and f"right:{name}" in records[0]:
                right = clean & _over_all(records, f"right:{name}", exposed)
                self.controls.append(self._control(name, attack, eps, right))
                judge = "bare:" if name == NO_TOKENS else f"control:{name}:"
                self.bare[f"{judge}{attack_name(row)}"] = right
        return robust

    def _bank(self) -> list[Tensor]:
        """Which clean images each set of the bank classifies correctly, the victim's first."""
        return [self.verdicts.correct, *(self.correct[f"bank {k}"] for k in range(2, len(self.assets.bank) + 1))]

    def _before(self, attack: LevelAttack, eps: float) -> Tensor:
        """Images left for this budget: an attacker who queries the victim keeps what it found at smaller ones."""
        left = self.verdicts.correct
        for (title, smaller), robust in self.robust.items():
            if attack.queries_victim and title == attack.title and smaller < eps:
                left = left & robust
        return left

    def _row(self, attack: LevelAttack, eps: float, records: Sequence[BatchRecord], robust: Tensor) -> dict[str, Any]:
        return {
            **fields_of(attack, eps),
            **_accuracy(robust),
            "cosines": {name: float(values.mean()) for name, values in cosine_columns(records).items()},
            **costs_of(records),
            "judged_on": "every set of the bank" if attack.judges else "deployed model",
        }

    def _control(self, name: str, attack: LevelAttack, eps: float, robust: Tensor) -> dict[str, Any]:
        return {
            "control": name,
            "attack": attack.title,
            "eps": eps,
            "eps_text": quantity_text(eps),
            "in_pixels": attack.in_pixels,
            "clean": share(int(self.correct[name].sum()), len(robust), "correct", "accuracy"),
            **_accuracy(robust),
        }

    def worst(self, eps: float) -> Tensor | None:
        """Images robust to everything that any attacker found within this budget, including smaller ones.

        A bank is another victim, but what was made for it is shown to ours, too. None if nothing else was run.
        """
        columns = []
        for row in self.rows:
            budget = row["eps"] if row["in_pixels"] else RELEASED_PIXELS
            if budget <= eps * (1 + 1e-9):
                columns.append(self.by_victim.get(_key(row), self.robust[_key(row)]))
        alone = all(row["level"] == "T8" for row in self.rows)
        return torch.stack([self.verdicts.correct, *columns]).all(0) if columns and not alone else None

    def by_level(self) -> list[tuple[str, float, Tensor]]:
        """For every level and budget that was run, which images are robust to all attacks of the level."""
        found = []
        for code in LEVELS:
            for eps in self.request.eps:
                rows = [row for row in self.rows if (row["level"], row["eps"]) == (code, eps) and row["in_pixels"]]
                if rows:
                    found.append((code, eps, torch.stack([self.robust[_key(row)] for row in rows]).all(0)))
        return found

    def bank_clean(self) -> float | None:
        """Clean accuracy of one random draw from the bank."""
        return float(torch.stack(self._bank()).double().mean()) if self.assets.bank else None

    def samples(self) -> bytes:
        held = {attack_name(row): self.robust[_key(row)] for row in self.rows}
        clean = {f"correct:{name}": each for name, each in self.correct.items()}
        return samples_table(replace(self.verdicts, held=held), self.bare | clean)


def threat_level_results(target: Target, table: ThreatLevelTable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every audit has, for the largest budget, and the levels themselves."""
    request, verdicts, n = table.request, table.verdicts, len(table.verdicts.index)
    largest = max(request.eps)
    worst = table.worst(largest)
    held: dict[str, dict[float, Tensor]] = {}
    for code, eps, robust in table.by_level():
        held.setdefault(code, {})[eps] = robust
    return {
        **result_header(request.seed, suite="ladder"),
        **describe_target(target, settings["model_fingerprint"], len(verdicts.index), verdicts.bad),
        "threat": {"norm": "linf", **_budget(largest)},
        "batch_size": request.batch_size,
        "precision": "fp32",
        "clean": share(int(verdicts.correct.sum()), n, "correct", "accuracy"),
        "attacks": [{**row, "name": attack_name(row), "paper_style": None, "own_rules": False} for row in table.rows],
        "worst_case": None if worst is None else _accuracy(worst),
        "ladder": {**_levels(table), "control_data": settings["control_data"]},
        "findings": findings_about_order(held),
    }


def _budget(eps: float) -> dict[str, Any]:
    return {"eps": eps, "eps_text": quantity_text(eps)}


def _levels(table: ThreatLevelTable) -> dict[str, Any]:
    request, assets = table.request, table.assets
    run = {row["level"] for row in table.rows}
    levels = [
        {
            "level": code,
            "title": LEVELS[code].title,
            "knows": LEVELS[code].knows,
            **_budget(eps),
            **_accuracy(robust),
        }
        for code, eps, robust in table.by_level()
    ]
    surrogates, bank = (
        [{"tokens": len(each.tokens), "fingerprint": each.fingerprint} for each in sets]
        for sets in (assets.surrogates, assets.bank)
    )
    return {
        "tokens": len(assets.victim.tokens) if assets.victim.enabled else 0,
        "fingerprint": assets.victim.fingerprint if assets.victim.enabled else None,
        "levels": levels,
        "left_out": [*(code for code in request.levels if code not in run), *_missing_parts(table)],
        "rows": table.rows,
        "controls": table.controls,
        "budgets": [_budget(eps) for eps in request.eps],
        "worst_case": [
            {**_budget(eps), **_accuracy(worst)} for eps in request.eps if (worst := table.worst(eps)) is not None
        ],
        "surrogates": surrogates,
        "bank": bank,
        "bank_clean_accuracy": table.bank_clean(),
        "extraction": [{"from": name, **each.numbers()} for name, each in table.extracted.items()],
    }


def _missing_parts(table: ThreatLevelTable) -> list[str]:
    """What T2 lacks, in words."""
    if "T2" not in table.request.levels:
        return []
    parts = [] if table.assets.own_head is not None else ["T2 with the attacker's own head (--attacker-head)"]
    return parts if table.request.recipe is not None else [*parts, "trained controls (--recipe)"]


def _column(records: Sequence[BatchRecord], name: str) -> np.ndarray:
    return np.concatenate([record[name] for record in records] or [np.empty(0)])


def _over_all(records: Sequence[BatchRecord], name: str, exposed: Tensor) -> Tensor:
    """A column of the exposed images as one of all images; False elsewhere."""
    over_all = torch.zeros_like(exposed)
    over_all[exposed] = torch.from_numpy(_column(records, name).astype(bool))
    return over_all
