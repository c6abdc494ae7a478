"""The stages of a run: clean predictions, then one attack after another on the samples that are still robust.

A stage is a fixed list of whole batches. The batches are shared out among the processes, every finished batch is a
record in the cache, and no batch depends on which process computed it or when. So one process, two, and a run that was
killed and resumed give the same verdicts. The images of an audit are in `Blocks`, which no batch crosses: what happens
to a block depends on no other one, so shards of an audit need not know of each other.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.per_sample import run_attack
from vitadel.attacks.settings import part_inside
from vitadel.attacks.wrappers import MEMBER, Stage, Staged, StageResult, next_stage
from vitadel.backbones.classifier import check_logits, fastest_attention
from vitadel.data.batches import Batch, Preprocess, read_batches
from vitadel.errors import UserError
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import RESUMED, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import BatchRecord as BatchRecord
from vitadel.types import Attack, Ensemble, OwnRules, Source, Threat

if TYPE_CHECKING:
    from vitadel.evaluation.engine.expected_time import StageCosts

NOTE = "note:"
"""Prefix of the arrays of a batch record that hold an attack's notes about each sample."""

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

TOLERANCE = 1e-6
"""Allowance for float rounding in box and budget, in pixel units."""


class BatchCache(Protocol):
    def find(self, stage: str, number: int) -> BatchRecord | None: ...

    def save(self, stage: str, number: int, record: BatchRecord) -> None: ...


@dataclass(frozen=True)
class MemoryCache:
    """For Python callers without a run folder."""

    records: dict[tuple[str, int], BatchRecord] = field(default_factory=dict)

    def find(self, stage: str, number: int) -> BatchRecord | None:
        return self.records.get((stage, number))

    def save(self, stage: str, number: int, record: BatchRecord) -> None:
        self.records[stage, number] = record


@dataclass(frozen=True)
class Verdict:
    """`held`: the model still predicts the label. `void`: the proposal breaks the rules and does not count."""

    held: Tensor
    void: Tensor
    prediction: Tensor


def breaks_rules(threat: Threat, x: Tensor, z: Tensor) -> Tensor:
    """Which proposals are not finite, or leave the box or the budget."""
    flat = z.flatten(1)
    finite = flat.isfinite().all(1)
    in_box = ((flat >= -TOLERANCE) & (flat <= 1 + TOLERANCE)).all(1)
    in_budget = threat.size(z, x) <= threat.eps + TOLERANCE
    return ~(finite & in_box & in_budget)


@torch.no_grad()
def judge(model: nn.Module, threat: Threat, x: Tensor, z: Tensor, y: Tensor) -> Verdict:
    """An attack succeeds on a sample only if its proposal is finite, in the box, within budget and misclassified."""
    if z.shape != x.shape:
        raise ValueError(f"an attack must return the shape it was given: {tuple(x.shape)}, got {tuple(z.shape)}")
    void = breaks_rules(threat, x, z)
    logits = model(z.nan_to_num(0.0).clamp(0, 1))
    prediction = logits.argmax(1)
    answered = logits.isfinite().all(1)  # a model that outputs NaN is not robust
    return Verdict(held=(prediction == y) & answered | void, void=void, prediction=prediction)


@dataclass
class Cost:
    """`gradients` counts forward-and-backward pairs, `forwards` the passes without a backward; both in samples."""

    gradients: int = 0
    forwards: int = 0


