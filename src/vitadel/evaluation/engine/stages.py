"""The stages of an audit: clean predictions, then one attack after the other on the samples still standing.

A stage is a fixed list of whole batches. Batch k belongs to process k mod (number of processes), every finished batch
is a piece in the ledger, and nothing in a batch depends on who computed it or when: so one process, two, and a run
that was killed and resumed come to the same verdicts.
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
from vitadel.backbones.attention_hooks import fastest_attention
from vitadel.backbones.model_checks import check_logits
from vitadel.data.batches import Batch, read_batches
from vitadel.data.preprocess import Preprocess
from vitadel.errors import UserError
from vitadel.evaluation.engine.batch_cache import BatchCache, BatchRecord
from vitadel.evaluation.engine.judge import judge
from vitadel.evaluation.engine.pass_counter import metered
from vitadel.evaluation.engine.saved_examples import ExampleSaver
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import FOUND_AGAIN, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, OwnRules, Source, Threat

__all__ = [
    "NOTE",
    "PRECISIONS",
    "MemberResult",
    "RunContext",
    "attack_stage",
    "clean_stage",
    "refuse_lost_images",
    "rules_of",
    "run_stage",
]

NOTE = "note:"
"""How the arrays of a piece are called that hold an attack's notes."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RunContext:
    """What all stages share: the model, its data, how to cut them into batches, and who is at work."""

    model: nn.Module
    source: Source
    preprocess: Preprocess
    cache: BatchCache
    processes: Processes
    batch_size: int
    seed: int
    classes: int | None = None  # what the model's record announces
    precision: str = "fp32"
    skip_bad: bool | None = False
    shown: bool = False
    saver: ExampleSaver | None = None  # saves what fools the model
    compiled: nn.Module | None = None  # the same model, faster, for attacks that do not look inside

    def chunks(self, indices: Tensor) -> list[list[int]]:
        """Never an empty one, which some models cannot take."""
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
    verdicts: Callable[[BatchRecord], str],
) -> list[BatchRecord]:
    """Do this process's missing batches, wait for the others, and return all pieces in order."""
    chunks = context.chunks(indices)
    mine = range(context.processes.rank, len(chunks), context.processes.count)
    todo = [k for k in mine if not _is_done(context.cache.find(stage, k), chunks[k])]
    total, saved = sum(len(chunks[k]) for k in mine), sum(len(chunks[k]) for k in mine if k not in set(todo))
    with progress(stage, total, context.shown and context.processes.is_main) as meter:
        if saved:
            meter.advance(saved, FOUND_AGAIN)
        stream = read_batches(context.source, (chunks[k] for k in todo), context.preprocess, skip_bad=context.skip_bad)
        for k, batch in zip(todo, stream, strict=True):
            begun = time.perf_counter()
            piece = work(k, batch.to(context.processes.device))
            piece["chunk"] = np.asarray(chunks[k], dtype=np.int64)
            piece["seconds"] = np.asarray(time.perf_counter() - begun)
            context.cache.save(stage, k, piece)
            meter.advance(len(chunks[k]), verdicts(piece))
    context.processes.wait()
    pieces = [context.cache.find(stage, k) for k in range(len(chunks))]
    if any(piece is None for piece in pieces):
        raise UserError(
            f"pieces of stage {stage!r} are missing in the run folder. With several machines, --out must be a folder "
            "that all of them share."
        )
    return [piece for piece in pieces if piece is not None]


def _is_done(piece: BatchRecord | None, chunk: list[int]) -> bool:
    return piece is not None and "chunk" in piece and piece["chunk"].tolist() == chunk


def clean_stage(context: RunContext, indices: Tensor, stage: str = "clean") -> list[BatchRecord]:
    """Predictions on the images as they are."""

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

    return run_stage(context, stage, indices, work, lambda piece: "")


@dataclass(frozen=True)
class MemberResult:
    """What one attack did, or one member of an ensemble: verdicts, notes and costs in pieces."""

    name: str
    pieces: list[BatchRecord]

    @property
    def held(self) -> Tensor:
        """The samples that it left standing, by their indices."""
        kept = [piece["index"][piece["held"]].astype(np.int64) for piece in self.pieces]
        return torch.from_numpy(np.concatenate(kept or [np.empty(0, np.int64)]))


def attack_stage(
    context: RunContext, stage: str, attack: Attack, threat: Threat, standing: Tensor, needs_known_family: bool = False
) -> list[MemberResult]:
    """Attack the standing samples; of an ensemble, one member after the other, each on what all batches have left."""
    if needs_known_family:
        context = replace(context, compiled=None)
    if not isinstance(attack, WorstOf):
        return [MemberResult("", _one_attack(context, stage, attack, threat, standing, lambda rng: rng))]
    legs: list[MemberResult] = []
    for number, (name, member) in enumerate(attack.members()):
        standing = legs[-1].held if legs else standing
        pieces = _one_attack(context, f"{stage} {name}", member, threat, standing, _member_stream(number))
        legs.append(MemberResult(name, pieces))
    return legs


def refuse_lost_images(batch: Batch) -> None:
    """After the clean stage every image of a batch must be there: verdicts on fewer would be those of another set."""
    if batch.bad:
        lost = batch.bad[0]
        raise UserError(
            f"{lost.name} could be read for the clean accuracy and cannot be read now: {lost.reason}. "
            "Restore it and go on with --resume."
        )


def rules_of(attack: Attack) -> Callable[[nn.Module, Tensor], Threat] | None:
    """How to get the rules of an attack that has its own, or wraps one that has."""
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
    standing: Tensor,
    stream: Callable[[SampleRNG], SampleRNG],
) -> list[BatchRecord]:
    """Every success is judged on the untouched model."""
    broken, own_rules = 0, rules_of(attack)

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = stream(SampleRNG.of_samples(context.seed, batch.indices, context.processes.device))
        model = context.model if context.compiled is None else context.compiled
        with context.arithmetic(), metered(model) as search:
            z, notes = run_attack(attack, model, batch.x, batch.y, rng)
        with context.arithmetic(), metered(context.model) as judging:
            rules = own_rules(context.model, batch.x) if own_rules else threat
            verdict = judge(context.model, rules, batch.x, z, batch.y)
            if context.saver is not None:
                notes |= context.saver.keep(stage, number, batch, z, verdict)
        return {
            "index": batch.indices.cpu().numpy(),
            "held": verdict.held.cpu().numpy(),
            "void": verdict.void.cpu().numpy(),
            "gradients": np.asarray(search.gradients),
            "forwards": np.asarray(search.forwards + judging.forwards),
            **{f"{NOTE}{name}": values.cpu().numpy() for name, values in notes.items()},
        }

    def verdicts(piece: BatchRecord) -> str:
        nonlocal broken
        broken += int((~piece["held"]).sum())
        return f"{broken} broken"

    return run_stage(context, stage, standing, work, verdicts)
