"""The stages of a run: clean predictions, then one attack after another on the samples that are still robust.

A stage is a fixed list of whole batches. Batch k belongs to process k mod (number of processes), every finished batch
is a record in the cache, and no batch depends on which process computed it or when. So one process, two, and a run that
was killed and resumed give the same verdicts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.sample_info import run_attack
from vitadel.attacks.wrappers import MEMBER, WorstOf
from vitadel.backbones.classifier import fastest_attention
from vitadel.backbones.model_checks import check_logits
from vitadel.data.batches import Batch, read_batches
from vitadel.data.preprocess import Preprocess
from vitadel.errors import UserError
from vitadel.evaluation.engine.batch_cache import BatchCache, BatchRecord
from vitadel.evaluation.engine.judge import Verdict, judge
from vitadel.evaluation.engine.pass_counter import count_passes
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import RESUMED, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, OwnRules, Source, Threat

__all__ = [
    "NOTE",
    "PRECISIONS",
    "MemberResult",
    "RunContext",
    "attack_stage",
    "check_any_readable",
    "check_budget",
    "clean_stage",
    "refuse_lost_images",
    "rules_of",
    "run_stage",
]

NOTE = "note:"
"""Prefix of the arrays of a batch record that hold an attack's notes about each sample."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


SaveExamples = Callable[[str, int, Batch, Tensor, Verdict], dict[str, Tensor]]
"""(stage, batch number, batch, proposals, verdict) -> notes about each sample."""


def check_any_readable(count: int) -> None:
    if count == 0:
        raise UserError("no sample could be read, so there is nothing to do. To see the reasons, leave out --skip-bad.")


def check_budget(norm: str, eps: float) -> None:
    """Refuse the likely typo of 1 for 1/255."""
    if norm == "linf" and eps == 1:
        raise UserError("eps 1 lets every pixel become anything: pixels are in [0, 1] here. Did you mean 1/255?")


@dataclass(frozen=True)
class RunContext:
    """What all stages share: the model, its data, batch size, cache and processes."""

    model: nn.Module
    source: Source
    preprocess: Preprocess
    cache: BatchCache
    processes: Processes
    batch_size: int
    seed: int
    classes: int | None = None  # number of outputs by the model's record
    precision: str = "fp32"
    skip_bad: bool | None = False
    show_progress: bool = False
    save_examples: SaveExamples | None = None
    compiled: nn.Module | None = None  # the same model, faster, for attacks that use outputs only

    def chunks(self, indices: Tensor) -> list[list[int]]:
        """Batches of indices; never an empty one, which some models cannot take."""
        return [part.tolist() for part in indices.split(self.batch_size) if len(part)]

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        device, kind = self.processes.device, PRECISIONS[self.precision]
        with ExitStack() as stack:
            stack.enter_context(fastest_attention(self.model, device, kind))
            if kind is not None:
                stack.enter_context(torch.autocast(device.type, dtype=kind))
            yield


def run_stage(
    context: RunContext,
    stage: str,
    indices: Tensor,
    work: Callable[[int, Batch], BatchRecord],
    note: Callable[[BatchRecord], str] = lambda record: "",
) -> list[BatchRecord]:
    """Compute this process's missing batches, wait for the other processes, and return all records in order.

    `note` is shown beside the progress, from the record of the last batch.
    """
    chunks = context.chunks(indices)
    mine = range(context.processes.rank, len(chunks), context.processes.count)
    todo = [k for k in mine if not _is_done(context.cache.find(stage, k), chunks[k])]
    total, saved = sum(len(chunks[k]) for k in mine), sum(len(chunks[k]) for k in mine if k not in set(todo))
    with progress(stage, total, context.show_progress and context.processes.is_main) as meter:
        if saved:
            meter.advance(saved, RESUMED)
        stream = read_batches(context.source, (chunks[k] for k in todo), context.preprocess, skip_bad=context.skip_bad)
        for k, batch in zip(todo, stream, strict=True):
            start = time.perf_counter()
            record = work(k, batch.to(context.processes.device))
            record["chunk"] = np.asarray(chunks[k], dtype=np.int64)
            record["seconds"] = np.asarray(time.perf_counter() - start)
            context.cache.save(stage, k, record)
            meter.advance(len(chunks[k]), note(record))
    context.processes.wait()
    records = [context.cache.find(stage, k) for k in range(len(chunks))]
    if any(record is None for record in records):
        raise UserError(
            f"batches of stage {stage!r} are missing in the run folder. With several machines, --out must be a folder "
            "that all of them share."
        )
    return [record for record in records if record is not None]


def _is_done(record: BatchRecord | None, chunk: list[int]) -> bool:
    return record is not None and "chunk" in record and record["chunk"].tolist() == chunk


