"""Measures whether torch.compile makes a model faster on this machine, and times single passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.instrument.hooks import frozen

__all__ = ["WORTH", "Compilation", "compile_if_faster", "gradient_probe", "seconds_of"]

WORTH = 1.1
"""The least speedup of a gradient for which the compiled model is used."""

_PROBES = 3


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
                gradient_probe(fast, part)()
            _two_gradients_of_one_pass(fast, x)
            spent = time.perf_counter() - start
            speedup = seconds_of(gradient_probe(model, x), x.device) / seconds_of(gradient_probe(fast, x), x.device)
        except Exception as problem:  # compilers raise anything; everything works without
            agree(False)
            return model, Compilation(0.0, 0.0, type(problem).__name__)
    verdict = Compilation(speedup, spent)
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


def gradient_probe(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A function that takes one gradient of the cross-entropy, as attacks do."""
    aim = OnLogits()(model, x, torch.zeros(len(x), dtype=torch.int64, device=x.device))

    def take() -> Tensor:
        z = x.clone().requires_grad_()
        return gradient(aim.evaluate(z, 0.0)[0], z)

    return take


def seconds_of(work: Callable[[], Tensor], device: torch.device) -> float:
    """The fastest of a few calls, after one to warm up."""
    best = float("inf")
    for turn in range(_PROBES + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best
