"""The training loop, on accelerate: attack the bare model, then train on the attacked images.

A step is a pure function of the state before it and of (seed, step): which images, how they are augmented, where
attacks start, which paths are dropped. So a training that was killed and resumed ends with the same weights, bit for
bit.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, Self

import torch
from accelerate import Accelerator
from timm.optim import create_optimizer_v2, get_optimizer_class
from torch import Tensor, nn

from vitadel.attacks.losses import hard_labels
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.attacks.settings import pixels_per_unit, threats_in, training_form
from vitadel.attacks.wrappers import Averaged, Restarts
from vitadel.backbones.classifier import Classifier
from vitadel.errors import Interrupted, UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import is_gpu
from vitadel.runtime.rng import SampleRNG
from vitadel.training.data_stream import MicroBatch, StepsAhead, derive_seed, make_mixup, seed_everything
from vitadel.training.interfaces import (
    AfterEpoch,
    AfterStep,
    AroundStep,
    BeforeEpoch,
    ChangesAttack,
    ChangesBatch,
    ChangesEvaluation,
    HasOwnMetric,
)
from vitadel.training.metrics import Score, count_image_passes, track
from vitadel.training.recipes.training_sections import OptimizerSection
from vitadel.training.training_state import TrainingState, average_statistics, find_checkpoint, restore, save_checkpoint
from vitadel.types import Attack, Ensemble

_CHECKED = 16  # held-out images with finite logits that a model needs before it is saved


def train(state: TrainingState, accelerator: Accelerator, optimizer: torch.optim.Optimizer, resume: bool) -> None:
    """Train to the end, from the last checkpoint if there is one; writes weights/best and weights/last."""
    with warnings.catch_warnings():
        # accelerate has no other name yet for what newer torch calls forward_sync_buffers.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        if state.sharded is None:
            model, prepared = accelerator.prepare(state.model, optimizer)
        else:  # which needs no further wrapper
            model = accelerator.prepare_model(state.model, evaluation_mode=True)
            prepared = accelerator.prepare_optimizer(optimizer)
    if resume and (checkpoint := find_checkpoint(state)) is not None:
        restore(state, prepared, accelerator, checkpoint)
    epoch_start = state.step // state.steps_per_epoch * state.steps_per_epoch
    state.table.seen += state.metrics.resume(state.step, epoch_start)
    last = state.epochs * state.steps_per_epoch
    ended = bool(state.stopped) and state.step == epoch_start
    with _interrupt_flag() as interrupted:
        steps = StepsAhead(iter(()) if ended else state.stream.steps(state.step, last), state.processes.device)
        trainer = _Trainer(state, model, prepared, accelerator, interrupted, steps.fetch)
        for batch in steps:
            state.epoch = state.step // state.steps_per_epoch
            if state.step % state.steps_per_epoch == 0:
                _start_epoch(state)
            state.record_bad(batch)
            with count_image_passes(state.model) as passes:
                trainer.take_step(batch)
            state.passes = None if state.passes is None or passes is None else state.passes + passes.count
            epoch_ends = state.step % state.steps_per_epoch == 0
            saves = epoch_ends or trainer.interrupted or state.step % state.recipe.train.checkpoint_every == 0
            if saves:
                _check_logits(state)
            if epoch_ends:
                _end_epoch(state, accelerator)
            if saves:
                save_checkpoint(state, prepared, accelerator)
            if epoch_ends and state.stopped:
                break
            if trainer.interrupted:
                raise Interrupted(state.folder)
        if state.processes.any(interrupted()):  # during the validation of the last epoch
            raise Interrupted(state.folder)
    _write_weights(state, "last")


@dataclass
class _Trainer:
    """Takes optimizer steps."""

    state: TrainingState
    model: nn.Module  # the bare model wrapped by accelerate
    optimizer: Any
    accelerator: Accelerator
    asked: Callable[[], bool]  # whether this process was asked to stop
    fetch: Callable[[], None]  # the images of the next step, while the device computes
    interrupted: bool = False  # whether any process was

    def __post_init__(self) -> None:
        recipe = self.state.recipe
        self.mix = make_mixup(recipe.augmentation, self.state.num_classes)
        attack = recipe.objective.attack
        self.attack = None if attack is None else training_form(attack)
        self.lr_factor = recipe.optimizer.lr_factor(recipe.train.batch_size)

    def take_step(self, parts: Sequence[MicroBatch]) -> None:
        state, recipe = self.state, self.state.recipe
        start = time.monotonic()
        seed_everything(derive_seed(state.seed, "step", state.step, state.processes.rank))
        lr = self._set_lr()
        attack = self._attack_of_step()
        state.model.train()  # before the attacks, which see it so with attack_mode 'train', also right after a resume
        with nullcontext() if state.sharded is None else state.sharded.whole():
            batch = [self._attacked(part.to(state.processes.device), attack) for part in parts]

        def losses() -> Iterator[Tensor]:
            scaler = self.accelerator.scaler
            for x, z, y in batch:
                with self.accelerator.autocast():
                    loss = recipe.objective(state.model, x, z, y)["loss"]
                yield loss if scaler is None else loss * scaler.get_scale()

        with ExitStack() as around:
            for plugin in state.plugins:
                if isinstance(plugin, AroundStep):
                    around.enter_context(plugin.around_step(state, losses))
            numbers = self._backward(batch)
            self.fetch()
            clip = math.inf if recipe.optimizer.clip_grad_norm is None else recipe.optimizer.clip_grad_norm
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            if hasattr(norm, "full_tensor"):  # of divided gradients
                norm = norm.full_tensor()
            numbers["gradient_norm"] = norm if isinstance(norm, Tensor) else torch.tensor(float(norm))
            values = self._checked(numbers)
            self.optimizer.step()
            self.optimizer.zero_grad()
        state.step += 1
        for plugin in state.plugins:
            if isinstance(plugin, AfterStep):
                plugin.after_step(state)
        row = {"rate": lr, **_eps_of(attack), **values, **state.logged}
        state.logged.clear()
        state.metrics.add(state.step, row)
        track(self.accelerator, recipe.train.tracker, row, state.step, state.folder)
        state.table.add_step(state.step, row, time.monotonic() - start)

    def _set_lr(self) -> float:
        state, recipe = self.state, self.state.recipe
        progress = state.step / state.steps_per_epoch
        lr = recipe.schedule.lr_at(recipe.optimizer.lr, recipe.train.epochs, progress) * self.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)  # timm's, for layer_decay
        return lr

    def _attack_of_step(self) -> Attack | None:
        attack = self.attack
        for plugin in self.state.plugins:
            if attack is not None and isinstance(plugin, ChangesAttack):
                attack = plugin.change_attack(self.state, attack)
        return attack

    def _attacked(self, part: MicroBatch, attack: Attack | None) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state
        if self.mix is not None and not part.plain:
            x, y = self.mix(part.x, part.y)
            part = replace(part, x=x, y=y)
        for plugin in state.plugins:
            if isinstance(plugin, ChangesBatch):
                part = plugin.change_batch(state, part)
        x, y = part.x, part.y
        if state.recipe.train.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        if attack is None:
            return x, x, y
        rng = SampleRNG.of_samples(state.seed, part.names, x.device).stream("attack", state.step)
        with _full_precision(state.model) if state.recipe.train.amp_dtype == "fp16" else nullcontext():
            shown = state.recipe.adapter.shown(state.model)
            return x, run_inner_attack(attack, shown, x, y, rng, state.recipe.train.attack_mode), y

    def _backward(self, batch: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Gradients of the mean over all micro-batches; processes exchange theirs once, at the last one."""
        sums: dict[str, Tensor] = {}
        for number, (x, z, y) in enumerate(batch):
            later = number + 1 < len(batch)
            with self.accelerator.no_sync(self.model) if later else nullcontext():
                with self.accelerator.autocast():
                    result = self.state.recipe.objective(self.model, x, z, y)
                self.accelerator.backward(result["loss"] / len(batch))
            for name, value in result.items():
                sums[name] = sums.get(name, torch.zeros((), device=x.device)) + value.detach().float() / len(batch)
        return sums

    def _checked(self, numbers: Mapping[str, Tensor]) -> dict[str, float]:
        """Means over all processes as plain numbers; raises `UserError` if the training diverged."""
        state = self.state
        known = [value.detach().float().cpu() for value in numbers.values()]
        *means, asked = state.processes.mean(torch.stack([*known, torch.tensor(float(self.asked()))])).tolist()
        self.interrupted = asked > 0  # in any process: all must end at the same step
        values = dict(zip(numbers, means, strict=True))
        scaled = state.recipe.train.amp_dtype == "fp16"  # whose scaler skips steps with infinite gradients
        wrong = [name for name, value in values.items() if not math.isfinite(value) and not (scaled and "norm" in name)]
        if wrong:
            raise _diverged(state, ", ".join(f"{name} = {values[name]}" for name in wrong), state.step + 1)
        return values


