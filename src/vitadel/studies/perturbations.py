"""Do perturbations carry meaning? Other models classify them alone (Debenedetti 2022, section 4.3.1, table 9).

In the thesis, standard models have the correct label among their first five predictions for 40 to 50 % of a robust
model's rescaled perturbations. Here the same is reported beside chance: perturbations permuted over the images, and
their own values at other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of, training_form
from vitadel.data.batches import Batch
from vitadel.errors import UserError, check_known
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import share
from vitadel.studies.agreement import agreement, chance, permuted_agreement, top_classes, top_of
from vitadel.studies.reference_models import ReferenceModel, fingerprint_others, on_device, open_reference_models
from vitadel.studies.run import StudyContext, StudyRequest, column, pixels_in_8_bits, run_study
from vitadel.types import Attack

_PAPER = "thesis, table 9: scaled by eps, top answers for the label, all images"
_KINDS = ("perturbation", "scattered")
PRESETS = ("ours", "paper")


@dataclass(frozen=True)
class PerturbationsRequest(StudyRequest):
    """`attack` runs all its steps, without stopping at the first success. `others` are MODEL specs.

    The preset 'paper' is the attack of the thesis' code: PGD-100 with steps of 1.5 eps / 100, a random start, and the
    last iterate.
    """

    attack: str = "pgd-100"
    preset: str = "ours"
    others: tuple[str, ...] = ()
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("preset", self.preset, PRESETS)
        if self.preset == "paper" and (self.attack != "pgd-100" or self.norm != "linf"):
            raise UserError(
                f"the preset 'paper' is PGD-100 in Linf, got {self.attack} in {self.norm}; leave out the preset for "
                "another attack or norm"
            )
        self.make()  # refuse a wrong name before anything is loaded

    @property
    def attack_text(self) -> str:
        """The attack with the steps of the preset."""
        return f"pgd-100(step={1.5 * 255 * self.eps / 100:.10g}/255)" if self.preset == "paper" else self.attack

    def make(self) -> Attack:
        return training_form(make(self.attack_text, eps=self.eps, norm=self.norm))


def rescale(change: Tensor, size: Tensor | float) -> Tensor:
    """Map changes in [-size, size] to pixels in [0, 1]: (change + size) / (2 size). No change at all is mid gray."""
    half = torch.as_tensor(size, dtype=change.dtype, device=change.device).clamp(min=1e-30)
    return (0.5 + change / (2 * half)).clamp(0, 1)


def scatter(change: Tensor, rng: SampleRNG) -> Tensor:
    """Move the pixels to random places: noise of the same strength and colors, without a picture."""
    flat = change.flatten(2)
    order = rng.permutation(flat.shape[2])[:, None].expand_as(flat)
    return flat.gather(2, order).view_as(change)


def study_perturbations(
    target: Target, request: PerturbationsRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Attack every image, and let the reference models classify the change alone."""
    models = open_reference_models(target, request.others)

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        attack = study.calibrate(request.make(), request.calibration)
        with on_device(models, processes.device):
            records = _measure(study, attack, request, models)
        described = {"name": request.attack_text, "settings": settings_of(attack)}
        arrays = {name: column(records, name) for name in ("x", "z", "change")}
        place = np.searchsorted(study.verdicts.index.numpy(), study.shown.numpy())
        labels = {"label": study.verdicts.label.numpy()[place], "reached": column(records, "reached")[place]}
        return _summarize(study, request, models, records) | {"attack": described}, {**arrays, **labels}

    inputs = {"others_fingerprint": fingerprint_others(models)}
    return run_study("perturbations", target, request, processes, work, inputs=inputs, **options)


def _measure(
    study: StudyContext, attack: Attack, request: PerturbationsRequest, models: Sequence[ReferenceModel]
) -> list[BatchRecord]:
    held = 0

    def work(batch: Batch, rng: SampleRNG) -> BatchRecord:
        z, verdict = study.attack(attack, batch, rng)
        change = z - batch.x
        largest = change.abs().flatten(1).amax(1).view(-1, 1, 1, 1)
        images = {
            "perturbation": rescale(change, largest),
            "scattered": rescale(scatter(change, rng.stream("scattered")), largest),
        }
        if request.norm == "linf":
            images["paper"] = rescale(change, request.eps)
        record: BatchRecord = {"held": verdict.held.cpu().numpy(), "reached": verdict.prediction.cpu().numpy()}
        for place, model in enumerate(models):
            clean = model.logits(batch.x)
            record["classes"] = np.asarray(clean.shape[1])
            record[f"{place} clean"] = (clean.argmax(1) == batch.y).cpu().numpy()
            for kind, shown in images.items():
                record[f"{place} {kind}"] = top_classes(model.logits(shown), top_of(clean.shape[1])).cpu().numpy()
        drawn = {"x": batch.x, "z": z, "change": images["perturbation"]}
        return record | pixels_in_8_bits(batch, study.shown, drawn)

    def note(record: BatchRecord) -> str:
        nonlocal held
        held += int(record["held"].sum())
        return f"{held} robust"

    return study.stage("perturbations", work, note)


def _summarize(
    study: StudyContext, request: PerturbationsRequest, models: Sequence[ReferenceModel], records: Sequence[BatchRecord]
) -> dict[str, Any]:
    label, reached, classes = study.verdicts.label.numpy(), column(records, "reached"), int(records[0]["classes"])
    fooled = study.verdicts.correct.numpy() & ~column(records, "held")
    targets = {"label": (label, np.ones_like(fooled)), "reached": (reached, fooled)}
    entries = []
    for place, model in enumerate(models):
        clean = column(records, f"{place} clean")
        entry = {**model.as_dict(), "clean": share(int(clean.sum()), len(clean), "correct", "accuracy")}
        for what, (wanted, rows) in targets.items():
            tops = {kind: column(records, f"{place} {kind}")[rows] for kind in _KINDS}
            entry[what] = {
                **{kind: agreement(predicted, wanted[rows]) for kind, predicted in tops.items()},
                "dealt": permuted_agreement(tops["perturbation"], wanted[rows], classes),
            }
        paper = request.norm == "linf"
        entry["paper_style"] = agreement(column(records, f"{place} paper"), label)["topk"] if paper else None
        entries.append(entry)
    return {
        "n": len(label),
        "fooled": share(int(fooled.sum()), int(study.verdicts.correct.sum()), "fooled", "success"),
        "k": top_of(classes),
        "chance": chance(classes),
        "paper_style": _PAPER,
        "models": entries,
    }
