"""Pictures of a class, climbed out of noise: what a model's gradients add up to (Debenedetti 2022, section 4.3.2).

There, PGD-100 from uniform noise towards a random class, and a look at the pictures: those of robust models show the
class, those of standard ones nothing. Here the box is the only bound, and other models say what they see in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.data.batches import Batch
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.class_subset import apply_class_subset
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import RunContext, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import quartiles_of
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.agreement import agreement, chance, dealt_at_random, top_classes, top_of
from vitadel.studies.perturbations import kept_pictures
from vitadel.studies.reference_models import ReferenceModel, at_work, named_alike, seated
from vitadel.studies.run import Scene, StudyRequest, run_study

__all__ = ["OBJECTIVES", "STARTS", "AccumulationRequest", "Canvases", "climbed", "study_accumulation"]

STARTS = ("noise", "grey")
OBJECTIVES = ("logit", "probability")
_GRAIN = 1 / 255  # of the noise on grey: without any, all pictures of a class would be the same


@dataclass(frozen=True)
class AccumulationRequest(StudyRequest):
    """`steps` of the root mean square length `step`, in pixels of [0, 1], towards each class of `classes` (none: the
    first `most`), from so many `starts`. `objective` is what is climbed: the logit, or the log-probability as in a
    targeted attack. The norm and eps of other studies play no part: there is no budget.
    """

    classes: tuple[int, ...] = ()
    most: int = 10
    starts: int = 10
    start: str = "noise"
    objective: str = "logit"
    steps: int = 100
    step: float = 0.01
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, given, known in (("start", self.start, STARTS), ("objective", self.objective, OBJECTIVES)):
            if given not in known:
                raise UserError(
                    f"unknown {what} {given!r}{nearest_names(given, known) or '.'} Known: {', '.join(known)}."
                )
        if min(self.most, self.starts, self.steps) < 1 or not 0 < self.step <= 1:
            raise UserError(
                f"needs at least 1 class, 1 start and 1 step of a length in (0, 1], got {self.most}, {self.starts}, "
                f"{self.steps} and {self.step:g}"
            )
        if len(set(self.classes)) != len(self.classes) or min(self.classes, default=0) < 0:
            raise UserError(f"classes are different numbers from 0 on, got {', '.join(map(str, self.classes))}")


@dataclass(frozen=True, eq=False)
class Canvases:
    """Empty pictures as a data set, so that they are cut into batches, shared and found again as images are.

    A canvas's label is the class to climb to, its index the key of its noise.
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


def first_marks(x: Tensor, rng: SampleRNG, start: str) -> Tensor:
    """Uniform noise in all colours, or mid grey with a grain that cannot be seen."""
    noise = rng.stream("accumulation").uniform(*x.shape[1:]).to(x.dtype)
    return noise if start == "noise" else 0.5 + _GRAIN * (noise - 0.5)


def climbed(
    model: nn.Module, z: Tensor, y: Tensor, steps: int, step: float, objective: str = "logit"
) -> tuple[Tensor, Tensor]:
    """The picture after `steps` steps up the gradient, each of the same length, kept in the box; and the confidence in
    class `y` before each step and after the last, (images, steps + 1)."""
    course = []
    for turn in range(steps + 1):
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            logits = model(z)
            confidence = logits.log_softmax(1).gather(1, y[:, None])[:, 0]
            values = logits.gather(1, y[:, None])[:, 0] if objective == "logit" else confidence
            course.append(confidence.detach().exp())
            if turn == steps:
                break
            grad = gradient(values, z)
        length = grad.flatten(1).square().mean(1).sqrt().clamp(min=1e-30).view(-1, 1, 1, 1)
        z = (z.detach() + step * grad / length).clamp(0, 1)
    return z.detach(), torch.stack(course, 1)


def study_accumulation(
    target: Target,
    request: AccumulationRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Every model of the jury makes its pictures of the classes, and all of them are asked what they see."""
    jury = seated(target, request.others)
    targets = _targets(apply_class_subset(target), request)  # the classes that count

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        canvases = Canvases(scene.target.source.classes, targets, request.starts, scene.context.preprocess.shape)
        makers, arrays = [], {}
        with at_work(jury, processes.device):
            for number, maker in enumerate(jury):
                pieces = _stage(scene.context, canvases, request, maker, f"pictures {number:02d}", jury)
                makers.append(_told(maker, jury, canvases, pieces))
                arrays[f"pictures {number}"] = np.concatenate([piece["pictures"] for piece in pieces])
        classes = int(pieces[0]["classes"])
        return {
            "n": len(canvases),
            "classes": [{"number": each, "name": canvases.classes[each]} for each in targets],
            "starts": request.starts,
            "start": request.start,
            "objective": request.objective,
            "steps": request.steps,
            "step": request.step,
            "k": top_of(classes),
            "chance": chance(classes),
            "models": makers,
        }, arrays

    inputs = {"others_fingerprint": named_alike(jury), "classes": list(targets)}
    return run_study("accumulation", target, request, processes, work, inputs=inputs, **options)


def _targets(target: Target, request: AccumulationRequest) -> tuple[int, ...]:
    known = target.source.classes
    wrong = [each for each in request.classes if each >= len(known)]
    if wrong:
        raise UserError(
            f"there is no class {wrong[0]}: {target.data_spec} has {len(known)}, from 0 to {len(known) - 1}"
        )
    return request.classes or tuple(range(min(request.most, len(known))))


def _stage(
    context: RunContext,
    canvases: Canvases,
    request: AccumulationRequest,
    maker: ReferenceModel,
    stage: str,
    jury: Sequence[ReferenceModel],
) -> list[BatchRecord]:
    first = torch.arange(len(canvases.targets))  # one picture of each class

    def work(number: int, batch: Batch) -> BatchRecord:
        # Keyed by the canvas, not by the maker: all begin with the same noise.
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        start = first_marks(batch.x, rng, request.start)
        z, course = climbed(maker.target.model, start, batch.y, request.steps, request.step, request.objective)
        piece = {"course": course.float().cpu().numpy()}
        for place, juror in enumerate(jury):
            for what, pictures in (("pictures", z), ("start", start)):
                logits = juror.answers(pictures)
                piece["classes"] = np.asarray(logits.shape[1])
                piece[f"{place} {what}"] = top_classes(logits, top_of(logits.shape[1])).cpu().numpy()
        return piece | kept_pictures(batch, first, {"pictures": z})

    plain = replace(context, source=canvases)
    return run_stage(plain, stage, torch.arange(len(canvases)), work, lambda piece: "")


def _told(
    maker: ReferenceModel, jury: Sequence[ReferenceModel], canvases: Canvases, pieces: Sequence[BatchRecord]
) -> dict[str, Any]:
    def column(name: str) -> NDArray[Any]:
        return np.concatenate([piece[name] for piece in pieces])

    labels = canvases.labels().numpy()
    seen = []
    for place, juror in enumerate(jury):
        answers = column(f"{place} pictures")
        seen.append(
            {
                "name": juror.name,
                "itself": juror.name == maker.name,
                "pictures": agreement(answers, labels),
                "start": agreement(column(f"{place} start"), labels),
                "dealt": dealt_at_random(answers, labels, int(pieces[0]["classes"])),
            }
        )
    return {**maker.told(), "confidence": quartiles_of(column("course")), "seen_by": seen}