def _diverged(state: TrainingState, what: str, step: int) -> UserError:
    kept = f"the checkpoint of step {state.metrics.saved} is kept" if state.metrics.saved else "nothing was saved yet"
    clip = "set" if state.recipe.optimizer.clip_grad_norm is None else "lower"
    half = "" if state.recipe.train.amp_dtype == "fp32" else ", or train in fp32"
    return UserError(
        f"training diverged at step {step} (epoch {state.epoch + 1}): {what}; {kept} in {state.folder}. Lower "
        f"optimizer.lr, {clip} optimizer.clip_grad_norm{half}, in a new run."
    )


def _check_logits(state: TrainingState) -> None:
    """Raise `UserError` if finite weights give non-finite logits: they are neither validated nor saved."""
    with _as_given(state), frozen(state.model), torch.no_grad():
        for x, _ in state.held_out_images(_CHECKED):
            if not bool(state.model(x).isfinite().all()):
                raise _diverged(state, "the model gives NaN or infinite logits", state.step)


def _eps_of(attack: Attack | None) -> dict[str, float]:
    """The eps of this step, for the log; empty for an attack without eps."""
    if attack is None:
        return {"eps": 0.0}
    budgets = [threat.eps for threat in threats_in(attack)]
    if not budgets:
        return {}
    unit = pixels_per_unit(attack)
    return {"eps": max(budgets)} | ({} if unit == 1 else {"eps_in_pixels": max(budgets) * unit})


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """Undo the half precision that accelerate put around the model's forward; small gradients would underflow in it."""
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
def _as_given(state: TrainingState) -> Iterator[None]:
    """The model outside of steps: in full precision, not compiled, with all its weights in every process."""
    with ExitStack() as stack:
        stack.enter_context(_full_precision(state.model))
        if state.model._compiled_call_impl is not None:
            from vitadel.training.memory_switches import uncompiled

            stack.enter_context(uncompiled(state.model))
        if state.sharded is not None:
            stack.enter_context(state.sharded.whole())
        yield


