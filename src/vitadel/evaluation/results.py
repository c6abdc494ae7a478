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

from vitadel.data.checks import BadSample
from vitadel.evaluation.intervals import share
from vitadel.evaluation.ledger import Piece

__all__ = ["SCHEMA", "Tally", "samples_table"]

SCHEMA = 1


@dataclass
class Tally:
    """The verdicts of an audit as they come in, one row per selected sample that could be read."""

    index: Tensor
    label: Tensor
    prediction: Tensor
    bad: list[dict[str, Any]]
    held: dict[str, Tensor] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_clean(cls, pieces: Sequence[Piece], mislabelled: Sequence[BadSample] = ()) -> Tally:
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
        for held in self.held.values():
            standing = standing & held
        return standing

    def add(self, name: str, settings: dict[str, object], pieces: Sequence[Piece], independent: bool) -> None:
        """Take in an attack's verdicts. Samples it did not see keep the verdict that kept them from it."""
        before = self.correct if independent else self.standing
        held = before.clone()
        seen = np.concatenate([piece["index"] for piece in pieces] or [np.empty(0, np.int64)])
        assert seen.tolist() == self.index[before].tolist(), "an attack must be told about every exposed sample"
        for piece in pieces:
            rows = torch.searchsorted(self.index, torch.from_numpy(piece["index"].astype(np.int64)))
            held[rows] = torch.from_numpy(piece["held"])
        self.held[name] = held
        self.entries.append(
            {
                "name": name,
                "settings": settings,
                **share(int(held.sum()), len(held), "held", "robust_accuracy"),
                "counts": "this attack alone" if independent else "after this and all earlier attacks",
                "attacked": int(before.sum()),
                "void": sum(int(piece["void"].sum()) for piece in pieces),
                "gradient_calls": sum(int(piece["gradients"]) for piece in pieces),
                "forward_calls": sum(int(piece["forwards"]) for piece in pieces),
                "seconds": round(sum(float(piece["seconds"]) for piece in pieces), 3),
                "judged_on": "deployed model",
                "paper_style": None,
            }
        )

    def summary(self) -> dict[str, Any]:
        n = len(self.index)
        return {
            "clean": share(int(self.correct.sum()), n, "correct", "accuracy"),
            "attacks": self.entries,
            "worst_case": share(int(self.standing.sum()), n, "held", "robust_accuracy") if self.held else None,
        }


def samples_table(tally: Tally) -> bytes:
    """`samples.parquet`: one row per sample, one boolean column `held:<attack name>` per attack."""
    columns: dict[str, Any] = {
        "index": tally.index.numpy(),
        "label": tally.label.numpy(),
        "clean_prediction": tally.prediction.numpy(),
        "clean_correct": tally.correct.numpy(),
    }
    columns.update({f"held:{name}": held.numpy() for name, held in tally.held.items()})
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
