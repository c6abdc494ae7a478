"""Which column of a table holds the images and which the labels."""

from __future__ import annotations

from collections.abc import Sequence

from vitadel.errors import UserError, nearest_names

__all__ = ["IMAGE_NAMES", "LABEL_NAMES", "pick_column"]

IMAGE_NAMES = ("img", "image", "images", "picture", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "target", "targets", "class", "category", "cls", "y")


def pick_column(what: str, candidates: Sequence[str], usual: Sequence[str], named: str | None, where: str) -> str:
    """The column asked for, or the only candidate with a usual name, or the only candidate."""
    listed = ", ".join(candidates) or "none"
    how = f"name it with ({what}=COLUMN)"
    if named is not None:
        if named in candidates:
            return named
        raise UserError(
            f"{where} has no column '{named}' that could be the {what}; possible: {listed}"
            f"{nearest_names(named, candidates)}"
        )
    for choice in ([name for name in candidates if name.lower() in usual], list(candidates)):
        if len(choice) == 1:
            return choice[0]
        if len(choice) > 1:
            raise UserError(f"{where}: several columns could be the {what}: {', '.join(choice)}; {how}")
    raise UserError(f"{where} has no column that could be the {what}")
