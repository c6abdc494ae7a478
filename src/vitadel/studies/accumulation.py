"""Images of a class, by gradient ascent from noise: what a model's gradients add up to (Debenedetti 2022, 4.3.2).

The thesis runs PGD-100 from uniform noise towards a random class and inspects the images: those of robust models show
the class, those of standard ones nothing. Here the pixel range is the only bound, and other models classify the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.data.batches import Batch
from vitadel.errors import UserError, check_known
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord, RunContext, run_stage
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.evaluation.stability.measures import quartiles_of
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.agreement import agreement, chance, permuted_agreement, top_classes, top_of
from vitadel.studies.perturbations import PRESETS
from vitadel.studies.reference_models import ReferenceModel, fingerprint_others, on_device, open_reference_models
from vitadel.studies.run import StudyContext, StudyRequest, column, pixels_in_8_bits, run_study

STARTS = ("noise", "grey")
OBJECTIVES = ("logit", "probability")
_BALL = 15.0  # of the thesis, in pixels of [0, 1]
_GRAIN = 1 / 255  # noise on gray: without it, all images of a class would be the same


@dataclass(frozen=True)
class AccumulationRequest(StudyRequest):
    """`steps` of the root mean square length `step`, in pixels of [0, 1], towards each class of `classes` (by default
    the first `most`), from `starts` starting points. `objective` is what the ascent maximizes: the logit, or the
    log-probability as in a targeted attack. Norm and eps are not used: there is no budget.

    The preset 'paper' is the attack of the thesis' code, from noise: `steps` sign steps of 1.5 * 15 / `steps` on the
    log-probability. Its ball of 15 bounds nothing in [0, 1].
    """

    classes: tuple[int, ...] = ()
    most: int = 10
    starts: int = 10
    start: str = "noise"
    objective: str = "logit"
    steps: int = 100
    step: float = 0.01
    preset: str = "ours"
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("start", self.start, STARTS)
        check_known("objective", self.objective, OBJECTIVES)
        check_known("preset", self.preset, PRESETS)
        if self.preset == "paper" and (self.start, self.objective, self.step) != ("noise", "logit", 0.01):
            raise UserError(
                "the preset 'paper' decides start, objective and step; leave them out, or leave out the preset"
            )
        if min(self.most, self.starts, self.steps) < 1 or not 0 < self.step <= 1:
            raise UserError(
                f"needs at least 1 class, 1 start and 1 step of a length in (0, 1], got {self.most}, {self.starts}, "
                f"{self.steps} and {self.step:g}"
            )
        if len(set(self.classes)) != len(self.classes) or min(self.classes, default=0) < 0:
            raise UserError(f"classes must be different numbers from 0, got {', '.join(map(str, self.classes))}")

    @property
    def ascent(self) -> Ascent:
        if self.preset == "paper":
            return Ascent("probability", min(1.5 * _BALL / self.steps, 1.0), signs=True)
        return Ascent(self.objective, self.step)


@dataclass(frozen=True)
class Ascent:
    """What the steps maximize, and how long they are: their root mean square, or that of every pixel with `signs`."""

    objective: str = "logit"
    step: float = 0.01
    signs: bool = False

    def move(self, z: Tensor, grad: Tensor) -> Tensor:
        if self.signs:
            return (z + self.step * grad.sign()).clamp(0, 1)
        length = grad.flatten(1).square().mean(1).sqrt().clamp(min=1e-30).view(-1, 1, 1, 1)
        return (z + self.step * grad / length).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Canvases:
    """Empty images as a dataset, so that they are batched, distributed and resumed like others.

    A canvas's label is the target class, its index the key of its noise.
    """

    classes: Sequence[str]
    targets: tuple[int, ...]
    starts: int
    size: tuple[int, int]

    @cached_property
    def _labels(self) -> Tensor:
        return torch.tensor(self.targets).repeat(self.starts)  # every class once, and then again

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> Tensor:
        return self._labels

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        return [Image.new("RGB", (self.size[1], self.size[0]), (128, 128, 128)) for _ in indices]

    def name(self, index: int) -> str:
        return f"start {index // len(self.targets)} of {self.classes[int(self._labels[index])]}"


def ascend(model: nn.Module, z: Tensor, y: Tensor, steps: int, ascent: Ascent) -> tuple[Tensor, Tensor]:
    """Take `steps` gradient steps, clipped to [0, 1]; also returns the confidence in class `y` before each step and
    after the last, (images, steps + 1)."""
    course = []
    for turn in range(steps + 1):
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            logits = model(z)
            confidence = logits.log_softmax(1).gather(1, y[:, None])[:, 0]
            values = logits.gather(1, y[:, None])[:, 0] if ascent.objective == "logit" else confidence
            course.append(confidence.detach().exp())
            if turn == steps:
                break
            grad = gradient(values, z)
        z = ascent.move(z.detach(), grad)
    return z.detach(), torch.stack(course, 1)


def study_accumulation(
    target: Target, request: AccumulationRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Let every model make its images of the classes, and all of them classify these."""
    models = open_reference_models(target, request.others)
    targets = _target_classes(apply_class_subset(target), request)

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        canvases = Canvases(study.target.source.classes, targets, request.starts, study.context.preprocess.shape)
        entries, arrays = [], {}
        with on_device(models, processes.device):
            for number, maker in enumerate(models):
                records = _make_images(study.context, canvases, request, maker, f"pictures {number:02d}", models)
                entries.append(_summarize(maker, models, canvases, records))
                arrays[f"pictures {number}"] = column(records, "pictures")
        classes = int(records[0]["classes"])
        return {
            "n": len(canvases),
            "classes": [{"number": each, "name": canvases.classes[each]} for each in targets],
            "starts": request.starts,
            "start": request.start,
            "objective": request.ascent.objective,
            "steps": request.steps,
            "step": request.ascent.step,
            "signs": request.ascent.signs,
            "k": top_of(classes),
            "chance": chance(classes),
            "models": entries,
        }, arrays

    inputs = {"others_fingerprint": fingerprint_others(models), "classes": list(targets)}
    return run_study("accumulation", target, request, processes, work, inputs=inputs, **options)


