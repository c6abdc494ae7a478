"""Run a recipe: open model and data, train, and audit the result."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from torch import nn

from vitadel.attacks.parse import check_targets, make
from vitadel.attacks.settings import pixels_per_unit, settings_of
from vitadel.backbones.classifier import Classifier, check_images_fit, fastest_attention
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess, balanced_subset, check_same_classes, split_rows, usable_rows
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import AuditRequest, check_request, run_audit
from vitadel.evaluation.audit.clean_accuracy import findings_about_training
from vitadel.evaluation.engine.run import Outcome, RunOptions, execute, result_header
from vitadel.evaluation.engine.run import Run as EngineRun
from vitadel.evaluation.engine.stages import PRECISIONS
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.quantities import are_numbers
from vitadel.runtime.distributed import Processes, gpu_module, is_gpu, join_processes
from vitadel.training.data_stream import DataStream, make_augment, make_device_augmentation, make_plain, seed_everything
from vitadel.training.interfaces import ChecksLength, ChecksModel, PreparesModel, WarnsAtStart
from vitadel.training.loop import make_optimizer, train
from vitadel.training.metrics import HeldOut, Metrics, end_tracking, open_progress_table, start_tracking
from vitadel.training.recipes.build import Recipe, build_recipe, check_micro_batches
from vitadel.training.recipes.compose import IDLE, compose, deciding, dotted
from vitadel.training.recipes.training_sections import DataSection
from vitadel.training.recipes.yaml_files import recipe_text, translate_settings
from vitadel.training.starting_model import StartingModel, check_answer, contradictions, starting_model
from vitadel.training.training_state import TrainingState, describe_statistics
from vitadel.types import Attack, Source

if TYPE_CHECKING:
    from vitadel.training.sharding import Sharded

_TRIED = 32  # images that are read before a training
_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class TrainingSetup:
    """A recipe with its model and data; the test set is open, but not read before the audit."""

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
    """Train by a recipe from Python: `harden("shapes/trades", {"train.epochs": 3})`; returns results.json.

    Weights, metrics and the audit are in the run folder, below runs/ unless `out` names one.
    """
    name = title_of(recipe, row)
    built = build_recipe(compose(recipe, row, overrides), name)
    return run_harden(built, name, join_processes(device), out=out, resume=resume, data_root=data_root).results


def title_of(recipe: str | Path, row: str | None) -> str:
    return f"{recipe}:{row}" if row else str(recipe)


def open_training(
    recipe: Recipe, processes: Processes, data_root: str | Path | None = None, model: Classifier | None = None
) -> TrainingSetup:
    """Open the data and build the model, with weights drawn from the recipe's seed, unless it is given."""
    recipe = _with_precision(recipe, processes)
    section = recipe.data
    root = section.root if data_root is None else data_root
    source = open_dataset(section.train, root=root)
    seed, classes = recipe.train.seed, len(source.classes)
    others: dict[str, Source | None] = {}
    for name in ("validation", "extra", "test"):
        spec = getattr(section, name)
        others[name] = None if spec is None else open_dataset(spec, root=root)
        if (other := others[name]) is not None:
            check_same_classes(other, source, f"data.{name} ({spec})")
    labels, rows = source.labels(), usable_rows(source, classes)
    validation_source = others["validation"] or source
    if others["validation"] is None:
        rows, held_out_rows = split_rows(labels, rows, section.held_out, section.limit, seed, limit_seed=seed)
    else:
        rows = balanced_subset(labels[rows], section.limit, seed, rows)
        held_out_rows = usable_rows(validation_source, classes)
    if recipe.validation.limit is not None:
        held_out_labels = validation_source.labels()[held_out_rows]
        held_out_rows = balanced_subset(held_out_labels, recipe.validation.limit, seed, held_out_rows)
    with _global_rng_preserved():
        seed_everything(seed)
        given = None if model is None else StartingModel(model)
        start = given or starting_model(recipe.model, classes, section.train)
    _refuse_audit_of_new_head(recipe, start.fresh_head)
    model, names = start.classifier, None if are_numbers(source.classes) else tuple(source.classes)
    if processes.is_main:
        _show_doubts(recipe.model.name, model.record.assumptions, [] if given else contradictions(recipe.model))
    about = {"about": recipe.document["about"]} if "about" in recipe.document else {}
    record = replace(
        model.record,
        notes={**model.record.lasting_notes, **about},
        classes=names,
        classes_from=None if names is None else f"data.train of its training ({section.train})",
    )
    model = Classifier(model.backbone, record)
    size = record.input_size or _first_size(source, section.train)
    check_images_fit(model, size, recipe.model.name)
    if not record.can_be_rebuilt:
        model = model.to(processes.device)
        check_answer(model, size, recipe.model.name, classes, getattr(recipe.adapter, "trains_model", False))
    preprocess = Preprocess(size, record.crop_pct, record.interpolation, record.crop_mode, record.mean)
    extra = others["extra"]
    stream = DataStream(
        source=source,
        rows=rows,
        preprocess=preprocess,
        augment=make_augment(recipe.augmentation, preprocess),
        batch_size=recipe.train.batch_size,
        seed=seed,
        repeats=recipe.augmentation.repeated_aug,
        plain=make_plain(recipe.augmentation, preprocess),
        extra=extra,
        extra_rows=None if extra is None else usable_rows(extra, classes),
        extra_share=section.extra_share,
        easier=_easier(section, source, root),
        easier_epochs=section.easier_epochs,
        parts=recipe.train.grad_accum,
        rank=processes.rank,
        processes=processes.count,
        workers=section.workers,
        skip_bad=section.skip_bad,
        buffer=section.shuffle_buffer,
        on_device=make_device_augmentation(recipe.augmentation, preprocess),
    )
    check_micro_batches(recipe.train, recipe.augmentation, processes.count)
    held_out = HeldOut(validation_source, held_out_rows, preprocess)
    held_out = held_out.without_bad() if section.skip_bad else held_out
    setup = TrainingSetup(recipe, model, stream, held_out, others["test"], start.fresh_head)
    _check_targets(setup)
    for name, plugin in recipe.plugins:
        if isinstance(plugin, ChecksModel):
            with _errors_prefixed(f"plugins.{name}"):
                plugin.check_model(model)
    return setup


