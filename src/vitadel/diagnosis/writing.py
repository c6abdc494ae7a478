"""The page about the checks, written from their docstrings, so that docs and code cannot drift apart."""

from __future__ import annotations

from collections.abc import Sequence

from vitadel.diagnosis.broken_defenses import GALLERY, BrokenDefense
from vitadel.diagnosis.runner import CHECKS, Check

__all__ = ["checks_in_words", "gallery_in_words"]


def checks_in_words(checks: Sequence[Check] = CHECKS) -> str:
    """Every check in Markdown: when it is raised, why it matters, what to do."""
    return "\n\n".join(_in_words(check) for check in checks)


def _in_words(check: Check) -> str:
    told = check.explanation
    parts = [f"### {check.name}", f"**Raised if** {told.raised_if}", f"**Why it matters:** {told.why}"]
    return "\n\n".join([*parts, f"**What to do:** {told.what_to_do}"])


def gallery_in_words(gallery: Sequence[BrokenDefense] = GALLERY) -> str:
    """Every liar in a Markdown table, with what must see it."""
    rows = [f"| {each.name} | {each.about} | {each.patient} | {', '.join(each.seen_by)} |" for each in gallery]
    return "\n".join(["| liar | what it does | made of | must be seen by |", "|---|---|---|---|", *rows])
