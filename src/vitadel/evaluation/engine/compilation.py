"""Does torch.compile pay for this model on this machine? Measured: the answer ranges from twice as fast to not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.instrument.hooks import frozen

__all__ = ["WORTH", "Compilation", "compiled", "gradient_probe", "seconds_of"]

WORTH = 1.1
"""How much faster a gradient must become for compilation to be used."""

_PROBES = 3


@dataclass(frozen=True)
class Compilation:
    """`speedup` of a gradient, after `seconds` of compiling; 0 if it could not be compiled, for the `reason` given."""

    speedup: float
    seconds: float
    reason: str = ""

    @property
    def pays(self) -> bool:
        return self.speedup >= WORTH

    def told(self) -> str:
        if self.reason:
            return f"torch.compile failed here ({self.reason}); going on without"
        does = "pays" if self.pays else "does not pay"
        use = "" if self.pays else "; going on without"
        return f"torch.compile {does}: {self.speedup:.2f} times as fast after {self.seconds:.0f} s of compiling{use}"


def compiled(
    model: nn.Module, x: Tensor, agree: Callable[[bool], bool] = lambda pays: pays
) -> tuple[nn.Module, Compilation]:
    """The model to take gradients of: compiled for any batch size where that is faster on `x`, else as it is.

    `agree` makes one answer of several processes', which would otherwise round differently.
    """
    with frozen(model):
        try:
            begun = time.perf_counter()
            _keep_buffers()
            fast: nn.Module = torch.compile(model, dynamic=True)  # type: ignore[assignment]
            for part in (x, x[: max(1, len(x) // 2)]):  # a second size, so that none is compiled for later
                gradient_probe(fast, part)()
            _two_gradients_of_one_pass(fast, x)
            spent = time.perf_counter() - begun
            speedup = seconds_of(gradient_probe(model, x), x.device) / seconds_of(gradient_probe(fast, x), x.device)
        except Exception as problem:  # whatever a compiler may raise: without it everything still works
            agree(False)
            return model, Compilation(0.0, 0.0, type(problem).__name__)
    verdict = Compilation(speedup, spent)
    return (fast if agree(verdict.pays) else model), verdict


def _keep_buffers() -> None:
    """A compiled backward pass may otherwise use up what a second one, as FAB and MALT take it, would need."""
    settings = getattr(getattr(torch, "_functorch", None), "config", None)
    if hasattr(settings, "donated_buffer"):
        settings.donated_buffer = False  # type: ignore[union-attr]


def _two_gradients_of_one_pass(model: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        z = x.clone().requires_grad_()
        logits = model(z)
        gradient(logits[:, 0], z, again=True)
        gradient(logits[:, -1], z)


def gradient_probe(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """One gradient of the cross-entropy, as attacks take it."""
    aim = OnLogits()(model, x, torch.zeros(len(x), dtype=torch.int64, device=x.device))

    def take() -> Tensor:
        z = x.clone().requires_grad_()
        return gradient(aim.evaluate(z, 0.0)[0], z)

    return take


def seconds_of(work: Callable[[], Tensor], device: torch.device) -> float:
    """The fastest of a few calls after one to warm up: what else the machine does can only add."""
    best = float("inf")
    for turn in range(_PROBES + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - begun)
    return best
