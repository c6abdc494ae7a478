"""Do perturbations mean something? Other models are shown them alone (Debenedetti 2022, section 4.3.1, table 9).

There, standard models put the right label among their first five answers for 40 to 50 % of a robust model's rescaled
perturbations. Here the same is told beside what chance would give: perturbations dealt out to other images, and their
own values at other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of, training_form
from vitadel.data.batches import Batch
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.calibration import calibrate
from vitadel.evaluation.engine.judge import Verdict, judge
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import RunContext, refuse_lost_images, rules_of, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import share
from vitadel.studies.agreement import agreement, chance, dealt_at_random, top_classes, top_of
from vitadel.studies.reference_models import ReferenceModel, at_work, named_alike, seated
from vitadel.studies.run import Scene, StudyRequest, run_study
from vitadel.types import Attack, Threat

__all__ = ["SHOWN", "PerturbationsRequest", "attacked", "kept_pictures", "rescaled", "scattered", "study_perturbations"]

SHOWN = 8
"""Images that are kept for figures."""

_PAPER = "thesis, table 9: scaled by eps, top answers for the label, all images"
_KINDS = ("perturbation", "scattered")


@dataclass(frozen=True)
class PerturbationsRequest(StudyRequest):
    """`attack` goes all the way: the first image that fools is not the end of its climb. `others` are MODEL specs."""

    attack: str = "pgd-100"
    others: tuple[str, ...] = ()
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make()  # a wrong name is told before anything is loaded

    def make(self) -> Attack:
        return training_form(make(self.attack, eps=self.eps, norm=self.norm))


def rescaled(change: Tensor, size: Tensor | float) -> Tensor:
    """Changes in [-size, size] as pixels in [0, 1]: (change + size) / (2 size). No change at all is mid grey."""
    half = torch.as_tensor(size, dtype=change.dtype, device=change.device).clamp(min=1e-30)
    return (0.5 + change / (2 * half)).clamp(0, 1)


def largest(change: Tensor) -> Tensor:
    """Of each image, (images, 1, 1, 1)."""
    return change.abs().flatten(1).amax(1).view(-1, 1, 1, 1)


def scattered(change: Tensor, rng: SampleRNG) -> Tensor:
    """The same pixels at other places: noise of the same strength and colours, in which nothing is drawn."""
    flat = change.flatten(2)
    order = rng.permutation(flat.shape[2])[:, None].expand_as(flat)
    return flat.gather(2, order).view_as(change)


def attacked(
    context: RunContext, attack: Attack, threat: Threat, batch: Batch, rng: SampleRNG
) -> tuple[Tensor, Verdict]:
    """What the attack makes of a batch, judged on the deployed model."""
    own_rules = rules_of(attack)
    z = attack(context.model, batch.x, batch.y, rng)
    return z, judge(context.model, own_rules(context.model, batch.x) if own_rules else threat, batch.x, z, batch.y)


def kept_pictures(batch: Batch, first: Tensor, pictures: Mapping[str, Tensor]) -> BatchRecord:
    """Of the images that figures show, by their indices, the pictures in 8 bits; nothing of the others."""
    rows = torch.isin(batch.indices, first)
    return {name: _in_8_bits(each[rows.to(each.device)]) for name, each in pictures.items()}


def _in_8_bits(pictures: Tensor) -> np.ndarray:
    return (255 * pictures).round().to(torch.uint8).cpu().numpy()


def study_perturbations(
    target: Target,
    order: PerturbationsRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Attack every image, and ask the jury what it sees in the change alone."""
    jury = seated(target, order.others)

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        attack = calibrate(order.make(), scene.context, scene.target, scene.verdicts.index, order.calibration)
        with at_work(jury, processes.device):
            pieces = _stage(scene, attack, order, jury)
        told = _told(scene, order, jury, pieces) | {"attack": {"name": order.attack, "settings": settings_of(attack)}}
        arrays = {name: np.concatenate([piece[name] for piece in pieces]) for name in ("x", "z", "change")}
        place = np.searchsorted(scene.verdicts.index.numpy(), _first(scene).numpy())
        reached = np.concatenate([piece["reached"] for piece in pieces])
        return told, {**arrays, "label": scene.verdicts.label.numpy()[place], "reached": reached[place]}

    inputs = {"others_fingerprint": named_alike(jury)}
    return run_study("perturbations", target, order, processes, work, inputs=inputs, **options)


def _first(scene: Scene) -> Tensor:
    return scene.verdicts.index[:SHOWN]


def _stage(
    scene: Scene, attack: Attack, order: PerturbationsRequest, jury: Sequence[ReferenceModel]
) -> list[BatchRecord]:
    context, held = scene.context, 0

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        z, verdict = attacked(context, attack, scene.threat, batch, rng)
        change = z - batch.x
        pictures = {
            "perturbation": rescaled(change, largest(change)),
            "scattered": rescaled(scattered(change, rng.stream("scattered")), largest(change)),
        }
        if order.norm == "linf":
            pictures["paper"] = rescaled(change, order.eps)
        piece: BatchRecord = {"held": verdict.held.cpu().numpy(), "reached": verdict.prediction.cpu().numpy()}
        for place, juror in enumerate(jury):
            clean = juror.answers(batch.x)
            piece["classes"] = np.asarray(clean.shape[1])
            piece[f"{place} clean"] = (clean.argmax(1) == batch.y).cpu().numpy()
            for kind, shown in pictures.items():
                piece[f"{place} {kind}"] = top_classes(juror.answers(shown), top_of(clean.shape[1])).cpu().numpy()
        drawn = {"x": batch.x, "z": z, "change": pictures["perturbation"]}
        return piece | kept_pictures(batch, _first(scene), drawn)

    def tell(piece: BatchRecord) -> str:
        nonlocal held
        held += int(piece["held"].sum())
        return f"{held} held"

    return run_stage(context, "perturbations", scene.verdicts.index, work, tell)


def _told(
    scene: Scene, order: PerturbationsRequest, jury: Sequence[ReferenceModel], pieces: Sequence[BatchRecord]
) -> dict[str, Any]:
    def column(name: str) -> np.ndarray:
        return np.concatenate([piece[name] for piece in pieces])

    label, reached, classes = scene.verdicts.label.numpy(), column("reached"), int(pieces[0]["classes"])
    fooled = scene.verdicts.correct.numpy() & ~column("held")
    targets = {"label": (label, np.ones_like(fooled)), "reached": (reached, fooled)}
    models = []
    for place, juror in enumerate(jury):
        clean = column(f"{place} clean")
        entry = {**juror.told(), "clean": share(int(clean.sum()), len(clean), "correct", "accuracy")}
        for what, (labels_aimed, rows) in targets.items():
            tops = {kind: column(f"{place} {kind}")[rows] for kind in _KINDS}
            entry[what] = {
                **{kind: agreement(answers, labels_aimed[rows]) for kind, answers in tops.items()},
                "dealt": dealt_at_random(tops["perturbation"], labels_aimed[rows], classes),
            }
        paper = order.norm == "linf"
        entry["paper_style"] = agreement(column(f"{place} paper"), label)["topk"] if paper else None
        models.append(entry)
    return {
        "n": len(label),
        "fooled": share(int(fooled.sum()), int(scene.verdicts.correct.sum()), "fooled", "success"),
        "k": top_of(classes),
        "chance": chance(classes),
        "paper_style": _PAPER,
        "models": models,
    }
