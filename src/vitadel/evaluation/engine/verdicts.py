"""Verdicts of a run, and the fields of `results.json` and columns of `samples.parquet` made of them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitadel.attacks.gain_ratio import GAINS, summarize_gains
from vitadel.data.batches import BadSample
from vitadel.evaluation.engine.class_mapping import RelabeledSource
from vitadel.evaluation.engine.stages import (
    NOTE,
    BatchRecord,
    MemberResult,
    RunContext,
    check_any_readable,
    clean_stage,
)
from vitadel.evaluation.engine.target import AMONG_DATA, SubsetLogits
from vitadel.statistics import share

_AFTER_ALL = "after this and all earlier attacks"


@dataclass
class Verdicts:
    """The verdicts of a run as they come in, one row per selected sample that could be read."""

    index: Tensor
    label: Tensor
    prediction: Tensor
    bad: list[dict[str, Any]]
    held: dict[str, Tensor] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)  # attacks with rules of their own
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_clean(cls, records: Sequence[BatchRecord], mislabeled: Sequence[BadSample] = ()) -> Verdicts:
        def column(name: str) -> Tensor:
            parts = [record[name].astype(np.int64) for record in records]
            return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64))

        bad = [asdict(sample) for sample in mislabeled]
        bad += [entry for record in records for entry in json.loads(str(record["bad"]))]
        return cls(column("index"), column("label"), column("prediction"), bad)

    @classmethod
    def from_clean_stage(
        cls, context: RunContext, indices: Tensor, mislabeled: Sequence[BadSample] = (), stage: str = "clean"
    ) -> Verdicts:
        """Predict the clean images; a `UserError` if none of them can be read."""
        verdicts = cls.of_clean(clean_stage(context, indices, stage), mislabeled)
        check_any_readable(len(verdicts.index))
        return verdicts

    @property
    def correct(self) -> Tensor:
        return self.prediction == self.label

    @property
    def robust(self) -> Tensor:
        """Correct when clean and not broken by any attack so far."""
        robust = self.correct
        for name, held in self.held.items():
            if name not in self.outside:
                robust = robust & held
        return robust

    def add(
        self, name: str, settings: dict[str, object], members: Sequence[MemberResult], *, alone: bool, own_rules: bool
    ) -> None:
        """Add an attack's verdicts. Samples that it was not run on count as broken.

        `alone`: it was run on all correct samples, not only on those that are still robust. With `own_rules` its budget
        differs from the run's, so it is not part of the worst case.
        """
        before = self.correct if alone else self.robust
        seen = np.concatenate([record["index"] for record in members[0].records] or [np.empty(0, np.int64)])
        assert seen.tolist() == self.index[before].tolist(), "an attack must be run on every exposed sample"
        if own_rules:
            self.outside.add(name)
        self.append(name, settings, torch.isin(self.index, members[-1].held), members, _counts(alone, own_rules))

    def append(
        self,
        name: str,
        settings: dict[str, object],
        held: Tensor,
        members: Sequence[MemberResult],
        counts: str = _AFTER_ALL,
    ) -> None:
        """Add an attack's entry; `held` says of all samples whether they are robust, in the sense of `counts`."""
        self.held[name] = held
        records = [record for member in members for record in member.records]
        seen = {index for member in members for record in member.records for index in record["index"].tolist()}
        entry = {
            "name": name,
            "settings": settings,
            **share(int(held.sum()), len(held), "held", "robust_accuracy"),
            "counts": counts,
            "own_rules": name in self.outside,
            "attacked": len(seen),
            **costs_of(records),
            "judged_on": "deployed model",
            "paper_style": None,  # of attention scaling only, which counts it apart
        }
        if gains := _gains(records):
            entry["gains"] = gains
        if len(members) > 1:
            entry["members"] = [
                {"name": member.name, "attacked": member.attacked, "broken": member.broken, **costs_of(member.records)}
                for member in members
            ]
        self.entries.append(entry)

    def summary(self) -> dict[str, Any]:
        n, by_the_rules = len(self.index), self.held.keys() - self.outside
        worst = share(int(self.robust.sum()), n, "held", "robust_accuracy") if by_the_rules else None
        return {
            "clean": share(int(self.correct.sum()), n, "correct", "accuracy"),
            "attacks": self.entries,
            "worst_case": worst,
        }


def accuracy_among_all(context: RunContext, indices: Tensor) -> dict[str, Any]:
    """The field `clean_among_all`: accuracy on the same images among all classes; empty if the model has them all."""
    model, source = context.model, context.source
    if not isinstance(model, SubsetLogits) or not isinstance(source, RelabeledSource):
        return {}
    whole = replace(context, model=model.classifier, source=source.source, classes=model.of)
    records = clean_stage(whole, indices, f"clean among all {model.of}")
    right = sum(int((record["prediction"] == record["label"]).sum()) for record in records)
    n = sum(len(record["label"]) for record in records)
    remark = f"the largest of all {model.of} logits"
    if model.why != AMONG_DATA:
        remark += "; not comparable with published numbers of this benchmark"
    return {"clean_among_all": {**share(right, n, "correct", "accuracy"), "classes": model.of, "remark": remark}}


def _counts(alone: bool, own_rules: bool) -> str:
    if own_rules:
        return "this attack alone, by its own rules; no part of the worst case"
    return "this attack alone" if alone else _AFTER_ALL


def costs_of(records: Sequence[BatchRecord]) -> dict[str, Any]:
    """Passes and seconds over all batches, and how many proposals broke box or budget."""
    return {
        "void": sum(int(record["void"].sum()) for record in records),
        "gradient_calls": sum(int(record["gradients"]) for record in records),
        "forward_calls": sum(int(record["forwards"]) for record in records),
        "seconds": round(sum(float(record["seconds"]) for record in records), 3),
    }


def _gains(records: Sequence[BatchRecord]) -> dict[str, Any] | None:
    """What the steps of an attack delivered against what gradients promised; None for attacks without gradients."""
    name = f"{NOTE}{GAINS}"
    sums = [torch.from_numpy(record[name]) for record in records if name in record]
    return summarize_gains(torch.cat(sums)) if sums else None


def samples_table(verdicts: Verdicts, more: Mapping[str, Tensor] | None = None) -> bytes:
    """`samples.parquet`: one row per sample, one boolean column `held:<attack name>` per attack, and `more` columns."""
    columns = {
        "index": verdicts.index,
        "label": verdicts.label,
        "clean_prediction": verdicts.prediction,
        "clean_correct": verdicts.correct,
    }
    return parquet_bytes(columns | {f"held:{name}": held for name, held in verdicts.held.items()} | dict(more or {}))


def parquet_bytes(columns: Mapping[str, Any]) -> bytes:
    """A parquet file of these columns: tensors, or anything that pyarrow takes."""
    arrays = {name: column.numpy() if isinstance(column, Tensor) else column for name, column in columns.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(arrays), buffer, compression="zstd")
    return buffer.getvalue()
