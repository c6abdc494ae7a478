"""Detection of catastrophic overfitting: robust to one attack step, not to several (Wong et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitadel.attacks.gain_ratio import measure_gains
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Steepest
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import ChangesEvaluation, Plugin, Training, warn_late_start
from vitadel.types import Attack

_ACTIONS = ("warn", "stop", "rollback")
_LAST, _FACTORS, _PREFIX = "pgd_accuracy", "attention_factors", "good."


@dataclass
class OverfittingGuard:
    """Attacks held-out images after each epoch, at full eps, by FGSM and by PGD with `steps` steps.

    An alarm is raised if the accuracy under FGSM is more than `gap` above that under PGD, if the latter is more than
    `fall` below that of the previous epoch, or if a step of length eps delivers less than the share `least_gain` of
    what its gradient promised (the median of the images; see `attacks.gain_ratio`). 'warn' only prints it, 'stop' ends
    training, 'rollback' ends it with the weights of the last epoch without alarm, as in arXiv:2001.03994. A model that
    is not adversarially trained yet looks much like a collapsed one: with an epsilon warm-up, set `from_epoch` to the
    epoch where eps is full. An epoch with new attention factors (AAS-AT) is not compared with the previous one.
    """

    action: str = "warn"
    gap: float = 0.2
    fall: float = 0.2
    images: int = 256
    steps: int = 10
    from_epoch: int = 0
    least_gain: float = 0.1
    _last: float | None = field(init=False, default=None, repr=False)
    _factors: Tensor | None = field(init=False, default=None, repr=False)
    _good: dict[str, Tensor] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise UserError(f"unknown action {self.action!r} of the overfitting guard; allowed: {', '.join(_ACTIONS)}")
        if min(self.images, self.steps) < 1:
            raise UserError(
                f"the overfitting guard needs at least 1 image and 1 step, got {self.images} and {self.steps}"
            )

    def length_warning(self, epochs: int) -> str | None:
        return warn_late_start(self.from_epoch, epochs)

    def check_plugins(self, plugins: Iterable[Plugin]) -> None:
        if self.action == "rollback" and any(isinstance(plugin, ChangesEvaluation) for plugin in plugins):
            raise UserError(
                "overfitting_guard can roll back weights, but not an average that already contains the overfitted "
                "epoch; with weight_average use action: stop, after which weights/best is still there"
            )

    def after_epoch(self, run: Training) -> None:
        if run.epoch < self.from_epoch:
            return
        one_step = PGD(run.threat, stepper=Steepest(run.threat.eps), steps=1, random_start=False)
        # Computed by the main process only: processes must not come to different decisions.
        fgsm, pgd, gain = run.processes.on_main(
            lambda: (
                self._accuracy(one_step, run),
                self._accuracy(PGD(run.threat, steps=self.steps), run),
                _step_gain(run, self.images),
            )
        )
        run.log({"fgsm_accuracy": fgsm, "pgd_accuracy": pgd} | ({} if math.isnan(gain) else {"step_gain": gain}))
        factors = _factors_of(run.model)
        if factors is not None and (self._factors is None or not torch.equal(factors, self._factors)):
            self._last = None
        alarm = self._alarm(fgsm, pgd, gain)
        self._last, self._factors = pgd, factors
        if alarm:
            self._act(run, alarm)
        elif self.action == "rollback":
            self._good = {name: each.detach().to("cpu", copy=True) for name, each in _changing(run.model).items()}

    def _alarm(self, fgsm: float, pgd: float, gain: float) -> str:
        if fgsm - pgd > self.gap:
            return f"held-out accuracy is {fgsm:.0%} under FGSM and {pgd:.0%} under PGD-{self.steps}"
        if self._last is not None and self._last - pgd > self.fall:
            return f"held-out accuracy under PGD-{self.steps} is {pgd:.0%}, after {self._last:.0%} an epoch ago"
        if gain < self.least_gain:
            return f"a step of length eps delivers {gain:.0%} of what its gradient promised"
        return ""

    def _act(self, run: Training, alarm: str) -> None:
        message, back_to = f"catastrophic overfitting in epoch {run.epoch + 1}: {alarm}", None
        if self.action == "rollback":
            if self._good:
                with torch.no_grad():
                    for name, each in _changing(run.model).items():
                        each.copy_(self._good[name])
                back_to = run.epoch - 1  # the first alarm ends the training, so there was none before
                message += "; the weights of the last epoch without alarm are restored"
            else:
                message += "; there was no epoch without alarm to go back to"
        run.report(message)
        if self.action != "warn":
            run.stop(message, back_to)

    def _accuracy(self, attack: Attack, run: Training) -> float:
        return _accuracy(attack, run.model, run.held_out_images(self.images), run.seed)

    def state(self) -> dict[str, Tensor]:
        held = {_PREFIX + name: each for name, each in self._good.items()}
        if self._last is not None:
            held[_LAST] = torch.tensor(self._last, dtype=torch.float64)
        if self._factors is not None:
            held[_FACTORS] = self._factors
        return held

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._last = float(state[_LAST]) if _LAST in state else None
        self._factors = state.get(_FACTORS)
        self._good = {name.removeprefix(_PREFIX): each for name, each in state.items() if name.startswith(_PREFIX)}


def _step_gain(run: Training, images: int) -> float:
    """The median gain ratio of steps of length eps from held-out images; NaN where gradients promise nothing."""
    ratios = [
        measure_gains(run.model, x, y, run.threat, (run.threat.eps,)).ratio[0] for x, y in run.held_out_images(images)
    ]
    return float(torch.cat(ratios).nanmedian()) if ratios else math.nan


def _factors_of(model: nn.Module) -> Tensor | None:
    """The attention factors of the model or of a model inside it, as AAS-AT sets them."""
    named = (each for name, each in model.named_buffers() if name.rpartition(".")[2] == "attention_factors")
    return next((each.detach().to("cpu", copy=True) for each in named), None)


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes; not by `state_dict`, which leaves out secret tokens."""
    learning = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return learning | dict(model.named_buffers())


def _accuracy(attack: Attack, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], seed: int) -> float:
    """The share of images classified correctly under attack; random starts are the same after every epoch."""
    right = count = 0
    with frozen(model):
        for x, y in batches:
            rng = SampleRNG.of_samples(seed, range(count, count + len(x)), x.device).stream("overfitting guard")
            z = attack(model, x, y, rng)
            with torch.no_grad():
                right += int((model(z).argmax(1) == y).sum())
            count += len(x)
    if count == 0:
        raise UserError("the overfitting guard needs held-out images, and there are none: give data.held_out")
    return right / count