def _with_precision(recipe: Recipe, processes: Processes) -> Recipe:
    """The recipe with a precision that the device has, also in its document: a resumed run must have the same."""
    kind, amp_dtype = (processes.model_device or processes.device).type, recipe.train.amp_dtype
    gpu = gpu_module(processes.device) if is_gpu(processes.device) else None
    has_bf16 = kind == "cpu" or (gpu is not None and gpu.is_bf16_supported(including_emulation=False))
    if amp_dtype == "fp16" and gpu is None:
        raise UserError(f"train.amp_dtype fp16 needs a GPU with it; use bf16 or fp32 on a CPU, got device {kind}")
    if amp_dtype == "bf16" and not has_bf16:
        raise UserError("train.amp_dtype bf16: this GPU has no bf16, which came with Ampere (A100); use fp16 or fp32")
    if amp_dtype != "auto":
        return recipe
    chosen: Literal["fp32", "bf16"] = "bf16" if has_bf16 and kind != "cpu" else "fp32"
    if processes.is_main and chosen == "bf16":
        sys.stderr.write("train.amp_dtype: bf16, which this GPU has; for full precision, set train.amp_dtype=fp32\n")
    document = {**recipe.document, "train": {**recipe.document["train"], "amp_dtype": chosen}}
    return replace(recipe, train=replace(recipe.train, amp_dtype=chosen), document=document)


def _show_doubts(name: str, assumptions: Mapping[str, str], warnings: Sequence[str]) -> None:
    """Write what was assumed about the file that training starts from, and what contradicts it."""
    for what, note in assumptions.items():
        sys.stderr.write(f"{name}, {what}: {note}\n")
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")


