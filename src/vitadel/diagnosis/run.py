"""Diagnose a model: open model and data, run the checks, and write the findings to a run folder."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import Batch, read_batches
from vitadel.data.selection import BadSample, balanced_subset
from vitadel.diagnosis.examination import Examination, Images, Level, level_named
from vitadel.diagnosis.runner import CHECKS, Diagnosis, cost_of, recommended_command, run_checks, summarize
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import BATCH, CalibrationImages, calibration_images
from vitadel.evaluation.engine.cost import PassTimes
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, run_settings
from vitadel.evaluation.engine.stages import check_any_readable
from vitadel.evaluation.engine.target import Target, apply_class_subset, open_target, subset_like
from vitadel.evaluation.engine.verdicts import Verdicts, describe_target, result_header
from vitadel.findings import SUSPICIOUS, Finding
from vitadel.quantities import can_diagnose, read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.run_folder import write_json
from vitadel.types import Source

__all__ = ["DiagnosisRequest", "diagnose", "examination_of", "run_diagnosis"]


FEWEST = 16
"""Images: a comparison of attacks needs ten that only one of them breaks."""
_UNEXAMINED = "Repair the model, or use a smaller batch_size: a model that cannot be examined cannot be trusted."
_SO_FAR = "findings.json"


@dataclass(frozen=True)
class DiagnosisRequest(RunRequest):
    """Settings of a diagnosis, beside model and data; without a `limit` the level sets the number of images."""

    level: str = "quick"
    eps: float = 8 / 255
    norm: str = "linf"
    surrogate: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        make_threat(self.norm, self.eps)  # report a wrong level, norm or budget before anything is loaded
        if not can_diagnose(self.norm, self.eps):
            raise UserError(
                f"diagnose needs an eps above 0 and, in linf, below 0.5, which can make every image gray; got "
                f"{self.eps:g}. Pixels are in [0, 1]: write 8/255 for 8 levels of 255"
            )
        if self.images < FEWEST:
            raise UserError(f"--limit must be at least {FEWEST}: fewer images prove nothing; got {self.images}")

    @property
    def images(self) -> int:
        return self.depth.images if self.limit is None else self.limit

    @property
    def depth(self) -> Level:
        return level_named(self.level)


def diagnose(
    model: str | nn.Module,
    data: str | Source | tuple[Tensor, Tensor] = "shapes",
    *,
    level: str = "quick",
    eps: float | str = 8 / 255,
    norm: str = "linf",
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    surrogate: str | nn.Module | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
) -> list[Finding]:
    """Check whether a robustness number of this model can be trusted: findings with evidence and advice, one per check.

    `data` is anything that `audit` takes, or a pair of tensors: pixels and labels. The level `quick` uses 48 images,
    `thorough` 256 and stronger attacks; `limit` overrides the number. `surrogate` is a model to transfer attacks from;
    without one, a small student of the model's outputs is trained if there are images besides the examined ones.
    Modules are returned to their device and modes.
    """
    named = surrogate if isinstance(surrogate, str) else None
    request = DiagnosisRequest(
        level, read_quantity(eps, "eps"), norm, named, limit=limit, batch_size=batch_size, seed=seed
    )
    processes = join_processes(device)
    secrets: dict[str, Any] = {"tokens": tokens, "allow_readable": allow_readable}
    with _restored(model), _restored(surrogate):
        if isinstance(data, tuple):
            opened = open_model(model, model_options, **secrets) if isinstance(model, str) else model
            e = _examination_of_tensors(opened, *data, request, processes, surrogate)
        else:
            target = open_target(model, data, data_root=data_root, model_options=model_options, **secrets)
            e = examination_of(target, request, processes, surrogate)[0]
        _check_enough(len(e.x))
        diagnosis = run_checks(e)
    titles = {check.identifier: check.title for check in CHECKS}
    failed = [
        Finding(name, SUSPICIOUS, {"ended in": fault}, _UNEXAMINED, titles[name])
        for name, fault in diagnosis.failed.items()
    ]
    return [*diagnosis.findings, *failed]


@contextmanager
def _restored(module: object) -> Iterator[None]:
    """Return a module of the caller to its device, and its parts to their modes."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    modes = [part.training for part in parts]
    home = next((weight.device for weight in parts[0].parameters()), None) if parts else None
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        if home is not None:
            parts[0].to(home)


def _check_enough(images: int) -> None:
    if images < FEWEST:
        raise UserError(f"diagnose needs at least {FEWEST} images: fewer prove nothing; got {images}")


