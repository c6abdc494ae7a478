"""Which samples of a source are used: a class-balanced subset (`--limit`), without samples that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Source


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used, and why."""

    index: int
    name: str
    reason: str


def skip_advice(skip_bad: bool | None, words: str) -> str:
    """Advice to skip bad samples: `words` and the flag, or nothing if the caller has no such flag (None)."""
    return "" if skip_bad is None else f"{words} with --skip-bad"


def check_labels(
    source: Source, num_classes: int, *, skip_bad: bool | None = None, fixed: bool = False
) -> tuple[BadSample, ...]:
    """Samples whose label is not one of the model's classes: a user error, or with `skip_bad` the list to skip.

    Label -1 marks a sample whose label is missing or cannot be read. `fixed`: no flag can change the model's number of
    classes.
    """
    labels = source.labels()
    bad = ((labels < 0) | (labels >= num_classes)).nonzero()[:, 0].tolist()
    if skip_bad and len(bad) < len(labels):
        return tuple(BadSample(index, source.name(index), _fault(int(labels[index]), num_classes)) for index in bad)
    if not bad:
        return ()
    first = bad[0]
    setting = "" if fixed else f", or with --weights random set --num-classes {len(source.classes)}"
    advice = (
        f"the data has {len(source.classes)} classes and the model {num_classes}: take a model for this data{setting}"
        if len(source.classes) != num_classes
        else "correct the labels"
    )
    all_bad = len(bad) == len(labels)
    remedy = "" if all_bad else skip_advice(skip_bad, ", or skip and count such samples")
    raise UserError(
        f"sample {first} ({source.name(first)}): {_fault(int(labels[first]), num_classes)}. "
        f"This concerns {len(bad)} of {len(labels)} samples; {advice}{remedy}"
    )


def skipped(source: Source) -> tuple[str, ...]:
    """What was skipped when the source was opened with `skip_bad`, one sentence each."""
    return tuple(getattr(source, "skipped", ()))


def _fault(label: int, num_classes: int) -> str:
    if label == -1:
        return "has no label that can be read"
    return f"label {label} is outside 0..{num_classes - 1}"


def balanced_subset(labels: Tensor, limit: int | None, seed: int, indices: Tensor | None = None) -> Tensor:
    """Stable indices of `limit` samples, ascending; class counts differ by at most one, unless a class runs out.

    `labels` holds usable labels only; if samples were skipped, `indices` gives the stable index of each label (default:
    its position), so that the draw of the others does not change. The choice is nested: a larger limit keeps every
    sample of a smaller one.
    """
    index = torch.arange(len(labels)) if indices is None else indices.to(torch.int64)
    if limit is not None and limit < 1:
        raise UserError(f"the limit must be at least 1, got {limit}; leave it out to take all {len(labels)} samples")
    if limit is None or limit >= len(labels):
        return index.sort().values
    assert int(labels.min()) >= 0, "samples without a usable label must be skipped first"
    chance = SampleRNG.of_samples(seed, index).stream("subset").bits()
    order = chance.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by class, in random order within each

    names = (counts := labels.bincount()).nonzero()[:, 0]
    sizes = counts[names]
    start = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - start.repeat_interleave(
        sizes
    )  # the k-th sample of every class is taken in turn k
    priority = SampleRNG.of_samples(seed, names).stream("subset classes").bits().argsort(stable=True).argsort()
    by_priority = priority.repeat_interleave(sizes).argsort(stable=True)
    taken = by_priority[turn[by_priority].argsort(stable=True)][:limit]
    return index[order[taken]].sort().values


def check_same_classes(source: Source, training: Source, what: str) -> None:
    """Check that labels mean the same as in data.train; data sets that only number their classes are not checked."""
    theirs, ours = list(source.classes), list(training.classes)
    if len(theirs) != len(ours):
        raise UserError(f"{what} has {len(theirs)} classes and data.train {len(ours)}; they must be the same")
    if [str(number) for number in range(len(ours))] in (theirs, ours):
        return
    for number, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        if there != here:
            raise UserError(
                f"{what}: its class {number} is '{there}', that of data.train is '{here}'; labels would not mean the "
                "same"
            )


def usable_rows(source: Source, classes: int) -> Tensor:
    """The samples with a label of one of the classes."""
    labels = source.labels()
    return ((labels >= 0) & (labels < classes)).nonzero()[:, 0]


def split_rows(
    labels: Tensor, rows: Tensor, held_out: int, limit: int | None, seed: int, limit_seed: int
) -> tuple[Tensor, Tensor]:
    """Rows to train on, `limit` or all, and rows held out, which do not depend on `limit`; both class-balanced."""
    if held_out >= len(rows):
        raise UserError(f"data.held_out is {held_out}, but data.train has only {len(rows)} images; hold out fewer")
    aside = balanced_subset(labels[rows], held_out, seed + 1, rows)
    rest = rows[~torch.isin(rows, aside)]
    return balanced_subset(labels[rest], limit, limit_seed, rest), aside