def _refuse_audit_of_new_head(recipe: Recipe, fresh: bool) -> None:
    """Refuse an adapter that does not train the head together with an audit of an untrained head."""
    if fresh and recipe.data.test is not None and getattr(recipe.adapter, "keeps_head", False):
        raise UserError(
            f"the head of '{recipe.model.name}' for the classes of data.train is untrained, and this adapter does not "
            f"train it: an audit on data.test ({recipe.data.test}) would test a random head. Set data.test=null and "
            "evaluate the features by `vitadel probe` with the trained tokens; or, if the model's own head has these "
            "classes, select them with model.head_classes."
        )


def _easier(section: DataSection, source: Source, root: str | Path | None) -> Source | None:
    if section.easier is None:
        return None
    easier = open_dataset(section.easier, root=root)
    if not torch.equal(easier.labels(), source.labels()):
        raise UserError(f"data.easier ({section.easier}) must have the samples of data.train in the same order")
    return easier


def _first_size(source: Source, spec: str) -> tuple[int, int]:
    image = source.read([0])[0]
    if isinstance(image, Exception):
        raise UserError(f"the first image of {spec} cannot be read ({image}), and the model names no input size")
    return image.height, image.width


@contextmanager
def _global_rng_preserved() -> Iterator[None]:
    """Restore the caller's global random generators afterwards."""
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
    recipe = setup.recipe
    # Before there is a folder: not every model takes every adapter, nor every machine every optimizer.
    adapted = _adapted(setup, processes)
    make_optimizer(recipe.optimizer, adapted)
    resume = options.get("resume", False)
    if not resume:
        _check_images(setup.stream)
        _check_space(adapted, options.get("out"))
        _check_audit(setup, adapted, data_root, processes.device)
    settings = {**deciding(recipe.document), "--data-root": None if data_root is None else str(data_root)}

    def work(run: EngineRun) -> dict[str, Any]:
        run.write("recipe.yaml", recipe_text(recipe.document).encode())
        return _audit(_train(setup, adapted, run, resume), setup, name, run, data_root)

    return execute(
        "harden", name, settings, processes, work, not_compared=IDLE, translate=translate_settings, **options
    )


def _check_images(stream: DataStream) -> None:
    """Read a few images over the whole data, so that a wrong folder or format is found before the training."""
    rows = stream.rows[torch.linspace(0, len(stream.rows) - 1, _TRIED).long().unique()].tolist()
    images = stream.source.read(rows)
    bad = [(row, image) for row, image in zip(rows, images, strict=True) if isinstance(image, Exception)]
    if len(bad) == len(rows) or (bad and not stream.skip_bad):
        row, why = bad[0]
        raise UserError(
            f"{len(bad)} of {len(rows)} training images that were tried cannot be read, the first {row} "
            f"({stream.source.name(row)}): {why}. Replace or remove them, or set data.skip_bad=true."
        ) from why


def _check_space(model: nn.Module, out: str | Path | None) -> None:
    """Refuse to start where the checkpoints do not fit: weights, two moments of the optimizer, and the best weights."""
    folder = Path(out or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    needed = 4 * sum(each.numel() * each.element_size() for each in model.parameters())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"checkpoints take about {needed / 2**20:.0f} MB, and {existing} has {free / 2**20:.0f} MB left. Free some "
            "space, or choose another --out."
        )


def _adapted(setup: TrainingSetup, processes: Processes) -> nn.Module:
    """The module to train, on its device."""
    for _, plugin in setup.recipe.plugins:
        if isinstance(plugin, PreparesModel):
            plugin.prepare(setup.model)
    home = processes.model_device or processes.device
    adapted = processes.place(setup.recipe.adapter.attach(setup.model.to(home)))
    train = setup.recipe.train
    if train.channels_last or train.checkpointing or train.compile:
        from vitadel.training.memory_switches import apply_switches

        apply_switches(setup.recipe, adapted)
    if train.fsdp:
        from vitadel.training.sharding import check_sharding

        check_sharding(setup.recipe, adapted, processes)
    return adapted


