"""`vitadel.attack`: adversarial examples for whatever data a Python program has, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.data.batches import read_batches
from vitadel.evaluation.audit.audit import DEFAULT_DATA, DEFAULT_MODEL, AuditRequest, check_request
from vitadel.evaluation.engine.attack_preparation import calibrate
from vitadel.evaluation.engine.run import Run, request_from
from vitadel.evaluation.engine.stages import judge, rules_of
from vitadel.evaluation.engine.target import apply_class_subset, open_target
from vitadel.instrument.hooks import frozen
from vitadel.quantities import read_quantity
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG

__all__ = ["AdversarialExamples", "attack"]


class AdversarialExamples(NamedTuple):
    """Perturbed and clean images on the CPU, pixels in [0, 1], one row for each image, correctly classified or not.

    `indices` are the places in the data, `prediction` that of the perturbed image; `held`: it is still the label.
    """

    images: Tensor
    clean: Tensor
    label: Tensor
    indices: Tensor
    prediction: Tensor
    held: Tensor


def attack(
    model: str | nn.Module = DEFAULT_MODEL,
    data: Any = DEFAULT_DATA,
    attack: str = "pgd-20",
    *,
    eps: float | str = 8 / 255,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AdversarialExamples:
    """Attack images from Python: `vitadel.attack(model, loader, "apgd-ce", eps=4/255, limit=100).images`.

    `model` and `data` are those of `audit`: a spec, a path, tensors or arrays, a Dataset, a DataLoader, a Hugging Face
    dataset. `settings` are further fields of `AuditRequest`: norm, limit, batch_size, seed, precision, skip_bad,
    calibration. All images stay in memory; `vitadel attack` writes them to a run folder.
    """
    fields = {"attacks": (attack,), "eps": read_quantity(eps, "eps"), **settings}
    request = request_from(AuditRequest, "attack", fields)
    processes = join_processes(device)
    target = open_target(model, data, data_root=data_root, model_options=model_options, skip_bad=bool(request.skip_bad))
    target = apply_class_subset(target)
    indices, _ = target.selection(request.limit, request.seed, request.skip_bad)
    check_request(target, request, indices, processes.device)
    context = Run(None, processes).context(target, request, precision=request.precision)
    search = make(attack, eps=request.eps, norm=request.norm)
    search = calibrate(search, context, target, indices, request.calibration)
    rules, parts = rules_of(search), list[AdversarialExamples]()
    how: dict[str, Any] = {"skip_bad": context.skip_bad, "device": processes.device}
    with frozen(context.model):
        for batch in read_batches(context.source, context.chunks(indices), context.preprocess, **how):
            rng = SampleRNG.of_samples(request.seed, batch.indices, processes.device)
            with context.arithmetic():
                z = search(context.model, batch.x, batch.y, rng)
                threat = request.threat if rules is None else rules(context.model, batch.x)
                verdict = judge(context.model, threat, batch.x, z, batch.y)
            found = (z, batch.x, batch.y, batch.indices, verdict.prediction, verdict.held)
            parts.append(AdversarialExamples(*(each.detach().cpu() for each in found)))
    return AdversarialExamples(*(torch.cat(column) for column in zip(*parts, strict=True)))
