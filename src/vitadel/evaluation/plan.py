"""What an audit will cost before it runs: passes, memory and time, from a short probe on this machine."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.attacks.names import make
from vitadel.evaluation.subject import Subject
from vitadel.instrument.hooks import frozen

__all__ = ["plan"]

_PROBES = 3


def plan(
    subject: Subject,
    *,
    attacks: Sequence[str],
    eps: float,
    norm: str,
    samples: int,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """An upper estimate: every sample is taken to withstand every attack to its last step.

    Fooled samples leave an attack early, so the real cost lies between that of the clean pass and this.
    """
    crew = [(name, make(name, eps=eps, norm=norm)) for name in attacks]
    batch = min(batch_size, samples)
    model = subject.model.to(device)
    x = torch.full((batch, 3, *subject.preprocess.shape), 0.5, device=device)
    aim = OnLogits()(model, x, torch.zeros(batch, dtype=torch.int64, device=device))

    def take_gradient() -> Tensor:
        z = x.clone().requires_grad_()
        return gradient(aim.look(z, 0.0)[0], z)

    def take_forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(x)
        return logits

    with frozen(model):
        forward_seconds = _seconds(take_forward, device) / batch
        gradient_seconds = _seconds(take_gradient, device) / batch
    rows: list[dict[str, Any]] = [{"name": "clean", "gradients": 0, "forwards": 1}]
    for name, attack in crew:
        gradients, forwards = attack.passes()
        rows.append({"name": name, "gradients": gradients, "forwards": forwards + 1})  # one forward is the judge's
    for row in rows:
        row["seconds"] = samples * (row["gradients"] * gradient_seconds + row["forwards"] * forward_seconds)
    return {
        "samples": samples,
        "batch_size": batch_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "forward_ms": 1e3 * forward_seconds,
        "gradient_ms": 1e3 * gradient_seconds,
        "memory_mb": _peak_memory_mb(device),
        "rows": rows,
        "seconds_at_most": sum(row["seconds"] for row in rows),
    }


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
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


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
