"""Batch records that a run finds in its folder: they may be from other machines, edited, or of another program."""

from __future__ import annotations

from collections.abc import Iterable

from vitadel.errors import UserError
from vitadel.runtime.run_folder import BatchRecord
from vitadel.runtime.safe_reading import parse_json

_OF_AN_ATTACK = ("chunk", "seconds", "index", "held", "void", "gradients", "forwards")  # besides notes about samples


def is_sound(record: BatchRecord, chunk: list[int], holds: str, classes: int | None) -> bool:
    """Whether the record is of the samples of this batch and has what it `holds` of them: "predictions" or "verdicts".

    Nothing else is checked. `classes` is the number of outputs by the model's record.
    """
    if "chunk" not in record or record["chunk"].tolist() != chunk:
        return False
    if holds == "predictions":
        return _has_predictions(record, chunk, classes)
    return _has_verdicts(record, chunk) if holds == "verdicts" else True


def _has_predictions(record: BatchRecord, chunk: list[int], classes: int | None) -> bool:
    try:
        bad = parse_json(str(record["bad"]), "the unreadable samples")
        unread = {entry["index"] for entry in bad if entry["name"] is not None and entry["reason"] is not None}
    except (UserError, KeyError, TypeError):
        return False
    read = [index for index in chunk if index not in unread]
    if not _has_timed(record, ("index", "label", "prediction"), (len(read),), "iu"):
        return False
    numbers = [int(number) for name in ("label", "prediction") for number in record[name]]
    highest = max(record["prediction"].tolist(), default=0)
    return (
        record["index"].tolist() == read
        and len(read) + len(bad) == len(chunk)
        and min(numbers, default=0) >= 0
        and (classes is None or highest < classes)
    )


def _has_verdicts(record: BatchRecord, chunk: list[int]) -> bool:
    notes = [record[name] for name in record if name not in _OF_AN_ATTACK]
    return (
        _has_timed(record, ["index"], (len(chunk),), "iu")
        and record["index"].tolist() == chunk
        and _has(record, ("held", "void"), (len(chunk),), "b")
        and _has(record, ("gradients", "forwards"), (), "iu")
        and all(each.shape[:1] == (len(chunk),) and each.dtype.kind in "biuf" for each in notes)
    )


def _has(record: BatchRecord, names: Iterable[str], shape: tuple[int, ...], kinds: str) -> bool:
    """Whether the record has arrays of these names, of this shape and one of numpy's kinds of numbers."""
    found = [record.get(name) for name in names]
    return all(each is not None and each.shape == shape and each.dtype.kind in kinds for each in found)


def _has_timed(record: BatchRecord, names: Iterable[str], shape: tuple[int, ...], kinds: str) -> bool:
    return _has(record, ["seconds"], (), "fiu") and _has(record, names, shape, kinds)
