"""From verdicts to what others read: `results.json` and `samples.parquet`."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitadel.attacks.attention_scaling.aas import PAPER_STYLE
from vitadel.data.validation import BadSample, skipped
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.stages import NOTE, MemberResult
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.intervals import share
from vitadel.version import __version__

__all__ = ["Verdicts", "described", "heading", "samples_table"]

SCHEMA = 1


@dataclass
class Verdicts:
    """The verdicts of an audit as they come in, one row per selected sample that could be read."""

    index: Tensor
    label: Tensor
    prediction: Tensor
    bad: list[dict[str, Any]]
    held: dict[str, Tensor] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)  # attacks by rules of their own
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_clean(cls, pieces: Sequence[BatchRecord], mislabelled: Sequence[BadSample] = ()) -> Verdicts:
        def column(name: str) -> Tensor:
            parts = [piece[name].astype(np.int64) for piece in pieces]
            return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64))

        bad = [asdict(sample) for sample in mislabelled]
        bad += [entry for piece in pieces for entry in json.loads(str(piece["bad"]))]
        return cls(column("index"), column("label"), column("prediction"), bad)

    @property
    def correct(self) -> Tensor:
        return self.prediction == self.label

    @property
    def standing(self) -> Tensor:
        """Correct when clean and not broken by any attack so far."""
        standing = self.correct
        for name, held in self.held.items():
            if name not in self.outside:
                standing = standing & held
        return standing

    def add(
        self, name: str, settings: dict[str, object], legs: Sequence[MemberResult], *, alone: bool, own_rules: bool
    ) -> None:
        """Take in an attack's verdicts. Samples it did not see keep the verdict that kept them from it.

        `alone`: it was shown all correct samples, not only those still standing. With `own_rules` its budget is
        another one than the audit's, so it is no part of the worst case.
        """
        before = self.correct if alone else self.standing
        seen = np.concatenate([piece["index"] for piece in legs[0].pieces] or [np.empty(0, np.int64)])
        assert seen.tolist() == self.index[before].tolist(), "an attack must be told about every exposed sample"
        held = torch.zeros_like(before)
        held[torch.searchsorted(self.index, legs[-1].held)] = True
        self.held[name] = held
        if own_rules:
            self.outside.add(name)
        pieces = [piece for leg in legs for piece in leg.pieces]
        entry = {
            "name": name,
            "settings": settings,
            **share(int(held.sum()), len(held), "held", "robust_accuracy"),
            "counts": _counts(alone, own_rules),
            "own_rules": own_rules,
            "attacked": int(before.sum()),
            **_costs(pieces),
            "judged_on": "deployed model",
            "paper_style": _paper_style(pieces),
        }
        if len(legs) > 1:
            entry["members"] = [
                {"name": leg.name, "attacked": _size(leg.pieces, "index"), "broken": _broken(leg), **_costs(leg.pieces)}
                for leg in legs
            ]
        self.entries.append(entry)

    def summary(self) -> dict[str, Any]:
        n, by_the_rules = len(self.index), self.held.keys() - self.outside
        worst = share(int(self.standing.sum()), n, "held", "robust_accuracy") if by_the_rules else None
        return {
            "clean": share(int(self.correct.sum()), n, "correct", "accuracy"),
            "attacks": self.entries,
            "worst_case": worst,
        }


def heading(seed: int, *, suite: str | None = None, complete: bool = True) -> dict[str, Any]:
    """What every `results.json` begins with."""
    named = {} if suite is None else {"suite": suite}
    return {"schema": SCHEMA, "version": __version__, "complete": complete, **named, "seed": seed}


def described(target: Target, verdicts: Verdicts, fingerprint: str) -> dict[str, Any]:
    """What was judged: the fields `model` and `data`."""
    return {
        "model": {
            "spec": target.model_spec,
            "parameters": sum(p.numel() for p in target.model.parameters()),
            "family": target.family,
            "fingerprint": fingerprint,
            "notes": {key: note for key, note in target.model.record.notes.items() if key != "about"},
        },
        "data": {
            "spec": target.data_spec,
            "n": len(verdicts.index),
            "classes": len(target.source.classes),
            "class_names": list(target.source.classes),
            "pixels": list(target.preprocess.shape),
            "preprocessing": target.preprocess.about,
            "left_out": len(verdicts.bad),
            "left_out_names": [entry["name"] for entry in verdicts.bad[:20]],
            "not_opened": list(skipped(target.source)),
        },
    }


def _counts(alone: bool, own_rules: bool) -> str:
    if own_rules:
        return "this attack alone, by its own rules; no part of the worst case"
    return "this attack alone" if alone else "after this and all earlier attacks"


def _size(pieces: Sequence[BatchRecord], name: str) -> int:
    return sum(int(piece[name].size) for piece in pieces)


def _broken(leg: MemberResult) -> int:
    return _size(leg.pieces, "index") - len(leg.held)


def _costs(pieces: Sequence[BatchRecord]) -> dict[str, Any]:
    return {
        "void": sum(int(piece["void"].sum()) for piece in pieces),
        "gradient_calls": sum(int(piece["gradients"]) for piece in pieces),
        "forward_calls": sum(int(piece["forwards"]) for piece in pieces),
        "seconds": round(sum(float(piece["seconds"]) for piece in pieces), 3),
    }


def _paper_style(pieces: Sequence[BatchRecord]) -> dict[str, Any] | None:
    """What the authors of an attack on a changed model would have reported: that model's accuracy under attack."""
    name = f"{NOTE}{PAPER_STYLE}"
    verdicts = [piece[name] for piece in pieces if name in piece]
    if not verdicts:
        return None
    right = np.concatenate(verdicts)
    return {
        **share(int(right.sum()), len(right), "held", "robust_accuracy"),
        "remark": "of the attacked samples, judged on the rescaled model instead of the deployed one: "
        "not a robustness estimate",
    }


def samples_table(verdicts: Verdicts) -> bytes:
    """`samples.parquet`: one row per sample, one boolean column `held:<attack name>` per attack."""
    columns: dict[str, Any] = {
        "index": verdicts.index.numpy(),
        "label": verdicts.label.numpy(),
        "clean_prediction": verdicts.prediction.numpy(),
        "clean_correct": verdicts.correct.numpy(),
    }
    columns.update({f"held:{name}": held.numpy() for name, held in verdicts.held.items()})
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