@contextmanager
def _deployed(state: TrainingState) -> Iterator[None]:
    """The model as it would be used: as given, with averaged weights if there are any."""
    with ExitStack() as stack:
        stack.enter_context(_as_given(state))
        for plugin in state.plugins:
            if isinstance(plugin, ChangesEvaluation):
                stack.enter_context(plugin.evaluated(state))
        yield


def _start_epoch(state: TrainingState) -> None:
    with _as_given(state):
        for plugin in state.plugins:
            if isinstance(plugin, BeforeEpoch):
                plugin.before_epoch(state)


def _end_epoch(state: TrainingState, accelerator: Accelerator) -> None:
    """Call plug-ins, validate, keep the best weights."""
    epoch = state.epoch
    average_statistics(state.model, state.processes)
    with _as_given(state):
        for plugin in state.plugins:
            if isinstance(plugin, AfterEpoch):
                plugin.after_epoch(state)
    if state.processes.any(bool(state.stopped)) and not state.stopped:  # a plug-in may stop in one process only
        state.stopped = "another process asked for it"
    validation = state.recipe.validation
    row: dict[str, float] = dict(state.logged)
    if (epoch + 1) % validation.every == 0 or epoch + 1 == state.epochs or state.stopped:
        with _deployed(state):
            score = _score(state)
            # Among equals the later one: the schedule is nearer to its end.
            if state.best is None or score.decisive >= state.best.decisive:
                state.best, state.best_epoch = score, epoch if state.back_to is None else state.back_to
                _write_weights(state, "best", already_deployed=True)
        values = score.as_metrics()
        if state.back_to is not None:
            row["back_to_epoch"] = state.back_to
            values = values if (state.back_to + 1) % validation.every else {}  # that epoch already has its score
        row |= values
    state.logged.clear()
    state.metrics.add(state.step, {"epoch": epoch, **row})
    track(accelerator, state.recipe.train.tracker, row, state.step, state.folder)
    state.table.add_epoch(epoch, row, best=state.best_epoch == epoch)