def _sharded(model: nn.Module, recipe: Recipe, processes: Processes) -> Sharded | None:
    if not recipe.train.fsdp:
        return None
    from vitadel.training.sharding import Sharded

    return Sharded.divide(model, processes)


def _compiled(setup: TrainingSetup, model: nn.Module, device: torch.device) -> str:
    """Compile the model if the recipe says so; a message for the user."""
    if not setup.recipe.train.compile:
        return ""
    from vitadel.training.memory_switches import compile_in_place

    return compile_in_place(model, torch.full((2, 3, *setup.stream.preprocess.shape), 0.5, device=device))


def _train(setup: TrainingSetup, model: nn.Module, run: EngineRun, resume: bool) -> TrainingState:
    recipe, processes, folder = setup.recipe, run.processes, run.path
    attack = recipe.objective.attack
    accelerator = _accelerator(recipe, processes, folder)
    sharded = _sharded(model, recipe, processes)  # before the optimizer, which has a share of the weights then
    optimizer = make_optimizer(recipe.optimizer, model)
    epochs, unit = recipe.epochs, pixels_per_unit(attack)
    steps = setup.stream.steps_per_epoch * epochs
    shown = run.show_progress and processes.is_main
    validation = _validation_share(setup, attack, epochs)
    with _global_rng_preserved(), open_progress_table(steps, epochs, shown, unit, validation) as table:
        classes = len(setup.stream.source.classes)
        metrics = Metrics(folder / "metrics.jsonl" if processes.is_main else None)
        state = TrainingState(recipe, model, classes, setup.stream, setup.held_out, processes, folder, table, metrics)
        state.sharded = sharded
        if eps := attack and settings_of(attack).get("effective_eps"):
            state.report(f"attack in training: eps {eps}")
        if isinstance(recipe.adapter, WarnsAtStart) and (note := recipe.adapter.start_warning()):
            state.report(note)
        if note := recipe.schedule.length_warning(epochs):
            state.report(f"schedule: {note}")
        for name, plugin in recipe.plugins:
            if isinstance(plugin, ChecksLength) and (note := plugin.length_warning(epochs)):
                state.report(f"plugins.{name}: {note}")
        if setup.fresh_head:
            state.report(f"the head of {recipe.model.name} is new, for the {state.num_classes} classes of data.train")
        if note := _compiled(setup, model, processes.device):
            state.report(f"train.compile: {note}")
        if note := describe_statistics(model, processes, recipe.train.attack_mode):
            state.report(note)
        with fastest_attention(model, processes.device, PRECISIONS[recipe.train.amp_dtype]), _matrix_products(recipe):
            train(state, accelerator, optimizer, resume)
        end_tracking(accelerator, recipe.train.tracker, folder)
    return state


