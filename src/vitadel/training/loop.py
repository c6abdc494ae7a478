"""The one training loop, on accelerate: attack the bare model, then learn from what the attack made.

A step is a pure function of the state before it and of (seed, step): which images, how they are varied, where attacks
start, which paths are dropped. So a training that was killed and resumed ends with the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vitadel.attacks.features import pixels_per_unit
from vitadel.attacks.parse import make
from vitadel.attacks.settings import threats_in, training_form
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.attack_preparation import CalibrationImages
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.training.augmentation import mixing, seed_everything
from vitadel.training.batch_statistics import average_statistics, restore_statistics, statistics_of_all
from vitadel.training.checkpoints import check_same_recipe, clear_torn_files, read_state, write_state
from vitadel.training.data_stream import DataStream, Part, whole_key
from vitadel.training.inner_attack import craft
from vitadel.training.metrics import Metrics
from vitadel.training.progress_table import ProgressTable
from vitadel.training.protocols import (
    AfterEpoch,
    AfterStep,
    AroundStep,
    BeforeEpoch,
    ChangesAttack,
    ChangesBatch,
    ChangesEvaluation,
    Measures,
    Remembering,
)
from vitadel.training.recipes.build import Recipe
from vitadel.training.recipes.documents import deciding
from vitadel.training.schedules import rate_at, scaling_of
from vitadel.training.tracking import track
from vitadel.training.validation import HeldOut, Score
from vitadel.types import Attack, Source, Threat

__all__ = ["Run", "train"]

_NAMED = 1000  # images whose names a resumed run must find again
_ASKED = 16  # held-out images that a model must have an answer to before it is saved


@dataclass
class Run:
    """A training under way: what plug-ins see of it, and what a checkpoint holds."""

    recipe: Recipe
    model: nn.Module  # bare: never wrapped for several processes
    num_classes: int
    stream: DataStream
    held_out: HeldOut
    processes: Processes
    folder: Path
    board: ProgressTable
    metrics: Metrics
    epoch: int = 0
    step: int = 0
    best: Score | None = None
    best_epoch: int = -1
    stopped: str = ""
    back_to: int | None = None  # the epoch whose weights the model has again
    told: dict[str, float] = field(default_factory=dict)

    @cached_property
    def images(self) -> str:
        """Names the images that are learnt from and judged by, so that a run does not go on with others: by places,
        labels, and the names of some of them, as a million would take long. What is in the files is not looked at."""
        digest = hashlib.sha256()
        stream, held_out = self.stream, self.held_out
        known = ((stream.source, stream.rows), (held_out.source, held_out.rows), (stream.extra, stream.extra_rows))
        for source, rows in known:
            if source is not None and rows is not None:
                digest.update(torch.stack([rows, source.labels()[rows]]).numpy().tobytes())
                some = rows[:: max(1, len(rows) // _NAMED)].tolist()
                digest.update("\n".join(map(source.name, some)).encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def threat(self) -> Threat:
        return self.recipe.threat.threat()

    @property
    def seed(self) -> int:
        return self.recipe.train.seed

    @property
    def epochs(self) -> int:
        return self.recipe.train.epochs + self.recipe.schedule.cooldown_epochs

    @property
    def steps_per_epoch(self) -> int:
        return self.stream.steps_per_epoch

    @property
    def plugins(self) -> list[object]:
        return [plugin for _, plugin in self.recipe.plugins]

    def training_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        return self._some(self.stream.source, self.stream.rows, count)

    def held_out_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        return self._some(self.held_out.source, self.held_out.rows, count)

    def _some(self, source: Source, rows: Tensor, count: int) -> CalibrationImages:
        """Drawn without regard to their order, in which classes may follow each other."""
        order = SampleRNG.of_samples(self.seed, rows).stream("studied").bits().argsort(stable=True)
        return CalibrationImages(source, rows[order[:count]], self.stream.preprocess, self.processes.device)

    def log(self, values: Mapping[str, float]) -> None:
        self.told.update(values)

    def tell(self, message: str) -> None:
        self.board.note(message)

    def stop(self, reason: str, back_to: int | None = None) -> None:
        self.stopped = reason
        self.back_to = self.back_to if back_to is None else back_to


def train(run: Run, accelerator: Accelerator, optimizer: torch.optim.Optimizer, resume: bool) -> None:
    """From the last checkpoint, if there is one, to the end; leaves weights/best and weights/last in the folder."""
    with warnings.catch_warnings():
        # accelerate has no other name yet for what newer torch calls forward_sync_buffers.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        model, prepared = accelerator.prepare(run.model, optimizer)
    if resume and (state := _found_by_all(run)) is not None:
        _restore(run, prepared, accelerator, state)
    begun = run.step // run.steps_per_epoch * run.steps_per_epoch
    run.board.seen += run.metrics.go_on(run.step, begun)
    last = run.epochs * run.steps_per_epoch
    ended = bool(run.stopped) and run.step % run.steps_per_epoch == 0
    with _asked_to_stop() as asked:
        learner = _Learner(run, model, prepared, accelerator, asked)
        for parts in run.stream.steps(run.step, last) if not ended else ():
            run.epoch = run.step // run.steps_per_epoch
            if run.step % run.steps_per_epoch == 0:
                _open_epoch(run)
            learner.take(parts)
            over = run.step % run.steps_per_epoch == 0
            to_be_saved = over or learner.interrupted or run.step % run.recipe.train.checkpoint_every == 0
            if to_be_saved:
                _check_answers(run)
            if over:
                _close_epoch(run, accelerator)
            if to_be_saved:
                _save(run, prepared, accelerator)
            if over and run.stopped:
                break
            if learner.interrupted:
                raise Interrupted(run.folder)
        if run.processes.any(asked()):  # while the last epoch was judged
            raise Interrupted(run.folder)
    _write_weights(run, "last")


def _found_by_all(run: Run) -> dict[str, Any] | None:
    state = read_state(run.folder, secret=run.recipe.adapter.secret)
    step = -1 if state is None else int(state["step"])
    of_main = run.processes.from_main(step)
    if step != of_main:
        raise UserError(
            f"process {run.processes.rank} does not see the checkpoint of the main process in {run.folder}; "
            "with several machines, --out must lie on a disk that they share"
        )
    if run.processes.is_main:
        clear_torn_files(run.folder)
    if state is not None:
        check_same_recipe(run.folder, state, deciding(run.recipe.document))
        if state.get("images", run.images) != run.images:
            raise UserError(
                f"the images of data.train, data.validation or data.extra are not those that {run.folder} was begun "
                "with, so it cannot go on: some that were held out might be learnt from. Nothing was changed; put them "
                "back, or begin anew with another --out."
            )
    return state


@dataclass
class _Learner:
    """One optimizer step after another."""

    run: Run
    model: nn.Module  # what accelerate made of the bare model
    optimizer: Any
    accelerator: Accelerator
    asked: Callable[[], bool]  # whether this process was asked to stop
    interrupted: bool = False  # whether any process was

    def __post_init__(self) -> None:
        recipe = self.run.recipe
        self.mix = mixing(recipe.augmentation, self.run.num_classes)
        attack = recipe.objective.attack
        self.attack = None if attack is None else training_form(attack)
        self.scaling = scaling_of(recipe.optimizer, recipe.train.batch_size)

    def take(self, parts: Sequence[Part]) -> None:
        run, recipe = self.run, self.run.recipe
        begun = time.monotonic()
        seed_everything(whole_key(run.seed, "step", run.step, run.processes.rank))
        rate = self._set_rate()
        attack = self._attack_now()
        run.model.train()  # before the attacks: with attack_mode 'train' they meet it so, also right after a resume
        batch = [self._attacked(part.to(run.processes.device), attack) for part in parts]

        def losses() -> Iterator[Tensor]:
            scaler = self.accelerator.scaler
            for x, z, y in batch:
                with self.accelerator.autocast():
                    loss = recipe.objective(run.model, x, z, y)["loss"]
                yield loss if scaler is None else loss * scaler.get_scale()

        with ExitStack() as around:
            for plugin in run.plugins:
                if isinstance(plugin, AroundStep):
                    around.enter_context(plugin.around_step(run, losses))
            numbers = self._backward(batch)
            clip = math.inf if recipe.optimizer.clip_grad_norm is None else recipe.optimizer.clip_grad_norm
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            numbers["gradient_norm"] = norm if isinstance(norm, Tensor) else torch.tensor(float(norm))
            told = self._checked(numbers)
            self.optimizer.step()
            self.optimizer.zero_grad()
        run.step += 1
        for plugin in run.plugins:
            if isinstance(plugin, AfterStep):
                plugin.after_step(run)
        row = {"rate": rate, **_eps_in(attack), **told, **run.told}
        run.told.clear()
        run.metrics.add(run.step, row)
        track(self.accelerator, recipe.train.tracker, row, run.step, run.folder)
        run.board.stepped(run.step, row, time.monotonic() - begun)

    def _set_rate(self) -> float:
        run = self.run
        schedule, optimizer = run.recipe.schedule, run.recipe.optimizer
        progress = run.step / run.steps_per_epoch
        rate = rate_at(schedule, optimizer.lr, run.recipe.train.epochs, progress) * self.scaling
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _attack_now(self) -> Attack | None:
        attack = self.attack
        for plugin in self.run.plugins:
            if attack is not None and isinstance(plugin, ChangesAttack):
                attack = plugin.change_attack(self.run, attack)
        return attack

    def _attacked(self, part: Part, attack: Attack | None) -> tuple[Tensor, Tensor, Tensor]:
        run = self.run
        if self.mix is not None:
            x, y = self.mix(part.x, part.y)
            part = replace(part, x=x, y=y)
        for plugin in run.plugins:
            if isinstance(plugin, ChangesBatch):
                part = plugin.change_batch(run, part)
        x, y = part.x, part.y
        if attack is None:
            return x, x, y
        rng = SampleRNG.of_samples(run.seed, part.names, x.device).stream("attack", run.step)
        with _full_precision(run.model) if run.recipe.train.amp_dtype == "fp16" else nullcontext():
            shown = run.recipe.adapter.shown(run.model)
            return x, craft(attack, shown, x, y, rng, run.recipe.train.attack_mode), y

    def _backward(self, batch: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Gradients of the mean over all parts; processes exchange theirs once, at the last part."""
        sums: dict[str, Tensor] = {}
        for number, (x, z, y) in enumerate(batch):
            later = number + 1 < len(batch)
            with self.accelerator.no_sync(self.model) if later else nullcontext():
                with self.accelerator.autocast():
                    result = self.run.recipe.objective(self.model, x, z, y)
                self.accelerator.backward(result["loss"] / len(batch))
            for name, value in result.items():
                sums[name] = sums.get(name, torch.zeros((), device=x.device)) + value.detach().float() / len(batch)
        return sums

    def _checked(self, numbers: Mapping[str, Tensor]) -> dict[str, float]:
        """As plain numbers, means over all processes; a training whose loss is not a number ends here."""
        run = self.run
        known = [value.detach().float().cpu() for value in numbers.values()]
        *means, asked = run.processes.mean(torch.stack([*known, torch.tensor(float(self.asked()))])).tolist()
        self.interrupted = asked > 0  # by any process: all must end at the same step
        told = dict(zip(numbers, means, strict=True))
        scaled = run.recipe.train.amp_dtype == "fp16"  # whose scaler meets infinite gradients and leaves steps out
        wrong = [name for name, value in told.items() if not math.isfinite(value) and not (scaled and "norm" in name)]
        if wrong:
            raise _diverged(run, ", ".join(f"{name} = {told[name]}" for name in wrong), run.step + 1)
        return told


