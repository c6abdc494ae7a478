"""Two runs on the same images, one by one: who is right where, how large the difference is, and whether it is luck.

Pairing is what makes small differences visible: images that both get right, or neither, say nothing about which of two
models is better, and unpaired intervals are as wide as if they did.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from vitadel.reporting.read_runs import Array, Run, aspects, differing_aspects, faced, run_labels, threat_text

__all__ = [
    "PairRow",
    "Pairing",
    "difference_interval",
    "holm",
    "mcnemar",
    "p_text",
    "pair_rows",
    "pairings",
    "why_not_paired",
]

_ROUNDS = 5_000


@dataclass(frozen=True)
class PairRow:
    """Who holds which samples; first minus second with its 95 % interval; how likely so uneven a split is by chance."""

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
    """Two runs by their names, and the rows that may be compared; `remark` says what may not, and why."""

    first: str
    second: str
    rows: tuple[PairRow, ...]
    adjusted: tuple[float, ...] = ()  # p-values of the rows by Holm (1979), over all rows of all pairs
    remark: str = ""


def pairings(runs: Sequence[Run]) -> list[Pairing]:
    """Every two of the runs that have verdicts, or will have, with what may be compared between them."""
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
    """Nothing if the two saw the same images."""
    if not (_clean_known(first) and _clean_known(second)):
        return "one of them has no verdicts of single images yet"
    one, other = aspects(first)["data"], aspects(second)["data"]
    if one != other:
        return f"they saw different data ({one}, {other})"
    # Pixels are in no run folder: what bears one name, place and label is taken for one image.
    same = (np.array_equal(first.column(name), second.column(name)) for name in ("index", "label"))
    return "" if all(same) else "they saw different images of the same data"


_ANOTHER_TEST = {
    "size": "images of another size are another threat",
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
    for aspect, told in _ANOTHER_TEST.items():
        if aspect in differing:
            one, other = aspects(first)[aspect], aspects(second)[aspect]
            return f"Worst cases not compared: {told} ({one}, {other})."
    if not (first.one_budget and second.one_budget):
        return "Worst cases not compared: not all attacks had one budget; see the sections of the runs themselves."
    if faced(first) != faced(second):
        return "The two faced different attacks, so their worst cases are not the same test, and are not compared."
    return ""


def pair_rows(first: Run, second: Run) -> list[PairRow]:
    """Clean and, under one budget and the same attacks, worst case, sample by sample; nothing on different images."""
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


def difference_interval(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired shares, by a seeded bootstrap over images.

    Resampling images is drawing the numbers of the kinds of pairs. One image that only the first gets right and one
    that only the second does are added before: else two models that never differed would be called equal for sure.
    """
    if n == 0:
        return -1.0, 1.0
    total = n + 2
    shares = ((only_first + 1) / total, (only_second + 1) / total, (n - only_first - only_second) / total)
    drawn = np.random.default_rng(0).multinomial(total, shares, size=_ROUNDS)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / total, (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values that hold for all comparisons together (Holm 1979)."""
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def p_text(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact test of McNemar (1947): are discordant samples split like fair coin tosses?"""
    tosses, fewer = only_first + only_second, min(only_first, only_second)
    term = comb(tosses, fewer)
    tail = term
    for hits in range(fewer, 0, -1):  # C(n, k-1) from C(n, k): exact in integers, and quick for many samples
        term = term * hits // (tosses - hits + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << tosses))