def clean_stage(context: RunContext, indices: Tensor, stage: str = "clean") -> list[BatchRecord]:
    """Predict the clean images."""

    def work(number: int, batch: Batch) -> BatchRecord:
        bad = json.dumps([{"index": b.index, "name": b.name, "reason": b.reason} for b in batch.bad])
        prediction = torch.empty(0, dtype=torch.int64)
        if len(batch.y):
            with torch.no_grad(), context.arithmetic():
                logits = context.model(batch.x)
            check_logits(logits, context.classes)
            if int(batch.y.max()) >= logits.shape[1]:
                raise UserError(
                    f"the model has {logits.shape[1]} outputs, but the data has label {int(batch.y.max())}: "
                    "take a model for this data."
                )
            prediction = logits.argmax(1)
        return {
            "index": batch.indices.cpu().numpy(),
            "label": batch.y.cpu().numpy(),
            "prediction": prediction.cpu().numpy(),
            "bad": np.asarray(bad),
        }

    return run_stage(context, stage, indices, work)


@dataclass(frozen=True)
class MemberResult:
    """What one attack did, or one member of an ensemble: verdicts, notes and costs, one record per batch."""

    name: str
    records: list[BatchRecord]

    @property
    def held(self) -> Tensor:
        """The indices of the samples that are still correct after it."""
        kept = [record["index"][record["held"]].astype(np.int64) for record in self.records]
        return torch.from_numpy(np.concatenate(kept or [np.empty(0, np.int64)]))

    @property
    def attacked(self) -> int:
        return sum(int(record["index"].size) for record in self.records)

    @property
    def broken(self) -> int:
        return self.attacked - len(self.held)


def attack_stage(
    context: RunContext, stage: str, attack: Attack, threat: Threat, indices: Tensor, needs_known_family: bool = False
) -> list[MemberResult]:
    """Attack these samples; the members of an ensemble run one after another, each on what the earlier ones left."""
    if needs_known_family:
        context = replace(context, compiled=None)
    if not isinstance(attack, WorstOf):
        return [MemberResult("", _one_attack(context, stage, attack, threat, indices, lambda rng: rng))]
    results: list[MemberResult] = []
    for number, (name, member) in enumerate(attack.members()):
        indices = results[-1].held if results else indices
        records = _one_attack(context, f"{stage} {name}", member, threat, indices, _member_stream(number))
        results.append(MemberResult(name, records))
    return results


def refuse_lost_images(batch: Batch) -> None:
    """After the clean stage every image of a batch must be readable: verdicts on fewer belong to a different set."""
    if batch.bad:
        lost = batch.bad[0]
        raise UserError(
            f"{lost.name} could be read for the clean accuracy and cannot be read now: {lost.reason}. "
            "Restore it and continue with --resume."
        )


def rules_of(attack: Attack) -> Callable[[nn.Module, Tensor], Threat] | None:
    """The function that gives the rules of an attack that has its own, or wraps one that has; else None."""
    if isinstance(attack, OwnRules):
        return attack.rules
    inner = getattr(attack, "attack", None)
    return None if inner is None else rules_of(inner)


def _member_stream(number: int) -> Callable[[SampleRNG], SampleRNG]:
    return lambda rng: rng.stream(MEMBER, number)


def _one_attack(
    context: RunContext,
    stage: str,
    attack: Attack,
    threat: Threat,
    indices: Tensor,
    stream: Callable[[SampleRNG], SampleRNG],
) -> list[BatchRecord]:
    """Attack batch by batch; every success is judged on the untouched model."""
    broken, own_rules = 0, rules_of(attack)

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = stream(SampleRNG.of_samples(context.seed, batch.indices, context.processes.device))
        model = context.model if context.compiled is None else context.compiled
        with context.arithmetic(), count_passes(model) as search:
            z, notes = run_attack(attack, model, batch.x, batch.y, rng)
        with context.arithmetic(), count_passes(context.model) as judging:
            rules = own_rules(context.model, batch.x) if own_rules else threat
            verdict = judge(context.model, rules, batch.x, z, batch.y)
            if context.save_examples is not None:
                notes |= context.save_examples(stage, number, batch, z, verdict)
        return {
            "index": batch.indices.cpu().numpy(),
            "held": verdict.held.cpu().numpy(),
            "void": verdict.void.cpu().numpy(),
            "gradients": np.asarray(search.gradients),
            "forwards": np.asarray(search.forwards + judging.forwards),
            **{f"{NOTE}{name}": values.cpu().numpy() for name, values in notes.items()},
        }

    def note(record: BatchRecord) -> str:
        nonlocal broken
        broken += int((~record["held"]).sum())
        return f"{broken} broken"

    return run_stage(context, stage, indices, work, note)