def _diverged(run: Run, what: str, step: int) -> UserError:
    kept = f"the checkpoint of step {run.metrics.saved} is kept" if run.metrics.saved else "nothing was saved yet"
    clip = "set" if run.recipe.optimizer.clip_grad_norm is None else "lower"
    half = "" if run.recipe.train.amp_dtype == "fp32" else ", or train in fp32"
    return UserError(
        f"{what} at step {step} (epoch {run.epoch + 1}), so the training was stopped; {kept} in {run.folder}. Lower "
        f"optimizer.lr, {clip} optimizer.clip_grad_norm{half}, in a new run."
    )


def _check_answers(run: Run) -> None:
    """A step may leave weights that are numbers and give none: they are neither judged nor saved."""
    with _full_precision(run.model), frozen(run.model), torch.no_grad():
        for x, _ in run.held_out_images(_ASKED):
            if not bool(run.model(x).isfinite().all()):
                raise _diverged(run, "the model answers with NaN or infinite logits", run.step)


def _eps_in(attack: Attack | None) -> dict[str, float]:
    """The budget of this step, for the log; nothing for an attack that has none."""
    if attack is None:
        return {"eps": 0.0}
    budgets = [threat.eps for threat in threats_in(attack)]
    if not budgets:
        return {}
    unit = pixels_per_unit(attack)
    return {"eps": max(budgets)} | ({} if unit == 1 else {"eps_in_pixels": max(budgets) * unit})


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """Without the half precision that accelerate put around the model's forward, for small gradients round to zero."""
    wrapped, original = model.__dict__.get("forward"), getattr(model, "_original_forward", None)
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