def _examination_of_tensors(
    model: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    request: DiagnosisRequest,
    processes: Processes,
    surrogate: str | nn.Module | None,
) -> Examination:
    """Examine as many of the given images as requested; a student may be trained on the others."""
    if labels.ndim != 1 or labels.is_floating_point() or len(pixels) != len(labels):
        raise UserError(
            f"diagnose takes pixels (n, channels, height, width) and integer labels (n); got shapes "
            f"{tuple(pixels.shape)} and {tuple(labels.shape)}, labels of {labels.dtype}"
        )
    _check_enough(len(labels))
    if int(labels.min()) < 0:
        raise UserError(f"labels must be 0 or more, got {int(labels.min())}; leave out images without a label")
    known = labels.cpu().long()
    chosen = balanced_subset(known, request.images, request.seed)
    rest = torch.ones(len(known), dtype=torch.bool)
    rest[chosen] = False
    spare = rest.nonzero()[:, 0]

    def select(rows: Tensor) -> tuple[Tensor, Tensor]:
        return pixels[rows.to(pixels.device)].to(processes.device), known[rows].to(processes.device)

    def others(count: int) -> Images:
        rows = balanced_subset(known[spare], count, request.seed, spare)
        return [select(part) for part in rows.split(BATCH)] if len(rows) else []

    return _examine(model, *select(chosen), request, processes, others, surrogate)


def _examine(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    request: DiagnosisRequest,
    processes: Processes,
    other_images: Callable[[int], Images],
    surrogate: str | nn.Module | None,
) -> Examination:
    named = request.surrogate if surrogate is None else surrogate
    other = open_model(named) if isinstance(named, str) else named
    return Examination(
        model.to(processes.device),
        x,
        y,
        norm=request.norm,
        eps=request.eps,
        level=request.depth,
        seed=request.seed,
        batch_size=request.batch_size,
        other_images=other_images,
        surrogate=None if other is None else subset_like(model, other.to(processes.device).eval()),
    )


def examination_of(
    target: Target, request: DiagnosisRequest, processes: Processes, surrogate: str | nn.Module | None = None
) -> tuple[Examination, Batch, Sequence[BadSample]]:
    """Load the images onto the model's device; also returns their batch and the samples left out for their label."""
    target = apply_class_subset(target)
    indices, mislabeled = target.selection(request.images, request.seed, request.skip_bad)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess, skip_bad=request.skip_bad)
    check_any_readable(len(batch.y))
    batch = batch.to(processes.device)

    def others(count: int) -> Images:
        try:
            source, rows = calibration_images(target, indices, None, count, request.seed)
        except UserError:  # all images are examined
            return []
        return list(CalibrationImages(source, rows, target.preprocess, processes.device, skip_bad=True))

    model = cast(nn.Module, target.model.to(processes.device))
    return _examine(model, batch.x, batch.y, request, processes, others, surrogate), batch, mislabeled


def _expected_cost(e: Examination) -> dict[str, Any]:
    """Upper bound of the cost, from the passes of the attacks and the time of one batch on this machine."""
    cost = cost_of(e.level, [check for check in CHECKS if e.is_random or not check.if_random])
    times = PassTimes.measure(e.model, e.first(min(e.batch_size, len(e.x))))
    seconds = len(e.x) * times.seconds(cost["gradients"], cost["forwards"])
    return cost | {"images": len(e.x), "seconds_at_most": round(seconds, 1)}


def run_diagnosis(
    target: Target,
    request: DiagnosisRequest,
    processes: Processes,
    *,
    show_cost: Callable[[Mapping[str, Any]], None] = lambda cost: None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Diagnose a model in a run folder; `show_cost` receives the expected cost before the checks run."""
    if processes.count > 1:
        raise UserError("diagnose runs in one process; start it without torchrun")
    target = apply_class_subset(target)
    e, batch, mislabeled = examination_of(target, request, processes)
    _check_enough(len(e.x))
    settings = run_settings(target, request, batch.indices)

    def work(run: Run) -> dict[str, Any]:
        cost = _expected_cost(e)
        show_cost(cost)
        start = time.monotonic()
        so_far = run.path / _SO_FAR
        done = Diagnosis.from_dict(json.loads(so_far.read_text())) if so_far.is_file() else None
        diagnosis = run_checks(
            e, shown=run.show_progress, done=done, save=lambda each: write_json(so_far, each.as_dict())
        )
        cost["seconds"] = round(time.monotonic() - start, 1)
        bad = [dataclasses.asdict(sample) for sample in (*mislabeled, *batch.bad)]
        verdicts = Verdicts(batch.indices, batch.y.cpu(), e.logits.argmax(1).cpu(), bad)
        written = diagnosis.as_dict()
        opened = (target.model_spec, target.data_spec, request.norm, request.eps)
        return {
            **result_header(request.seed),
            **describe_target(target, verdicts, settings["model_fingerprint"]),
            "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
            "batch_size": request.batch_size,
            **verdicts.summary(),
            "findings": written["findings"],
            "diagnosis": {
                "level": request.level,
                "verdict": diagnosis.worst,
                "sentence": summarize(diagnosis, len(e.x)),
                "next": recommended_command(diagnosis, *opened, opening=run.opening),
                "not_examined": written["not_examined"],
                "cost": cost,
            },
        }

    outcome = execute("diagnose", target.model_spec, settings, processes, work, target=target, **options)
    assert outcome.folder is not None
    (outcome.folder.path / _SO_FAR).unlink(missing_ok=True)
    return outcome