@contextmanager
def count_passes(model: nn.Module) -> Iterator[Cost]:
    """Count the passes of `model` inside the block, by hooks that are removed afterwards."""
    cost = Cost()

    def count(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        samples = len(inputs[0]) if inputs else len(output)  # an instrumented model may return several rows for each
        cost.forwards += samples
        if output.requires_grad:
            seen = False  # several backwards may follow one forward, as in a Jacobian

            def backward_ran(grad: Tensor) -> None:
                nonlocal seen
                cost.gradients += samples
                cost.forwards -= 0 if seen else samples
                seen = True

            output.register_hook(backward_ran)

    handle = model.register_forward_hook(count)
    try:
        yield cost
    finally:
        handle.remove()


SaveExamples = Callable[[str, int, Batch, Tensor, Verdict], dict[str, Tensor]]
"""(stage, batch number, batch, proposals, verdict) -> notes about each sample."""


def check_any_readable(count: int) -> None:
    if count == 0:
        raise UserError("no sample could be read, so there is nothing to do. To see the reasons, leave out --skip-bad.")


def check_budget(norm: str, eps: float) -> None:
    """Refuse the likely typo of 1 for 1/255."""
    if norm == "linf" and eps == 1:
        raise UserError("eps 1 lets every pixel become anything: pixels are in [0, 1] here. Did you mean 1/255?")


_MOST_BLOCKS = 64


@dataclass(frozen=True)
class Blocks:
    """Images of an audit that share batches: their indices, sorted, and the number of the block of each."""

    index: Tensor
    number: Tensor
    batches: int  # of a full block

    @classmethod
    def of(cls, indices: Tensor, batch_size: int) -> Blocks:
        """At most 64 blocks of equal size; more would leave smaller batches of images that are still correct."""
        batches = max(1, math.ceil(len(indices) / (batch_size * _MOST_BLOCKS)))
        return cls(indices, torch.arange(len(indices)) // (batches * batch_size), batches)

    def __len__(self) -> int:
        return int(self.number.max()) + 1 if len(self.number) else 0

    def holding(self, indices: Tensor) -> Tensor:
        """The number of the block of each image."""
        return self.number[torch.searchsorted(self.index, indices)]


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
    workers: int = 0  # processes that read images; 0 for threads of this one
    show_progress: bool = False
    save_examples: SaveExamples | None = None
    compiled: nn.Module | None = None  # the same model, faster, for attacks that use outputs only
    expected: Mapping[str, float] = field(default_factory=dict)  # likely seconds of a stage, for its progress
    costs: StageCosts | None = None  # what to write the costs of stages to, in a trial
    blocks: Blocks | None = None  # of an audit
    of_shard: bool = False  # only the images of one shard are worked on

    def numbered_chunks(self, indices: Tensor) -> dict[int, list[int]]:
        """Batches of indices by number; the number of a batch does not depend on how many images other blocks have."""
        if self.blocks is None:
            return dict(enumerate(self.chunks(indices)))
        found: dict[int, list[int]] = {}
        block = self.blocks.holding(indices)
        for each in block.unique().tolist():
            first = each * self.blocks.batches
            found |= {first + place: chunk for place, chunk in enumerate(self.chunks(indices[block == each]))}
        return found

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
    holds: str = "",
) -> list[BatchRecord]:
    """Compute this process's missing batches, wait for the others, and return all records in order. `note` is shown
    beside the progress. A found record without what it `holds` (see `found_records`) is computed again."""
    chunks = context.numbered_chunks(indices)
    mine = [*chunks][context.processes.rank :: context.processes.count]
    todo = [k for k in mine if not _is_done(context.cache.find(stage, k), chunks[k], holds, context.classes)]
    total, saved = sum(len(chunks[k]) for k in mine), sum(len(chunks[k]) for k in mine if k not in set(todo))
    shown = context.show_progress and context.processes.is_main
    began = time.perf_counter()
    how: dict[str, Any] = {"skip_bad": context.skip_bad, "device": context.processes.device, "workers": context.workers}
    # Budgets as people write them: studies name their stages, and so the files of batches, by the exact number.
    title = re.sub(r"\b0\.[0-9]{6,}\b", lambda number: quantity_text(float(number[0])), stage)
    with progress(title, total, shown, context.expected.get(stage)) as meter:
        if saved:
            meter.advance(saved, RESUMED)
        stream = read_batches(context.source, (chunks[k] for k in todo), context.preprocess, **how)
        for k, batch in zip(todo, stream, strict=True):
            start = time.perf_counter()
            record = work(k, batch)
            record["chunk"] = np.asarray(chunks[k], dtype=np.int64)
            record["seconds"] = np.asarray(time.perf_counter() - start)
            context.cache.save(stage, k, record)
            meter.advance(len(chunks[k]), note(record))
    if context.costs is not None:
        context.costs.seconds[stage] = context.costs.seconds.get(stage, 0.0) + time.perf_counter() - began
    context.processes.wait()
    records = [context.cache.find(stage, k) for k in chunks]
    if any(record is None for record in records):
        raise UserError(
            f"batches of stage {stage!r} are missing in the run folder. With several machines, --out must be a folder "
            "that all of them share."
        )
    return [record for record in records if record is not None]


def running_share(word: str, count: Callable[[BatchRecord], tuple[float, int]]) -> Callable[[BatchRecord], str]:
    """A note for `run_stage`: what `count` gives, (part, whole), summed over the batches so far, in percent."""
    part, whole = 0.0, 0

    def note(record: BatchRecord) -> str:
        nonlocal part, whole
        more, of = count(record)
        part, whole = part + more, whole + of
        return f"{100 * part / max(whole, 1):.1f} % {word}"

    return note


def share_wrong(record: BatchRecord) -> tuple[float, int]:
    """Counts for `running_share` from a record of correct predictions."""
    return int((~record["right"]).sum()), record["right"].size


def _is_done(record: BatchRecord | None, chunk: list[int], holds: str, classes: int | None) -> bool:
    if record is None:
        return False
    from vitadel.evaluation.engine.found_records import is_sound  # few runs find any

    return is_sound(record, chunk, holds, classes)


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

    return run_stage(context, stage, indices, work, holds="predictions")


@dataclass(frozen=True)
class MemberResult:
    """What one attack did, or one member of an ensemble: verdicts, notes and costs, one record per batch.

    `spared` are the indices of samples that were still correct before it and that it did not attack.
    """

    name: str
    records: list[BatchRecord]
    spared: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def held(self) -> Tensor:
        """The indices of the samples that are still correct after it."""
        kept = [record["index"][record["held"]].astype(np.int64) for record in self.records]
        attacked = torch.from_numpy(np.concatenate(kept or [np.empty(0, np.int64)]))
        return torch.cat([attacked, self.spared]).sort().values if len(self.spared) else attacked

    @property
    def attacked(self) -> int:
        return sum(int(record["index"].size) for record in self.records)

    @property
    def broken(self) -> int:
        return sum(int((~record["held"]).sum()) for record in self.records)

    def notes(self) -> dict[str, np.ndarray]:
        """The attack's notes about all samples that it attacked."""
        names = [key for record in self.records[:1] for key in record if key.startswith(NOTE)]
        return {key.removeprefix(NOTE): np.concatenate([record[key] for record in self.records]) for key in names}

    def as_stage(self) -> StageResult:
        """The result as a staged ensemble sees it; its samples are indices."""
        index = np.concatenate([record["index"] for record in self.records] or [np.empty(0, np.int64)])
        held = np.concatenate([record["held"] for record in self.records] or [np.empty(0, bool)])
        info = {name: torch.from_numpy(values) for name, values in self.notes().items()}
        return StageResult(torch.from_numpy(index.astype(np.int64)), torch.from_numpy(~held), info)


def attack_stage(
    context: RunContext, stage: str, attack: Attack, threat: Threat, indices: Tensor, needs_known_family: bool = False
) -> list[MemberResult]:
    """Attack these samples; the members of an ensemble run one after another, each on what the earlier ones left."""
    if needs_known_family:
        context = replace(context, compiled=None)
    staged = _staged_inside(attack)
    if staged is not None:
        return _run_stages(context, stage, *staged, threat, indices)
    results: list[MemberResult] = []
    for title, name, member, stream in members_of(stage, attack):
        indices = results[-1].held if results else indices
        results.append(MemberResult(name, _one_attack(context, title, member, threat, indices, stream)))
    return results


Stream = Callable[[SampleRNG], SampleRNG]


def members_of(stage: str, attack: Attack) -> list[tuple[str, str, Attack, Stream]]:
    """The members of an ensemble: name of their stage, own name, attack, random stream; one if it is no ensemble.

    Of a staged ensemble the first, because the others depend on how that one goes.
    """
    staged = _staged_inside(attack)
    if staged is not None:
        first = _first_stage(*staged)
        return [(f"{stage} {first.name}", first.name, first.attack, first.own)]
    if not isinstance(attack, Ensemble):
        return [(stage, "", attack, lambda rng: rng)]
    members = enumerate(attack.members())
    return [(f"{stage} {name}", name, member, _member_stream(number)) for number, (name, member) in members]


def is_staged(attack: Attack) -> bool:
    """Whether the attack is, or wraps, an ensemble whose later stages depend on the results of all samples."""
    return _staged_inside(attack) is not None


def ordinary_form(attack: Attack) -> Attack:
    """The first attack of a staged ensemble, which runs on every sample; any other attack as it is."""
    staged = _staged_inside(attack)
    return attack if staged is None else _first_stage(*staged).attack


def _staged_inside(attack: Attack) -> tuple[Staged, Callable[[Attack], Attack]] | None:
    return part_inside(attack, Staged)  # type: ignore[type-abstract]


def _first_stage(ensemble: Staged, around: Callable[[Attack], Attack]) -> Stage:
    first = next(ensemble.stages(SampleRNG.of_samples(0, [0])))
    return replace(first, attack=around(first.attack))


def _run_stages(
    context: RunContext,
    stage: str,
    ensemble: Staged,
    around: Callable[[Attack], Attack],
    threat: Threat,
    indices: Tensor,
) -> list[MemberResult]:
    """Run the stages that the ensemble asks for; what it asks for follows from the records of all batches.

    A shard, which has not all of them, runs the first.
    """
    stages = ensemble.stages(SampleRNG.of_samples(context.seed, indices))
    results: list[MemberResult] = []
    while (step := next_stage(stages, results[-1].as_stage() if results else None)) is not None:
        chosen = indices[step.places]
        title = " ".join(filter(None, (stage, step.name, step.variant)))
        records = _one_attack(context, title, around(step.attack), threat, chosen, step.own)
        correct = results[-1].held if results else indices
        results.append(MemberResult(step.name, records, correct[~torch.isin(correct, chosen)]))
        if context.of_shard:
            break
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


def _member_stream(number: int) -> Stream:
    return lambda rng: rng.stream(MEMBER, number)


def _one_attack(
    context: RunContext,
    stage: str,
    attack: Attack,
    threat: Threat,
    indices: Tensor,
    stream: Stream,
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

    records = run_stage(context, stage, indices, work, note, "verdicts")
    if context.costs is not None:
        context.costs.add_attack(stage, attack, records)
    return records