def _target_classes(target: Target, request: AccumulationRequest) -> tuple[int, ...]:
    known = target.source.classes
    wrong = [each for each in request.classes if each >= len(known)]
    if wrong:
        raise UserError(
            f"there is no class {wrong[0]}: {target.data_spec} has {len(known)}, from 0 to {len(known) - 1}"
        )
    return request.classes or tuple(range(min(request.most, len(known))))


def _make_images(
    context: RunContext,
    canvases: Canvases,
    request: AccumulationRequest,
    maker: ReferenceModel,
    stage: str,
    models: Sequence[ReferenceModel],
) -> list[BatchRecord]:
    first = torch.arange(len(canvases.targets))  # one image of each class

    def work(number: int, batch: Batch) -> BatchRecord:
        # Keyed by the canvas, not by the maker: all begin with the same noise.
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        noise = rng.stream("accumulation").uniform(*batch.x.shape[1:]).to(batch.x.dtype)
        start = noise if request.start == "noise" else 0.5 + _GRAIN * (noise - 0.5)
        z, course = ascend(maker.target.model, start, batch.y, request.steps, request.ascent)
        record = {"course": course.float().cpu().numpy()}
        for place, model in enumerate(models):
            for what, images in (("pictures", z), ("start", start)):
                logits = model.logits(images)
                record["classes"] = np.asarray(logits.shape[1])
                record[f"{place} {what}"] = top_classes(logits, top_of(logits.shape[1])).cpu().numpy()
        return record | pixels_in_8_bits(batch, first, {"pictures": z})

    return run_stage(replace(context, source=canvases), stage, torch.arange(len(canvases)), work)


def _summarize(
    maker: ReferenceModel, models: Sequence[ReferenceModel], canvases: Canvases, records: Sequence[BatchRecord]
) -> dict[str, Any]:
    labels, classes = canvases.labels().numpy(), int(records[0]["classes"])
    seen_by = [
        {
            "name": model.name,
            "itself": model.name == maker.name,
            "pictures": agreement(column(records, f"{place} pictures"), labels),
            "start": agreement(column(records, f"{place} start"), labels),
            "dealt": permuted_agreement(column(records, f"{place} pictures"), labels, classes),
        }
        for place, model in enumerate(models)
    ]
    return {**maker.as_dict(), "confidence": quartiles_of(column(records, "course")), "seen_by": seen_by}
