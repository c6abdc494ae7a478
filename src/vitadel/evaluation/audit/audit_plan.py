"""What an audit will take before it runs: passes, memory, and likely and longest time on this machine."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.engine.attack_preparation import preflight
from vitadel.evaluation.engine.cost import PassTimes, compile_if_faster, estimate, gray_batch
from vitadel.evaluation.engine.run import Run
from vitadel.evaluation.engine.stages import ordinary_form
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.runtime.distributed import Processes, gpu_module, is_gpu

ESCALATION = ", if it escalates"
"""The end of the name of a row: what more a staged ensemble costs at most."""


def plan_audit(
    target: Target,
    request: AuditRequest,
    processes: Processes,
    *,
    checks: tuple[int, float] | None = None,
) -> dict[str, Any]:
    """What an audit takes: likely seconds, from a trial of the attacks on a few images, and the most it can take.

    `checks` are images and gradients per image of the checks before the attacks. With `request.compile` the gain of
    torch.compile is measured, too, which takes a minute.
    """
    target = apply_class_subset(target)
    named, device = request.make_attacks(), processes.device
    context = Run(None, processes).context(target, request, precision=request.precision)
    indices = target.selection(request.limit, request.seed, request.skip_bad)[0]
    preflight(context.model, named, target.preprocess.shape)  # what cannot run costs nothing
    x = gray_batch(context, len(indices))
    times, compilation = None, None
    if request.compile:
        compilation = compile_if_faster(context.model, x)[1]
        if compilation.pays:
            with context.arithmetic():
                times = PassTimes(*(each / compilation.speedup for each in PassTimes.measure(context.model, x)))
    trial = estimate(
        context, named, indices, eps=request.eps, norm=request.norm, independent=request.independent, times=times
    )
    times = trial.times
    rows: list[dict[str, Any]] = []
    if checks is not None:
        images, gradients = min(checks[0], len(indices)), checks[1]
        rows.append({"name": "first checks", "gradients": gradients, "forwards": 0, "images": images})
    rows.append({"name": "clean", "gradients": 0, "forwards": 1, "images": len(indices)})
    for row in rows:
        row["seconds"] = row["likely_seconds"] = row.pop("images") * times.seconds(row["gradients"], row["forwards"])
    for number, (name, attack) in enumerate(named):
        gradients, forwards = ordinary_form(attack).passes()
        stages = [stage for stage in trial.at_most if stage.startswith(f"{number:02d} ")]
        seconds = {
            "seconds": sum(trial.at_most[stage] for stage in stages),
            "likely_seconds": sum(trial.likely[stage] for stage in stages),
        }
        # One more forward pass judges the result.
        rows.append({"name": name, "gradients": gradients, "forwards": forwards + 1, **seconds})
        most = attack.passes()
        if most != (gradients, forwards):
            more = (most[0] - gradients, most[1] - forwards)
            seconds = {"seconds": len(indices) * times.seconds(*more), "likely_seconds": 0.0}
            rows.append({"name": f"{name}{ESCALATION}", "gradients": more[0], "forwards": more[1], **seconds})
    return {
        "samples": len(indices),
        "batch_size": request.batch_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "forward_ms": 1e3 * times.forward,
        "gradient_ms": 1e3 * times.gradient,
        "memory_mb": _peak_memory_mb(device),
        "compile": None if compilation is None else compilation.summary(),
        "tried_on": trial.images,
        "rows": rows,
        "seconds_likely": sum(row["likely_seconds"] for row in rows),
        "seconds_at_most": sum(row["seconds"] for row in rows),
    }


def _peak_memory_mb(device: torch.device) -> float:
    if is_gpu(device):
        return float(gpu_module(device).max_memory_allocated(device) / 2**20)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
