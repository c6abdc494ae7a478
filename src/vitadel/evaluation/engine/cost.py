"""What a model's passes cost on this machine: their times, and the gain of torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.evaluation.engine.stages import RunContext
from vitadel.instrument.hooks import frozen

WORTH = 1.1
"""The least speedup of a gradient for which the compiled model is used."""

SHORT = 30.0
"""Seconds: attacks whose upper bound is shorter are not tried before they run."""
_PROBES = 3
_ENOUGH = 3.0  # seconds
_FIRST, _MOMENT = 4, 0.25  # images and seconds


class PassTimes(NamedTuple):
    """Seconds per image of a gradient (forward and backward pass) and of a forward pass."""

    gradient: float
    forward: float

    @classmethod
    def measure(cls, model: nn.Module, x: Tensor) -> PassTimes:
        """On as many of the images as take a moment: a whole batch of a large model would take minutes."""

        def forward() -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(x)
            return logits

        with frozen(model):
            x = _quick_part(model, x)
            works = (_gradient_probe(model, x), forward)
            return cls(*(seconds_of(work, x.device) / len(x) for work in works))

    def seconds(self, gradients: float, forwards: float) -> float:
        """The time of so many passes of one image."""
        return gradients * self.gradient + forwards * self.forward


def _quick_part(model: nn.Module, x: Tensor) -> Tensor:
    """The first images: all of them, or so many that a gradient takes between one and four times `_MOMENT`."""
    count = _FIRST
    while count < len(x):
        start = time.perf_counter()
        _gradient_probe(model, x[:count])()
        if time.perf_counter() - start > _MOMENT:
            break
        count *= 4
    return x[:count]


def seconds_of(work: Callable[[], Tensor], device: torch.device) -> float:
    """The fastest of a few calls, after one to warm up; of fewer, if one takes seconds."""
    best, until = float("inf"), time.perf_counter() + _ENOUGH
    for turn in range(_PROBES + 1):
        if turn > 1 and time.perf_counter() > until:
            break
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def _gradient_probe(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A function that takes one gradient of the cross-entropy, as attacks do."""
    aim = OnLogits()(model, x, torch.zeros(len(x), dtype=torch.int64, device=x.device))

    def take() -> Tensor:
        z = x.clone().requires_grad_()
        return gradient(aim.evaluate(z, 0.0)[0], z)

    return take


@dataclass(frozen=True)
class Compilation:
    """`speedup` of a gradient after `seconds` of compiling; 0 if compiling failed, for the `reason` given."""

    speedup: float
    seconds: float
    reason: str = ""

    @property
    def pays(self) -> bool:
        return self.speedup >= WORTH

    def summary(self) -> str:
        if self.reason:
            return f"torch.compile failed here ({self.reason}); continuing without"
        does = "pays" if self.pays else "does not pay"
        use = "" if self.pays else "; continuing without"
        return f"torch.compile {does}: {self.speedup:.2f} times as fast after {self.seconds:.0f} s of compiling{use}"


def compile_if_faster(
    model: nn.Module, x: Tensor, agree: Callable[[bool], bool] = lambda pays: pays
) -> tuple[nn.Module, Compilation]:
    """The model to take gradients of: compiled (for any batch size) if that is faster on `x`, else unchanged.

    `agree` makes all processes use the decision of one.
    """
    with frozen(model):
        try:
            start = time.perf_counter()
            _keep_buffers()
            fast: nn.Module = torch.compile(model, dynamic=True)  # type: ignore[assignment]
            for part in (x, x[: max(1, len(x) // 2)]):  # a second size, so that none has to be compiled later
                _gradient_probe(fast, part)()
            _two_gradients_of_one_pass(fast, x)
            spent = time.perf_counter() - start
            slow, quick = (seconds_of(_gradient_probe(each, x), x.device) for each in (model, fast))
        except Exception as problem:  # compilers raise anything; everything works without
            agree(False)
            return model, Compilation(0.0, 0.0, type(problem).__name__)
    verdict = Compilation(slow / quick, spent)
    return (fast if agree(verdict.pays) else model), verdict


def _keep_buffers() -> None:
    """Keep the buffers of a compiled backward pass: FAB and MALT take a second one of the same forward pass."""
    settings = getattr(getattr(torch, "_functorch", None), "config", None)
    if hasattr(settings, "donated_buffer"):
        settings.donated_buffer = False  # type: ignore[union-attr]


def _two_gradients_of_one_pass(model: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        z = x.clone().requires_grad_()
        logits = model(z)
        gradient(logits[:, 0], z, again=True)
        gradient(logits[:, -1], z)


def gray_batch(context: RunContext, samples: int) -> Tensor:
    """A batch of gray images, to time passes on."""
    size = min(context.batch_size, max(samples, 1))
    return torch.full((size, 3, *context.preprocess.shape), 0.5, device=context.processes.device)
