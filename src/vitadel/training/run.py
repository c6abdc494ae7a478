"""From a recipe to a hardened model: open, train, and audit what came out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from timm.optim import create_optimizer_v2, list_optimizers
from torch import Tensor, nn

from vitadel.attacks.features import pixels_per_unit
from vitadel.attacks.settings import settings_of
from vitadel.backbones.classifier import Classifier, fastest_attention
from vitadel.backbones.model_checks import check_images_fit
from vitadel.data import open_dataset
from vitadel.data.preprocess import Preprocess
from vitadel.data.subset import balanced_subset
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.audit.audit import AuditRequest, check_request, check_targets, run_audit
from vitadel.evaluation.engine.run import Outcome, RunOptions, execute
from vitadel.evaluation.engine.run import Run as EngineRun
from vitadel.evaluation.engine.stages import PRECISIONS
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.run_folder import RunFolder
from vitadel.training.augmentation import augment, seed_everything
from vitadel.training.batch_statistics import whose_statistics
from vitadel.training.data_stream import DataStream
from vitadel.training.loop import Run, train
from vitadel.training.metrics import Metrics
from vitadel.training.progress_table import board
from vitadel.training.protocols import MindsLength, Prepares
from vitadel.training.recipes.build import ChecksModel, Recipe, build_recipe
from vitadel.training.recipes.documents import IDLE, compose, deciding, dotted
from vitadel.training.recipes.old_keys import translate_settings
from vitadel.training.recipes.sections import DataSection, OptimizerSection
from vitadel.training.recipes.write import recipe_text
from vitadel.training.starting_model import StartingModel, check_answer, starting_model
from vitadel.training.tracking import begin_tracking, end_tracking
from vitadel.training.trainables.tokens import Tokens
from vitadel.training.trainables.whole_model import WholeModel
from vitadel.training.validation import HeldOut
from vitadel.types import Source

__all__ = ["TrainingSetup", "harden", "make_optimizer", "open_training", "run_harden", "title_of"]

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class TrainingSetup:
    """A recipe with its model and data at hand; the test set is open, but nothing of it is read before the audit."""

    recipe: Recipe
    model: Classifier
    stream: DataStream
    held_out: HeldOut
    test: Source | None
    fresh_head: bool = False


def harden(
    recipe: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    row: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    data_root: str | Path | None = None,
) -> dict[str, Any]:
    """Train by a recipe from Python: `harden("shapes/trades", {"train.epochs": 3})`; returns what results.json holds.

    Weights, metrics and the audit are in the run folder, below runs/ unless `out` names one.
    """
    built = build_recipe(compose(recipe, row, overrides), title_of(recipe, row))
    name = title_of(recipe, row)
    return run_harden(built, name, join_processes(device), out=out, resume=resume, data_root=data_root).results


def title_of(recipe: str | Path, row: str | None) -> str:
    return f"{recipe}:{row}" if row else str(recipe)


def open_training(
    recipe: Recipe, processes: Processes, data_root: str | Path | None = None, model: Classifier | None = None
) -> TrainingSetup:
    """Open the data and build the model, with fresh weights drawn from the recipe's seed, unless it is given."""
    _refuse_fp16_on_a_processor(recipe, processes)
    section = recipe.data
    root = section.root if data_root is None else data_root
    source = open_dataset(section.train, root=root)
    others = {
        name: None if spec is None else _same_classes(open_dataset(spec, root=root), source, f"data.{name} ({spec})")
        for name, spec in (("validation", section.validation), ("extra", section.extra), ("test", section.test))
    }
    rows, held_out_rows = _held_out(source, section, recipe.train.seed)
    with _global_generators_kept():
        seed_everything(recipe.train.seed)
        given = None if model is None else StartingModel(model)
        start = given or starting_model(recipe.model, len(source.classes), section.train)
    _refuse_to_judge_a_fresh_head(recipe, start.fresh_head)
    model = start.classifier
    if "about" in recipe.about:
        notes = {**model.record.notes, "about": recipe.about["about"]}
        model = Classifier(model.backbone, replace(model.record, notes=notes))
    record = model.record
    size = record.input_size or _first_size(source, section.train)
    check_images_fit(model, size, recipe.model.name)
    if not record.can_be_rebuilt:
        model = model.to(processes.device)
        check_answer(model, size, recipe.model.name, len(source.classes), learns=isinstance(recipe.adapter, WholeModel))
    preprocess = Preprocess(size, record.crop_pct, record.interpolation, record.crop_mode, record.mean)
    validation_source = others["validation"] or source
    if validation_source is not source:
        held_out_rows = _usable(validation_source, len(source.classes))
    if recipe.validation.limit is not None:
        labels = validation_source.labels()[held_out_rows]
        held_out_rows = balanced_subset(labels, recipe.validation.limit, recipe.train.seed, held_out_rows)
    extra = others["extra"]
    stream = DataStream(
        source=source,
        rows=rows,
        preprocess=preprocess,
        augment=augment(recipe.augmentation, preprocess),
        batch_size=recipe.train.batch_size,
        seed=recipe.train.seed,
        repeats=recipe.augmentation.repeated_aug,
        extra=extra,
        extra_rows=None if extra is None else _usable(extra, len(source.classes)),
        extra_share=section.extra_share,
        easier=_easier(section, source, root),
        easier_epochs=section.easier_epochs,
        parts=recipe.train.grad_accum,
        rank=processes.rank,
        processes=processes.count,
        workers=section.workers,
    )
    _refuse_odd_pairs(recipe, processes)
    held_out = HeldOut(validation_source, held_out_rows, preprocess)
    setup = TrainingSetup(recipe, model, stream, held_out, others["test"], start.fresh_head)
    _check_targets(setup)
    for name, plugin in recipe.plugins:
        if isinstance(plugin, ChecksModel):
            with _complaining_as(f"plugins.{name}"):
                plugin.check_model(model)
    return setup


