"""Labels and class names, and which columns of a table hold images and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitadel.errors import UserError, nearest_names
from vitadel.runtime.safe_reading import read_text_file

IMAGE_NAMES = ("img", "image", "images", "picture", "jpg", "png")
MOST_CLASSES = 1_000_000
LABEL_NAMES = ("label", "labels", "fine_label", "target", "targets", "class", "category", "cls", "y")


def number_labels(raw: Sequence[int | str | None], names: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as int64 and the class names; -1 stands for a label that is missing or not among `names`.

    Integers, also as text, are class numbers. Otherwise labels are names, numbered by their position in `names` or,
    without `names`, in the order of their code points.
    """
    numbers = [_whole(label) for label in raw]
    if any(number is None and label is not None for number, label in zip(numbers, raw, strict=True)):
        names = tuple(names) if names else tuple(sorted({str(label) for label in raw if label is not None}))
        place = {name: number for number, name in enumerate(names)}
        numbers = [None if label is None else place.get(str(label)) for label in raw]
    labels = torch.tensor([-1 if number is None else number for number in numbers], dtype=torch.int64)
    return labels, tuple(names) if names else names_of_numbers(labels)


def names_of_numbers(labels: Tensor) -> tuple[str, ...]:
    """The names of classes that have only numbers, from 0 to the highest label."""
    highest = int(labels.max()) if len(labels) else -1
    if highest >= MOST_CLASSES:
        raise UserError(
            f"a label is {highest}; class numbers go from 0 to the number of classes - 1, and at most {MOST_CLASSES} "
            "classes are read. Labels that are identifiers or hashes must be numbered first"
        )
    return tuple(str(number) for number in range(highest + 1))


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read one class name per line."""
    text = read_text_file(path, "file of class names, one per line,")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names:
        raise UserError(f"'{path}' is empty; expected one class name per line")
    return names


def _whole(label: int | str | None) -> int | None:
    if isinstance(label, str):
        text = label.strip()
        label = int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
    return label if label is None or abs(label) < 2**63 else None


def pick_column(what: str, candidates: Sequence[str], usual: Sequence[str], named: str | None, where: str) -> str:
    """The column `named`, or the only candidate with a usual name, or the only candidate."""
    if named is not None:
        if named in candidates:
            return named
        raise UserError(
            f"{where} has no column '{named}' that could be the {what}; possible: {', '.join(candidates) or 'none'}"
            f"{nearest_names(named, candidates)}"
        )
    for choice in ([name for name in candidates if name.lower() in usual], candidates):
        if len(choice) == 1:
            return choice[0]
        if choice:
            raise UserError(
                f"{where}: several columns could be the {what}: {', '.join(choice)}; name it with ({what}=COLUMN)"
            )
    raise UserError(f"{where} has no column that could be the {what}")
