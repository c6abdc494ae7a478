"""What an audit will cost before it runs: passes, memory and time, from a short probe on this machine."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitadel.attacks.parse import is_adaptive, make
from vitadel.evaluation.engine.compilation import compile_if_faster, gradient_probe, seconds_of
from vitadel.evaluation.engine.preflight import preflight
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.hooks import frozen

__all__ = ["plan"]


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
    """An upper estimate: every sample is taken to withstand every attack to its last step.

    Fooled samples leave an attack early, so the real cost lies between that of the clean pass and this. With
    `compile_model` it is also tried whether torch.compile pays, which takes a minute.
    """
    crew = [(name, make(name, eps=eps, norm=norm)) for name in attacks]
    batch = min(batch_size, samples)
    model = target.model.to(device)
    preflight(model, crew, target.preprocess.shape)  # what cannot run costs nothing
    x = torch.full((batch, 3, *target.preprocess.shape), 0.5, device=device)

    def take_forward() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(x)
        return logits

    with frozen(model):
        forward_seconds = seconds_of(take_forward, device) / batch
        gradient_seconds = seconds_of(gradient_probe(model, x), device) / batch
    compilation = compile_if_faster(model, x)[1] if compile_model else None
    if compilation is not None and compilation.pays:
        forward_seconds, gradient_seconds = (t / compilation.speedup for t in (forward_seconds, gradient_seconds))
    rows: list[dict[str, Any]] = [{"name": "clean", "gradients": 0, "forwards": 1}]
    for name, attack in crew:
        gradients, forwards = attack.passes()
        adaptive = is_adaptive(name)
        # One forward is the judge's.
        rows.append({"name": name, "gradients": gradients, "forwards": forwards + 1, "adaptive": adaptive})
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
        "compile": None if compilation is None else compilation.summary(),
        "rows": rows,
        "seconds_at_most": sum(row["seconds"] for row in rows),
    }


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