@contextmanager
def _matrix_products(recipe: Recipe) -> Iterator[None]:
    """In TF32 where the recipe says so; afterwards as before."""
    before = torch.get_float32_matmul_precision()
    try:
        if recipe.train.tf32:
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _validation_share(setup: TrainingSetup, attack: Attack | None, epochs: int) -> float:
    """The likely time of all validations as a part of that of all steps, by their passes.

    A gradient counts as three forward passes, an update as another; half of the images are taken for robust.
    """
    recipe, name = setup.recipe, setup.recipe.validation.attack

    def forwards(attack: Attack | None) -> float:
        gradients, others = (0, 0) if attack is None else attack.passes()
        return 3 * gradients + others

    judged = None if name is None else make(name, eps=recipe.threat.eps, norm=recipe.threat.norm)
    one_validation = len(setup.held_out.rows) * (1 + 0.5 * forwards(judged))
    one_epoch = setup.stream.steps_per_epoch * recipe.train.batch_size * (4 + forwards(attack))
    return one_validation * -(-epochs // recipe.validation.every) / (one_epoch * epochs)


def _accelerator(recipe: Recipe, processes: Processes, folder: Path) -> Accelerator:
    tracker = recipe.train.tracker
    AcceleratorState._reset_state()  # or a second training in this process could not have another precision
    accelerator = Accelerator(
        cpu=processes.device.type == "cpu",
        mixed_precision=_PRECISIONS[recipe.train.amp_dtype],
        device_placement=False,  # the model is on its device already, which may not be the first GPU
        log_with=None if tracker == "none" else tracker,
        project_dir=folder,
        # Each process has its own BatchNorm statistics; broadcasting them at every forward pass would change them
        # between the two passes of one loss, which autograd refuses.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    start_tracking(accelerator, tracker, dotted(recipe.document), folder)
    return accelerator


def _request(recipe: Recipe) -> AuditRequest:
    """The audit at the end."""
    return AuditRequest(
        attacks=recipe.audit.attacks,
        eps=recipe.threat.eps,
        norm=recipe.threat.norm,
        limit=recipe.audit.limit,
        batch_size=recipe.audit.batch_size,
        independent=recipe.audit.independent,
        seed=recipe.train.seed,
        skip_bad=None,
    )


def _check_targets(setup: TrainingSetup) -> None:
    """Refuse targeted attacks whose target is a label of the attacked images."""
    recipe, stream, held_out = setup.recipe, setup.stream, setup.held_out
    trained = stream.source.labels()[stream.rows]
    if stream.extra is not None and stream.extra_rows is not None:
        trained = torch.cat([trained, stream.extra.labels()[stream.extra_rows]])
    attacks = {
        "objective.attack": (recipe.document["objective"].get("attack"), trained),
        "validation.attack": (recipe.validation.attack, held_out.source.labels()[held_out.rows]),
    }
    for key, (name, labels) in attacks.items():
        if name is not None:
            with _errors_prefixed(key):
                check_targets(name, labels)


@contextmanager
def _errors_prefixed(key: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _check_audit(setup: TrainingSetup, model: nn.Module, data_root: str | Path | None, device: torch.device) -> None:
    """Refuse attacks of the final audit that do not fit the model before it is trained."""
    recipe = setup.recipe
    if setup.test is None or recipe.data.test is None:
        return
    root = recipe.data.root if data_root is None else data_root
    target = Target(cast(Classifier, model), "the model", setup.test, recipe.data.test, root)
    target, request = apply_class_subset(target), _request(recipe)
    check_request(target, request, target.selection(request.limit, request.seed, request.skip_bad)[0], device)


def _audit(
    state: TrainingState, setup: TrainingSetup, name: str, run: EngineRun, data_root: str | Path | None
) -> dict[str, Any]:
    """Audit the best epoch's weights on the test set by the recipe's attacks, in a folder inside the run's."""
    recipe = state.recipe
    run.processes.wait()
    training: dict[str, Any] = {
        "recipe": name,
        "epochs": state.epochs,
        "steps": state.step,
        "images_per_step": recipe.train.batch_size,
        "stopped": state.stopped or None,
        "best_epoch": state.best_epoch,
        "held_out": None if state.best is None else asdict(state.best),
        "attack": None if recipe.objective.attack is None else settings_of(recipe.objective.attack),
    }
    if recipe.data.skip_bad:
        bad = [*setup.held_out.bad, *state.bad_images()]
        training |= {"left_out": len(bad), "left_out_names": bad[:20]}
    results = result_header(recipe.train.seed)
    if setup.test is not None and recipe.data.test is not None:
        root = recipe.data.root if data_root is None else data_root
        model = recipe.adapter.deployed(run.path / "weights" / "best.safetensors", state.plain_model())
        target = Target(cast(Classifier, model), str(run.path), setup.test, recipe.data.test, root)
        results = run_audit(target, _request(recipe), run.processes, **run.inside("audit")).results
        run.copy_from("audit", "samples.parquet", "examples.npz")
    found = list(results.get("findings") or [])
    if state.best is not None and state.best.measure == "accuracy":
        held_out, best = setup.held_out, state.best
        labels = held_out.source.labels()[held_out.rows]
        found = findings_about_training(labels, best.clean, best.robust, state.num_classes, results) + found
    return {**results, **({"findings": found} if found or "findings" in results else {}), "training": training}
