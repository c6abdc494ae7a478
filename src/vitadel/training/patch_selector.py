"""AFAT's adversarial patch selector (CVPR 2023): a small network trained beside the model, against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.patches.corruption_model import CorruptionModel, keep_mask, normalize_like, save_corruption_model
from vitadel.attacks.patches.patch_threat import count_of_share, patch_side_of, patches_in
from vitadel.runtime.rng import SampleRNG
from vitadel.training.data_stream import derive_seed
from vitadel.training.interfaces import Losses, Training
from vitadel.training.opponent_probe import OpponentGain

_PROBED = 128  # training images on which the selection is measured after every epoch
_LAST, _MOMENTUM, _WEIGHT = "last", "momentum.", "alignment weight"

Choose = Callable[[Tensor], Tensor]
Probe = Callable[[nn.Module, Sequence[tuple[Tensor, Tensor]], Choose | None, int], tuple[float, OpponentGain | None]]
"""(model, images, the selector's choice or None for random patches, key) -> gradient share and gain."""
Calibrate = Callable[[nn.Module, Sequence[tuple[Tensor, Tensor]], int], float]
"""(model, images, key) -> the weight of the alignment."""


@dataclass
class PatchSelector:
    """Selects the patches to corrupt and trains the selection: gradient ascent by SGD on the objective's loss.

    Gradients are averaged over processes and then scaled to the norm `grad_norm` ('normalized'), or clipped to it
    ('clipped', the released code). The released code ran in half precision and clipped gradients that were still
    multiplied by the loss scale, so in effect all had that norm; in full precision they are some hundred times shorter,
    and the selector hardly changes. Steps with non-finite gradients are skipped. Logged after every epoch, on training
    images without augmentation: the share of selected patches that differ from the start (`masks_moved`) and from the
    previous epoch (`masks_moved_last`), and what `probe` measures: `gradient_share`, and the gain of the choice over
    random patches (`opponent_gain` with its interval), with a warning where the interval includes 1. `calibrate` sets
    the objective's `weight` at the first step, from the same images; it is logged as `alignment_weight`.
    """

    share: float
    rounding: str
    side: int
    trained: bool
    lr: float
    momentum: float
    weight_decay: float
    gradient: str
    grad_norm: float
    probe: Probe = field(repr=False)
    calibrate: Calibrate | None = field(repr=False, default=None)
    weight: float | None = field(init=False, default=None)
    _model: CorruptionModel | None = field(init=False, default=None, repr=False)
    _optimizer: torch.optim.SGD | None = field(init=False, default=None, repr=False)
    _saved: dict[str, Tensor] = field(init=False, default_factory=dict, repr=False)
    _last: Tensor | None = field(init=False, default=None, repr=False)
    _side: int = field(init=False, default=0, repr=False)
    _key: int = field(init=False, default=0, repr=False)
    _warned: bool = field(init=False, default=False, repr=False)

    def rng(self, x: Tensor) -> SampleRNG:
        """Random streams keyed by pixels and step: independent of batches and processes, new in every epoch."""
        return SampleRNG.of_pixels(x, self._key)

    def count(self, patches: int) -> int:
        """How many patches are corrupted; 'quantile' is the released rule if no two scores are equal."""
        if self.rounding == "quantile" and self.share > 0:
            return int(self.share * (patches - 1)) + 1
        return count_of_share(self.share, patches)

    def side_for(self, model: nn.Module, x: Tensor) -> int:
        self._side = self._side or self.side or patch_side_of(model, x)
        return self._side

    def scores(self, model: nn.Module, x: Tensor) -> Tensor:
        """Scores (batch, patches), the lowest of which are corrupted; gradients reach the corruption model."""
        if self._model is None:  # called outside a training
            self._model = _untrained(x, self.side_for(model, x), 0)
        scores: Tensor = self._model(normalize_like(model, x))
        return scores

    @contextmanager
    def around_step(self, run: Training, losses: Losses) -> Iterator[None]:
        self._key = derive_seed(run.seed, "corruption", run.step)
        if self._side == 0 or (self.trained and self._optimizer is None):
            self._start(run)
        if self.calibrate is not None and self.weight is None:
            self.weight = self.calibrate(run.model, list(run.training_images(_PROBED)), derive_seed(run.seed, "probe"))
        yield
        if self.trained:
            self._ascend(run)

    def _start(self, run: Training) -> None:
        x, _ = next(iter(run.training_images(1)))
        side = self.side_for(run.model, x)
        if not self.trained:
            return
        self._model = _untrained(x, side, run.seed)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(),
            self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
            maximize=True,
        )
        if self._saved:
            for name, weight in self._model.named_parameters():
                weight.data.copy_(self._saved[name])
                if _MOMENTUM + name in self._saved:
                    self._optimizer.state[weight]["momentum_buffer"] = self._saved[_MOMENTUM + name].to(weight.device)

    @torch.no_grad()
    def _ascend(self, run: Training) -> None:
        assert self._model is not None
        assert self._optimizer is not None
        weights = list(self._model.parameters())
        grads = [run.processes.mean(torch.zeros_like(w) if w.grad is None else w.grad) for w in weights]
        length = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
        run.log({"opponent_gradient": float(length)})
        if bool(length.isfinite()):
            factor = self.grad_norm / length.clamp(min=1e-30)
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad * (factor.clamp(max=1) if self.gradient == "clipped" else factor)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def after_epoch(self, run: Training) -> None:
        images = [(x, y) for x, y in run.training_images(_PROBED)]
        choose = None
        if self.trained and self._model is not None:
            self._log_moves(run, [x for x, _ in images])
            choose = partial(self._kept, self._model, run.model)
        share, gain = self.probe(run.model, images, choose, derive_seed(run.seed, "probe"))
        run.log({"gradient_share": share})
        if self.weight is not None:
            run.log({"alignment_weight": self.weight})
        if gain is None:
            return
        run.log(gain.as_metrics())
        if not gain.beats_chance and not self._warned:
            run.report(
                f"the opponent's patches are no worse for the model than random ones: opponent_gain {gain.gain:.3f}, "
                f"95 % interval {gain.low:.3f} to {gain.high:.3f}. Try objective.learning=credited with "
                "objective.lr=5e-3; docs/afat.md says why."
            )
        self._warned = not gain.beats_chance

    @torch.no_grad()
    def _log_moves(self, run: Training, batches: Sequence[Tensor]) -> None:
        assert self._model is not None
        first = _untrained(batches[0], self._side, run.seed)
        at_start, now = (
            torch.cat([self._kept(each, run.model, x) == 0 for x in batches]) for each in (first, self._model)
        )
        last = at_start if self._last is None else self._last.to(now.device)
        run.log({"masks_moved": _moved(at_start, now), "masks_moved_last": _moved(last, now)})
        self._last = now
        if run.processes.is_main:
            save_corruption_model(self._model, run.folder / "weights" / "corruption-model.safetensors")

    def _kept(self, selector: CorruptionModel, model: nn.Module, x: Tensor) -> Tensor:
        """1 for the patches that the selector keeps."""
        scores = selector(normalize_like(model, x))
        return keep_mask(scores, self.count(scores.shape[1])).detach()

    def state(self) -> dict[str, Tensor]:
        state = {} if self.weight is None else {_WEIGHT: torch.tensor(self.weight, dtype=torch.float64)}
        if self._model is None or self._optimizer is None:
            return state
        if self._last is not None:
            state[_LAST] = self._last.cpu()
        for name, weight in self._model.named_parameters():
            state[name] = weight.detach().cpu().clone()
            momentum = self._optimizer.state[weight].get("momentum_buffer")
            if momentum is not None:
                state[_MOMENTUM + name] = momentum.cpu().clone()
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._saved = dict(state)
        self._last = self._saved.pop(_LAST, None)
        weight = self._saved.pop(_WEIGHT, None)
        self.weight = None if weight is None else float(weight)


def _untrained(x: Tensor, side: int, seed: int) -> CorruptionModel:
    """The initial network for images of the size of `x`, the same in every process."""
    source = torch.Generator().manual_seed(derive_seed(seed, "opponent"))
    return CorruptionModel(*patches_in(x, side), side, x.shape[1], source).to(x.device)


def _moved(before: Tensor, now: Tensor) -> float:
    chosen = int(before.sum())
    return float((before & ~now).sum()) / chosen if chosen else 0.0
