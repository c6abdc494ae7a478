"""What a model's passes cost on this machine: their times, the gain of torch.compile, and the plan of an audit."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.attacks.parse import is_adaptive, make
from vitadel.evaluation.engine.attack_preparation import preflight
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.hooks import frozen

WORTH = 1.1
"""The least speedup of a gradient for which the compiled model is used."""

_PROBES = 3


class PassTimes(NamedTuple):
    """Seconds per image of a gradient (forward and backward pass) and of a forward pass."""

    gradient: float
    forward: float

    @classmethod
    def measure(cls, model: nn.Module, x: Tensor) -> PassTimes:
        def forward() -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(x)
            return logits

        with frozen(model):
            works = (_gradient_probe(model, x), forward)
            return cls(*(seconds_of(work, x.device) / len(x) for work in works))

    def seconds(self, gradients: float, forwards: float) -> float:
        """The time of so many passes of one image."""
        return gradients * self.gradient + forwards * self.forward


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


def plan(
    target: Target,
    *,
    attacks: Sequence[str],
    eps: float,
    norm: str,
    samples: int,
    batch_size: int,
    device: torch.device,
    compile_model: bool = False,
) -> dict[str, Any]:
    """An upper bound of the cost: every sample withstands every attack to its last step.

    Misclassified samples leave an attack early, so the real cost lies between that of the clean pass and this. With
    `compile_model` the gain of torch.compile is measured, too, which takes a minute.
    """
    named = [(name, make(name, eps=eps, norm=norm)) for name in attacks]
    model = target.model.to(device)
    preflight(model, named, target.preprocess.shape)  # what cannot run costs nothing
    x = torch.full((min(batch_size, samples), 3, *target.preprocess.shape), 0.5, device=device)
    times = PassTimes.measure(model, x)
    compilation = compile_if_faster(model, x)[1] if compile_model else None
    if compilation is not None and compilation.pays:
        times = PassTimes(*(each / compilation.speedup for each in times))
    rows: list[dict[str, Any]] = [{"name": "clean", "gradients": 0, "forwards": 1}]
    for name, attack in named:
        gradients, forwards = attack.passes()
        # One more forward pass judges the result.
        rows.append({"name": name, "gradients": gradients, "forwards": forwards + 1, "adaptive": is_adaptive(name)})
    for row in rows:
        row["seconds"] = samples * times.seconds(row["gradients"], row["forwards"])
    return {
        "samples": samples,
        "batch_size": batch_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "forward_ms": 1e3 * times.forward,
        "gradient_ms": 1e3 * times.gradient,
        "memory_mb": _peak_memory_mb(device),
        "compile": None if compilation is None else compilation.summary(),
        "rows": rows,
        "seconds_at_most": sum(row["seconds"] for row in rows),
    }


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
