"""What came of a climb: accuracies with intervals per level and budget, the worst case per image, controls."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitadel.attacks.settings import settings_of
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, describe_target, result_header
from vitadel.quantities import quantity_text
from vitadel.statistics import share
from vitadel.threat_levels.extraction import Extracted
from vitadel.threat_levels.levels import LEVELS, RELEASED_PIXELS, AttackerAssets, Rung
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.sanity import findings_about_order

__all__ = ["LadderTable", "attack_name", "ladder_results"]


def attack_name(row: Mapping[str, Any]) -> str:
    """One attack at one budget, as results and columns of samples call it."""
    units = "" if row["in_pixels"] else " normalised"
    return f"{row['level']} {row['attack']} at {quantity_text(row['eps'])}{units}"


@dataclass
class LadderTable:
    """Verdicts as they come in. `held` has a column per rung and budget, over all images that could be read."""

    request: ThreatLevelsRequest
    verdicts: Verdicts
    arms: AttackerAssets
    extracted: Mapping[str, Extracted]
    held: dict[tuple[str, float], Tensor] = field(default_factory=dict)
    by_victim: dict[tuple[str, float], Tensor] = field(default_factory=dict)  # of the first set, where banks are judged
    rows: list[dict[str, Any]] = field(default_factory=list)
    controls: list[dict[str, Any]] = field(default_factory=list)
    correct: dict[str, Tensor] = field(default_factory=dict)  # of other models than the victim, on clean images

    def clean(self, name: str, pieces: Sequence[BatchRecord]) -> None:
        self.correct[name] = torch.from_numpy(_column(pieces, "prediction").astype(np.int64)) == self.verdicts.label

    def add(self, rung: Rung, eps: float, pieces: Sequence[BatchRecord], exposed: Tensor) -> Tensor:
        """Take in a rung's verdicts at one budget; returns, for all images, which still stand after it."""
        n = len(self.verdicts.index)
        names = [f"set {number}" for number in range(1, len(rung.judges) + 1)] if rung.judges else ["tokens"]
        right = {name: _spread(pieces, f"right:{name}", exposed) for name in names}
        before = self._before(rung, eps)
        if rung.judges:
            each = torch.stack([clean & right[name] for clean, name in zip(self._bank(), names, strict=True)])
            held, expected = each.all(0), float(each.double().mean())
            self.by_victim[rung.title, eps] = each[0]
        else:
            held, expected = before & right["tokens"], None
        row = self._row(rung, eps, pieces, held)
        row["attacked"] = int(exposed.sum())
        row["counts"] = "this attack alone"
        if expected is not None:
            row["expected_accuracy"] = expected
            row["counts"] = "right with every set of the bank; expected_accuracy is that of one random draw"
        self.rows.append(row)
        self.held[rung.title, eps] = held
        for name, clean in self.correct.items():
            if pieces and f"right:{name}" in pieces[0]:
                verdict = clean & _spread(pieces, f"right:{name}", exposed)
                self.controls.append(self._control(name, rung, eps, verdict, n))
        return held

    def _bank(self) -> list[Tensor]:
        """Which clean images each set of the bank gets right, the victim's first."""
        return [self.verdicts.correct, *(self.correct[f"bank {k}"] for k in range(2, len(self.arms.bank) + 1))]

    def _before(self, rung: Rung, eps: float) -> Tensor:
        """Who asks the victim keeps what it found at smaller budgets."""
        standing = self.verdicts.correct
        for (title, smaller), held in self.held.items():
            if rung.asks and title == rung.title and smaller < eps:
                standing = standing & held
        return standing

    def _row(self, rung: Rung, eps: float, pieces: Sequence[BatchRecord], held: Tensor) -> dict[str, Any]:
        cosines = [name for name in (pieces[0] if pieces else {}) if name.startswith("cosine:")]
        settings = settings_of(rung.attack(eps))
        return {
            "level": rung.level,
            "title": LEVELS[rung.level].title,
            "knows": LEVELS[rung.level].knows,
            "attack": rung.name,
            "eps": eps,
            "eps_text": quantity_text(eps) if rung.in_pixels else settings["effective_eps"],
            "in_pixels": rung.in_pixels,
            "settings": settings,
            **share(int(held.sum()), len(held), "held", "robust_accuracy"),
            "cosines": {name.removeprefix("cosine:"): float(_column(pieces, name).mean()) for name in cosines},
            "void": int(sum(piece["void"].sum() for piece in pieces)),
            "gradient_calls": sum(int(piece["gradients"]) for piece in pieces),
            "forward_calls": sum(int(piece["forwards"]) for piece in pieces),
            "seconds": round(sum(float(piece["seconds"]) for piece in pieces), 3),
            "judged_on": "every set of the bank" if rung.judges else "deployed model",
        }

    def _control(self, name: str, rung: Rung, eps: float, verdict: Tensor, n: int) -> dict[str, Any]:
        return {
            "control": name,
            "attack": f"{rung.level} {rung.name}",
            "eps": eps,
            "eps_text": quantity_text(eps),
            "in_pixels": rung.in_pixels,
            "clean": share(int(self.correct[name].sum()), n, "correct", "accuracy"),
            **share(int(verdict.sum()), n, "held", "robust_accuracy"),
        }

    def worst(self, eps: float) -> Tensor | None:
        """Held against every image that any attacker found within this budget, those of smaller ones too.

        A bank is another victim, but what was made for it is shown to ours, too. None if nothing else was climbed.
        """
        columns = []
        for row in self.rows:
            budget = row["eps"] if row["in_pixels"] else RELEASED_PIXELS
            if budget <= eps * (1 + 1e-9):
                key = f"{row['level']} {row['attack']}", row["eps"]
                columns.append(self.by_victim.get(key, self.held[key]))
        alone = all(row["level"] == "T8" for row in self.rows)
        return torch.stack([self.verdicts.correct, *columns]).all(0) if columns and not alone else None

    def level(self, code: str, eps: float) -> Tensor | None:
        """Held against all attacks of a level; None if it was not climbed."""
        columns = [
            self.held[f"{row['level']} {row['attack']}", eps]
            for row in self.rows
            if row["level"] == code and row["eps"] == eps and row["in_pixels"]
        ]
        return torch.stack(columns).all(0) if columns else None

    def bank_clean(self) -> float | None:
        """Of one random draw from the bank, on clean images."""
        return float(torch.stack(self._bank()).double().mean()) if self.arms.bank else None

    def samples(self) -> bytes:
        columns: dict[str, Any] = {
            "index": self.verdicts.index.numpy(),
            "label": self.verdicts.label.numpy(),
            "clean_prediction": self.verdicts.prediction.numpy(),
            "clean_correct": self.verdicts.correct.numpy(),
        }
        for row in self.rows:
            held = self.held[f"{row['level']} {row['attack']}", row["eps"]]
            columns[f"held:{attack_name(row)}"] = held.numpy()
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer, compression="zstd")
        return buffer.getvalue()


