"""Samples that cannot be used: what they are called, and labels that do not fit the model."""

from __future__ import annotations

from dataclasses import dataclass

from vitadel.errors import UserError
from vitadel.types import Source

__all__ = ["BadSample", "by_skipping", "check_labels", "left_out"]


@dataclass(frozen=True)
class BadSample:
    """A sample that was left out, or would have to be."""

    index: int
    name: str
    reason: str


def by_skipping(skip_bad: bool | None, words: str) -> str:
    """What else can be done about bad samples: `words` and the flag, unless the caller (None) has no such flag."""
    return "" if skip_bad is None else f"{words} with --skip-bad"


def check_labels(
    source: Source, num_classes: int, *, skip_bad: bool | None = None, fixed: bool = False
) -> tuple[BadSample, ...]:
    """The samples whose label is not one of the model's classes: a mistake, or with `skip_bad` a list to leave out.

    Label -1 marks a sample whose label is missing or cannot be read. `fixed` says that no flag gives the model another
    number of classes.
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
        else "put the labels right"
    )
    all_bad = len(bad) == len(labels)
    remedy = "" if all_bad else by_skipping(skip_bad, ", or leave such samples out, counted,")
    raise UserError(
        f"sample {first} ({source.name(first)}): {_fault(int(labels[first]), num_classes)}. "
        f"This concerns {len(bad)} of {len(labels)} samples; {advice}{remedy}"
    )


def left_out(source: Source) -> tuple[str, ...]:
    """What opening the source with `skip_bad` had to do without, one sentence each."""
    return tuple(getattr(source, "left_out", ()))


def _fault(label: int, num_classes: int) -> str:
    if label == -1:
        return "has no label that can be read"
    return f"label {label} is outside 0..{num_classes - 1}"