def _refuse_odd_pairs(recipe: Recipe, processes: Processes) -> None:
    each = recipe.train.batch_size // (recipe.train.grad_accum * processes.count)
    if each % 2 and (recipe.augmentation.mixup or recipe.augmentation.cutmix):
        raise UserError(
            f"mixup and cutmix mix images in pairs, but each of {processes.count} processes would get {each} images at "
            f"once; choose a multiple of {2 * recipe.train.grad_accum * processes.count} for train.batch_size"
        )


def _refuse_fp16_on_a_processor(recipe: Recipe, processes: Processes) -> None:
    if recipe.train.amp_dtype == "fp16" and processes.device.type == "cpu":
        raise UserError("train.amp_dtype fp16 needs a GPU; use bf16 or fp32 on a processor")


def _refuse_to_judge_a_fresh_head(recipe: Recipe, fresh: bool) -> None:
    """Tokens leave the head as it is: one that has learnt nothing would be audited as if it had."""
    if fresh and recipe.data.test is not None and isinstance(recipe.adapter, Tokens):
        raise UserError(
            f"the head of '{recipe.model.name}' for the classes of data.train is fresh, and training tokens does not "
            f"train it: an audit on data.test ({recipe.data.test}) would judge a random head. Set data.test=null and "
            "judge the features by `vitadel probe` with the trained tokens; or, if the model's own head knows these "
            "classes, name them in model.head_classes."
        )