@contextmanager
def _deployed(run: Run) -> Iterator[None]:
    """The model as it would be used: in full precision, with averaged weights if there are any."""
    with ExitStack() as stack:
        stack.enter_context(_full_precision(run.model))
        for plugin in run.plugins:
            if isinstance(plugin, ChangesEvaluation):
                stack.enter_context(plugin.evaluated(run))
        yield


def _open_epoch(run: Run) -> None:
    with _full_precision(run.model):
        for plugin in run.plugins:
            if isinstance(plugin, BeforeEpoch):
                plugin.before_epoch(run)


def _close_epoch(run: Run, accelerator: Accelerator) -> None:
    """Let plug-ins look at the epoch, validate, keep the best weights."""
    epoch = run.epoch
    average_statistics(run.model, run.processes)
    with _full_precision(run.model):
        for plugin in run.plugins:
            if isinstance(plugin, AfterEpoch):
                plugin.after_epoch(run)
    if run.processes.any(bool(run.stopped)) and not run.stopped:  # a plug-in may have, in one process only
        run.stopped = "another process asked for it"
    validation = run.recipe.validation
    row: dict[str, float] = dict(run.told)
    if (epoch + 1) % validation.every == 0 or epoch + 1 == run.epochs or run.stopped:
        with _deployed(run):
            score = _score(run)
            # Among equals the later one: the schedule is nearer to its end.
            if run.best is None or score.decisive >= run.best.decisive:
                run.best, run.best_epoch = score, epoch if run.back_to is None else run.back_to
                _write_weights(run, "best", already_deployed=True)
        told = _told_as(score)
        if run.back_to is not None:
            row["back_to_epoch"] = run.back_to
            told = told if (run.back_to + 1) % validation.every else {}  # that epoch has its score already
        row |= told
    run.told.clear()
    run.metrics.add(run.step, {"epoch": epoch, **row})
    track(accelerator, run.recipe.train.tracker, row, run.step, run.folder)
    run.board.epoch_over(epoch, row, best=run.best_epoch == epoch)