def _score(state: TrainingState) -> Score:
    """By the objective's own metric and attack if it has one, else by accuracy under the recipe's validation attack."""
    recipe, name, threat = state.recipe, state.recipe.validation.attack, state.recipe.threat
    objective = recipe.objective
    if isinstance(objective, HasOwnMetric) and objective.attack is not None:
        shown, inner = recipe.adapter.shown(state.model), training_form(objective.attack)
        metric = objective.measure, objective.measured_as
        return state.held_out.measure(state.model, shown, inner, *metric, state.processes, state.seed)
    attack = None if name is None else make(name, eps=threat.eps, norm=threat.norm)
    return state.held_out.score(state.model, attack, state.threat, state.processes, state.seed)


def _measured(state: TrainingState) -> dict[str, Any] | None:
    """What a reader of the weights should expect: accuracy on held-out images; None for another measure."""
    score, data = state.best, state.recipe.data
    if score is None or score.measure != "accuracy":
        return None
    return {"clean": score.clean, "n": score.n, "data": data.validation or data.train, "trained_on": data.train}


def _write_weights(state: TrainingState, name: str, already_deployed: bool = False) -> None:
    with nullcontext() if already_deployed else _deployed(state):
        model = state.plain_model()
        if isinstance(model, Classifier):
            model.record_training(_measured(state) if name == "best" else None)
        if state.processes.is_main:
            state.recipe.adapter.save(model, state.folder / "weights" / f"{name}.safetensors")


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first lets the step finish and the state be saved, a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def make_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """timm's optimizer, which knows what not to decay, of unfrozen parameters; the loop sets its rate each step."""
    options: dict[str, Any] = {"eps": section.eps, "betas": section.betas, "layer_decay": section.layer_decay}
    try:
        options["fused"] = _fused(section, next(model.parameters()).device) or None
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model.backbone if isinstance(model, Classifier) else model,  # timm knows its parameter names
            opt=section.name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            momentum=section.momentum,
            **{key: value for key, value in options.items() if value is not None},
        )
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"optimizer '{section.name}' cannot be built with these settings: {error}") from error
    return optimizer


def _fused(section: OptimizerSection, device: torch.device) -> bool:
    """Whether all weights are updated in one kernel: if the recipe says so, or by default on a GPU."""
    known = get_optimizer_class(section.name, bind_defaults=False)
    can = inspect.isclass(known) and "fused" in inspect.signature(known).parameters
    if section.fused and not can:
        raise UserError(
            f"optimizer.fused: torch has no fused '{section.name}', but fused adam, adamw and sgd; set "
            "optimizer.fused=false or another optimizer.name"
        )
    return section.fused if section.fused is not None else can and is_gpu(device)


def run_inner_attack(
    attack: Attack,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rng: SampleRNG | None = None,
    mode: Literal["eval", "train"] = "eval",
) -> Tensor:
    """Attacked images to train on; the model's modes, flags and gradients are left as they are.

    In mode 'train' the attack sees the model in the modes that training has set: dropout draws from torch's global
    generator, and every forward pass of the attack updates the running statistics of batch norm.

    PGD gets mixed labels, also when it is repeated or averaged; other attacks get the likeliest class.
    """
    threats = threats_in(attack)
    if threats and all(threat.eps == 0 for threat in threats):
        return x.detach()
    seen = _KeepsModes(model) if mode == "train" else model
    return attack(seen, x, y if _takes_mixed_labels(attack) else hard_labels(y), rng)


class _KeepsModes(nn.Module):
    """A model whose train and eval modes attacks cannot switch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Self:
        return self

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def _takes_mixed_labels(attack: Attack) -> bool:
    if isinstance(attack, Restarts | Averaged):
        return _takes_mixed_labels(attack.attack)
    if isinstance(attack, Ensemble):
        return all(_takes_mixed_labels(member) for _, member in attack.members())
    return isinstance(attack, PGD)