def _same_classes(source: Source, training: Source, what: str) -> Source:
    """A label must mean the same everywhere; sets that only number their classes are taken at their word."""
    theirs, ours = list(source.classes), list(training.classes)
    numbered = [str(number) for number in range(max(len(theirs), len(ours)))]
    if len(theirs) != len(ours):
        raise UserError(f"{what} has {len(theirs)} classes and data.train {len(ours)}; they must be the same")
    named = numbered[: len(ours)] not in (theirs, ours)
    different = next(((n, a, b) for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)
    if named and different is not None:
        number, there, here = different
        raise UserError(
            f"{what}: its class {number} is '{there}', that of data.train is '{here}'; labels would be mixed up"
        )
    return source


def _easier(section: DataSection, source: Source, root: str | Path | None) -> Source | None:
    if section.easier is None:
        return None
    easier = open_dataset(section.easier, root=root)
    if not torch.equal(easier.labels(), source.labels()):
        raise UserError(f"data.easier ({section.easier}) must have the samples of data.train in the same order")
    return easier


def _usable(source: Source, classes: int) -> Tensor:
    labels = source.labels()
    return ((labels >= 0) & (labels < classes)).nonzero()[:, 0]


def _held_out(source: Source, section: DataSection, seed: int) -> tuple[Tensor, Tensor]:
    """The rows to train on, and those kept aside, which do not depend on `limit`."""
    rows = _usable(source, len(source.classes))
    labels = source.labels()
    aside = torch.empty(0, dtype=torch.int64)
    if section.validation is None:
        if section.held_out >= len(rows):
            raise UserError(
                f"data.held_out keeps {section.held_out} images aside, but data.train has only {len(rows)}; keep fewer"
            )
        aside = balanced_subset(labels[rows], section.held_out, seed + 1, rows)
        kept = torch.ones(len(labels), dtype=torch.bool)
        kept[aside] = False
        rows = rows[kept[rows]]
    return balanced_subset(labels[rows], section.limit, seed, rows), aside


def _first_size(source: Source, spec: str) -> tuple[int, int]:
    image = source.read([0])[0]
    if isinstance(image, Exception):
        raise UserError(f"the first image of {spec} cannot be read ({image}), and the model names no input size")
    return image.height, image.width


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    """The caller's random numbers go on as if nothing had been drawn here."""
    state, array_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(array_state)


def run_harden(
    recipe: Recipe,
    name: str,
    processes: Processes,
    *,
    data_root: str | Path | None = None,
    model: Classifier | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Train in a run folder, then audit. A `model` is used as it is."""
    setup = open_training(recipe, processes, data_root, model)
    # Before there is a folder: not every model takes every adapter, nor every machine every optimizer.
    adapted = _adapted(setup, processes)
    make_optimizer(recipe.optimizer, adapted)
    resume = options.get("resume", False)
    if not resume:
        _check_audit(setup, adapted, data_root, processes.device)
    settings = {**deciding(recipe.document), "--data-root": None if data_root is None else str(data_root)}

    def work(run: EngineRun) -> dict[str, Any]:
        run.write("recipe.yaml", recipe_text(recipe.document).encode())
        trained = _train(setup, adapted, processes, RunFolder(run.path), resume, run.show_progress)
        return _audit(trained, setup, name, run, data_root)

    return execute(
        "harden", name, settings, processes, work, not_compared=IDLE, translate=translate_settings, **options
    )


def _adapted(setup: TrainingSetup, processes: Processes) -> nn.Module:
    """What is to be trained, where it is to be trained."""
    for _, plugin in setup.recipe.plugins:
        if isinstance(plugin, Prepares):
            plugin.prepare(setup.model)
    return setup.recipe.adapter.attach(setup.model.to(processes.device)).to(processes.device)


def _train(
    setup: TrainingSetup, model: nn.Module, processes: Processes, folder: RunFolder, resume: bool, shown: bool
) -> Run:
    recipe, main = setup.recipe, processes.is_main
    attack = recipe.objective.attack
    accelerator = _accelerator(recipe, processes, folder.path)
    optimizer = make_optimizer(recipe.optimizer, model)
    epochs = recipe.train.epochs + recipe.schedule.cooldown_epochs
    steps = setup.stream.steps_per_epoch * epochs
    with _global_generators_kept(), board(steps, epochs, shown and main, pixels_per_unit(attack)) as seen:
        metrics = Metrics(folder.path / "metrics.jsonl" if main else None)
        run = Run(
            recipe,
            model,
            len(setup.stream.source.classes),
            setup.stream,
            setup.held_out,
            processes,
            folder.path,
            seen,
            metrics,
        )
        if told := attack and settings_of(attack).get("effective_eps"):
            run.tell(f"attack in training: eps {told}")
        if isinstance(recipe.adapter, Tokens) and recipe.adapter.seed is not None:
            run.tell(
                "adapter.seed stands in the recipe: who reads it can train the same tokens. Leave it out for tokens "
                "to deploy."
            )
        if note := recipe.schedule.length_warning(epochs):
            run.tell(f"schedule: {note}")
        for name, plugin in recipe.plugins:
            if isinstance(plugin, MindsLength) and (note := plugin.length_warning(epochs)):
                run.tell(f"plugins.{name}: {note}")
        if setup.fresh_head:
            run.tell(f"the head of {recipe.model.name} is a fresh one, for the {run.num_classes} classes of data.train")
        if note := whose_statistics(model, processes, recipe.train.attack_mode):
            run.tell(note)
        with fastest_attention(model, processes.device, PRECISIONS[recipe.train.amp_dtype]):
            train(run, accelerator, optimizer, resume)
        end_tracking(accelerator, recipe.train.tracker, folder.path)
    return run


def make_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """timm's factory, which knows what not to decay, for what is not frozen; the rate is set anew at every step."""
    if section.name not in (known := list_optimizers()):
        raise UserError(
            f"unknown optimizer '{section.name}'{nearest_names(section.name, known)}; timm has {len(known)}"
        )
    options: dict[str, Any] = {"eps": section.eps, "betas": section.betas}
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model.backbone if isinstance(model, Classifier) else model,  # whose names timm knows
            opt=section.name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            momentum=section.momentum,
            **{key: value for key, value in options.items() if value is not None},
        )
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"optimizer '{section.name}' cannot be made with these settings: {error}") from error
    return optimizer


