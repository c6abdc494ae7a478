"""Two runs compared on the same images: which images only one gets right, the difference, and its significance.

Pairing makes small differences visible: images that both models get right, or neither, say nothing about which is
better, but widen unpaired intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitadel.reporting.kind import kind_of
from vitadel.reporting.read_runs import Array, Run, aspects, differing_aspects, faced, run_labels, threat_text
from vitadel.statistics import difference_interval, holm, mcnemar

__all__ = [
    "PairRow",
    "Pairing",
    "pair_rows",
    "pairings",
    "why_not_paired",
]


@dataclass(frozen=True)
class PairRow:
    """Samples that both, one or neither run gets right; first minus second with its 95 % interval; p-value."""

    what: str
    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    ci95: tuple[float, float]
    p_value: float


@dataclass(frozen=True)
class Pairing:
    """Two runs by their labels, and the rows that may be compared; `remark` says what may not, and why."""

    first: str
    second: str
    rows: tuple[PairRow, ...]
    adjusted: tuple[float, ...] = ()  # p-values of the rows by Holm (1979), over all rows of all pairs
    remark: str = ""


def pairings(runs: Sequence[Run]) -> list[Pairing]:
    """Every two runs that have verdicts of single images, or will have, with what may be compared between them."""
    labelled = zip(runs, run_labels(runs), strict=True)
    able = [(run, label) for run, label in labelled if _clean_known(run) or _verdicts_to_come(run)]
    drafts = [
        Pairing(name, other_name, tuple(pair_rows(run, other)), remark=_remark(run, other))
        for (run, name), (other, other_name) in itertools.combinations(able, 2)
    ]
    adjusted = iter(holm([row.p_value for draft in drafts for row in draft.rows]))
    return [replace(draft, adjusted=tuple(itertools.islice(adjusted, len(draft.rows)))) for draft in drafts]


def _clean_known(run: Run) -> bool:
    return run.samples is not None and run.results.get("clean") is not None


def _verdicts_to_come(run: Run) -> bool:
    return not run.complete and "attacks" in run.command["settings"]


def why_not_paired(first: Run, second: Run) -> str:
    """The reason why two runs cannot be compared image by image; '' if they can."""
    if not (_clean_known(first) and _clean_known(second)):
        return "one of them has no verdicts of single images yet"
    one, other = aspects(first)["data"], aspects(second)["data"]
    if one != other:
        return f"they saw different data ({one}, {other})"
    # Run folders hold no pixels: the same data, index and label are taken for the same image.
    same = (np.array_equal(first.column(name), second.column(name)) for name in ("index", "label"))
    return "" if all(same) else "they saw different images of the same data"


_DIFFERENT_TEST = {
    "size": "images of a different size are a different threat",
    "precision": "attacks and verdicts were computed in different precisions",
}


def _remark(first: Run, second: Run) -> str:
    reason = why_not_paired(first, second)
    if reason:
        return f"Not compared: {reason}."
    if first.held() is None or second.held() is None:
        return ""
    if threat_text(first) != threat_text(second):
        return f"Worst cases not compared: the threats differ ({threat_text(first)}, {threat_text(second)})."
    differing = differing_aspects([first, second])
    for aspect, reason in _DIFFERENT_TEST.items():
        if aspect in differing:
            one, other = aspects(first)[aspect], aspects(second)[aspect]
            return f"Worst cases not compared: {reason} ({one}, {other})."
    if not all(kind_of(run).one_budget for run in (first, second)):
        return "Worst cases not compared: not all attacks had the same budget; see the sections of the runs."
    if faced(first) != faced(second):
        return "Worst cases not compared: the attacks differ, so they are not the same test."
    return ""


def pair_rows(first: Run, second: Run) -> list[PairRow]:
    """Clean and, where the attacks are the same, worst case, image by image; nothing on different images."""
    if why_not_paired(first, second):
        return []
    rows = [_pair_row("clean", first.column("clean_correct"), second.column("clean_correct"))]
    one, other = first.held(), second.held()
    if one is not None and other is not None and not _remark(first, second):
        rows.append(_pair_row("worst case", one, other))
    return rows


def _pair_row(what: str, one: Array, other: Array) -> PairRow:
    only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
    both, neither = int((one & other).sum()), int((~one & ~other).sum())
    interval = difference_interval(only_first, only_second, len(one))
    difference = (only_first - only_second) / max(len(one), 1)
    p_value = mcnemar(only_first, only_second)
    return PairRow(what, both, only_first, only_second, neither, difference, interval, p_value)