def _told_as(score: Score) -> dict[str, float]:
    """Under names that say what it is."""
    prefix = "validation_" if score.measure == "accuracy" else f"validation_{score.measure}_"
    told = {f"{prefix}clean": score.clean}
    return told if score.robust is None else {**told, f"{prefix}robust": score.robust}


def _score(run: Run) -> Score:
    """By the objective's own measure and attack if it has one, else by accuracy under the recipe's attack."""
    recipe, name, threat = run.recipe, run.recipe.validation.attack, run.recipe.threat
    objective = recipe.objective
    if isinstance(objective, Measures) and objective.attack is not None:
        shown, attack = recipe.adapter.shown(run.model), training_form(objective.attack)
        measure = objective.measure, objective.measured_as
        return run.held_out.measured(run.model, shown, attack, *measure, run.processes, run.seed)
    judging = None if name is None else make(name, eps=threat.eps, norm=threat.norm)
    return run.held_out.score(run.model, judging, run.threat, run.processes, run.seed)


def _write_weights(run: Run, name: str, already_deployed: bool = False) -> None:
    with nullcontext() if already_deployed else _deployed(run):
        if run.processes.is_main:
            run.recipe.adapter.save(run.model, run.folder / "weights" / f"{name}.safetensors")


def _save(run: Run, optimizer: Any, accelerator: Accelerator) -> None:
    statistics = statistics_of_all(run.model, run.processes)
    run.metrics.save(run.step)
    if run.processes.is_main:
        plugins = {name: plugin.state() for name, plugin in run.recipe.plugins if isinstance(plugin, Remembering)}
        best = run.best
        state = {
            "step": run.step,
            "recipe": deciding(run.recipe.document),
            "images": run.images,
            "model": run.recipe.adapter.state(run.model),
            "optimiser": optimizer.state_dict(),
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else {},
            "plugins": plugins,
            "statistics": statistics,
            "best": None if best is None else [best.clean, best.robust, best.n, best.measure],
            "best_epoch": run.best_epoch,
            "stopped": run.stopped,
        }
        write_state(run.folder, state, secret=run.recipe.adapter.secret)
    run.processes.wait()


def _restore(run: Run, optimizer: Any, accelerator: Accelerator, state: Mapping[str, Any]) -> None:
    run.recipe.adapter.load_state(run.model, state["model"])
    restore_statistics(run.model, run.processes, state["statistics"])
    optimizer.load_state_dict(state["optimiser"])
    if accelerator.scaler is not None and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    for name, plugin in run.recipe.plugins:
        if isinstance(plugin, Remembering):
            plugin.load(state["plugins"][name])
    run.step = state["step"]
    run.best = None if state["best"] is None else Score(*state["best"])
    run.best_epoch, run.stopped = state["best_epoch"], state["stopped"]
    run.board.note(f"going on after step {run.step}")


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Ctrl-C lets the step finish and the state be saved; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