def _accelerator(recipe: Recipe, processes: Processes, folder: Path) -> Accelerator:
    tracker = recipe.train.tracker
    AcceleratorState._reset_state()  # else a second training in this process could not have another precision
    accelerator = Accelerator(
        cpu=processes.device.type == "cpu",
        mixed_precision=_PRECISIONS[recipe.train.amp_dtype],
        device_placement=False,  # the model is where it belongs, which may be another GPU than the first
        log_with=None if tracker == "none" else tracker,
        project_dir=folder,
        # Statistics of BatchNorm belong to each process; sent around at every forward pass they would be changed
        # between the two passes of one loss, which autograd refuses.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    begin_tracking(accelerator, tracker, dotted(recipe.document), folder)
    return accelerator


def _request(recipe: Recipe) -> AuditRequest:
    """The audit at the end."""
    return AuditRequest(
        attacks=recipe.audit.attacks,
        eps=recipe.threat.eps,
        norm=recipe.threat.norm,
        limit=recipe.audit.limit,
        batch_size=recipe.audit.batch_size,
        seed=recipe.train.seed,
        skip_bad=None,
    )


def _check_targets(setup: TrainingSetup) -> None:
    """A class that an attack is to reach cannot be the label of what it attacks."""
    recipe, stream, held_out = setup.recipe, setup.stream, setup.held_out
    learnt = stream.source.labels()[stream.rows]
    if stream.extra is not None and stream.extra_rows is not None:
        learnt = torch.cat([learnt, stream.extra.labels()[stream.extra_rows]])
    attacks = {
        "objective.attack": (recipe.document["objective"].get("attack"), learnt),
        "validation.attack": (recipe.validation.attack, held_out.source.labels()[held_out.rows]),
    }
    for key, (name, labels) in attacks.items():
        if name is not None:
            with _complaining_as(key):
                check_targets(name, labels)


@contextmanager
def _complaining_as(key: str) -> Iterator[None]:
    try:
        yield
    except UserError as mistake:
        raise UserError(f"{key}: {mistake}") from mistake


def _check_audit(setup: TrainingSetup, model: nn.Module, data_root: str | Path | None, device: torch.device) -> None:
    """An attack that does not suit the model is told before it is trained, not after."""
    recipe = setup.recipe
    if setup.test is None or recipe.data.test is None:
        return
    root = recipe.data.root if data_root is None else data_root
    target = Target(cast(Classifier, model), "the model", setup.test, recipe.data.test, root)
    target, request = apply_class_subset(target), _request(recipe)
    check_request(target, request, target.selection(request.limit, request.seed, request.skip_bad)[0], device)


def _audit(
    trained: Run, setup: TrainingSetup, name: str, run: EngineRun, data_root: str | Path | None
) -> dict[str, Any]:
    """Audit the best epoch's weights on the test set by the recipe's attacks, in a folder inside the run's."""
    recipe = trained.recipe
    run.processes.wait()
    training = {
        "recipe": name,
        "epochs": trained.epochs,
        "steps": trained.step,
        "images_per_step": recipe.train.batch_size,
        "stopped": trained.stopped or None,
        "best_epoch": trained.best_epoch,
        "held_out": None if trained.best is None else asdict(trained.best),
        "attack": None if recipe.objective.attack is None else settings_of(recipe.objective.attack),
    }
    results: dict[str, Any] = {"complete": True, "seed": recipe.train.seed}
    if setup.test is not None and recipe.data.test is not None:
        root = recipe.data.root if data_root is None else data_root
        model = recipe.adapter.deployed(run.path / "weights" / "best.safetensors", trained.model)
        target = Target(cast(Classifier, model), str(run.path), setup.test, recipe.data.test, root)
        results = run_audit(target, _request(recipe), run.processes, **run.inside("audit")).results
        run.copy_from("audit", "samples.parquet", "examples.npz")
    return {**results, "training": training}