def ladder_results(target: Target, table: LadderTable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every audit has, for the largest budget, and the ladder itself."""
    request, verdicts, n = table.request, table.verdicts, len(table.verdicts.index)
    largest = max(request.eps)
    worst = table.worst(largest)
    attacks = [{**row, "name": attack_name(row), "paper_style": None, "own_rules": False} for row in table.rows]
    return {
        **result_header(request.seed, suite="ladder"),
        **describe_target(target, verdicts, settings["model_fingerprint"]),
        "threat": {"norm": "linf", "eps": largest, "eps_text": quantity_text(largest)},
        "batch_size": request.batch_size,
        "precision": "fp32",
        "clean": share(int(verdicts.correct.sum()), n, "correct", "accuracy"),
        "attacks": attacks,
        "worst_case": None if worst is None else share(int(worst.sum()), n, "held", "robust_accuracy"),
        "ladder": {**_ladder(table), "control_data": settings["control_data"]},
        "findings": findings_about_order(_counts(table), n),
    }


def _ladder(table: LadderTable) -> dict[str, Any]:
    request, n = table.request, len(table.verdicts.index)
    climbed = {row["level"] for row in table.rows}
    levels = [
        {
            "level": code,
            "title": LEVELS[code].title,
            "knows": LEVELS[code].knows,
            "eps": eps,
            "eps_text": quantity_text(eps),
            **share(held, n, "held", "robust_accuracy"),
        }
        for code, by_eps in _counts(table).items()
        for eps, held in by_eps.items()
    ]
    return {
        "tokens": len(table.arms.victim.tokens),
        "fingerprint": table.arms.victim.fingerprint,
        "levels": levels,
        "left_out": [*(code for code in request.levels if code not in climbed), *_missing_parts(table)],
        "rows": table.rows,
        "controls": table.controls,
        "budgets": [{"eps": eps, "eps_text": quantity_text(eps)} for eps in request.eps],
        "worst_case": [
            {"eps": eps, "eps_text": quantity_text(eps), **share(int(worst.sum()), n, "held", "robust_accuracy")}
            for eps in request.eps
            if (worst := table.worst(eps)) is not None
        ],
        "surrogates": [{"tokens": len(s.tokens), "fingerprint": s.fingerprint} for s in table.arms.surrogates],
        "bank": [{"tokens": len(s.tokens), "fingerprint": s.fingerprint} for s in table.arms.bank],
        "bank_clean_accuracy": table.bank_clean(),
        "extraction": [
            {"from": name, "queries": e.queries, "cosine": e.cosine, "cosine_before": e.cosine_before}
            for name, e in table.extracted.items()
        ],
    }


def _missing_parts(table: LadderTable) -> list[str]:
    """What a climbed level lacks, in words."""
    if "T2" not in table.request.levels:
        return []
    parts = [] if table.arms.own_head is not None else ["T2 with the attacker's own head (--attacker-head)"]
    return parts if table.request.recipe is not None else [*parts, "trained controls (--recipe)"]


def _counts(table: LadderTable) -> dict[str, dict[float, int]]:
    """Level -> budget -> how many images stand against all of its attacks."""
    found: dict[str, dict[float, int]] = {}
    for code in LEVELS:
        for eps in table.request.eps:
            held = table.level(code, eps)
            if held is not None:
                found.setdefault(code, {})[eps] = int(held.sum())
    return found


def _column(pieces: Sequence[BatchRecord], name: str) -> np.ndarray:
    return np.concatenate([piece[name] for piece in pieces] or [np.empty(0)])


def _spread(pieces: Sequence[BatchRecord], name: str, exposed: Tensor) -> Tensor:
    """A column of the exposed images as one of all images; False elsewhere."""
    spread = torch.zeros_like(exposed)
    spread[exposed] = torch.from_numpy(_column(pieces, name).astype(bool))
    return spread
