"""Decide the contrasts of an experiment by its rule: paired over images within seeds, and over seeds.

Test images and seeds are crossed: all seeds are judged on the same images. The variance over images and that over seeds
are estimated separately, and their half widths added as squares, each with its own quantile. So the error is at most
that of the level whether images, seeds or both make results vary (`tests/reproduce/test_decisions.py` simulates it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitadel.papers.experiments import Contrast, Experiment
from vitadel.papers.paper_documents import Item
from vitadel.reproduce.measurements import Cell
from vitadel.statistics import bootstrap_mean, student_quantile

CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "undecided"
_ROUNDS = 10_000  # of the bootstrap: its tails are those of several comparisons

Cells = Mapping[tuple[str, str], Sequence[Cell]]
"""(row, column) -> the cells of all seeds."""


@dataclass(frozen=True)
class Decision:
    """A contrast as it was measured; `why` says what is missing if it could not be decided.

    `images` is the interval over images alone, `spread` the half width over seeds alone, `interval` has both.
    """

    verdict: str
    level: float
    difference: float | None = None
    seeds: tuple[float, ...] = ()
    n: int | None = None
    images: tuple[float, float] | None = None
    spread: float | None = None
    interval: tuple[float, float] | None = None
    why: str | None = None


def decide_all(item: Item, cells: Cells) -> dict[str, Any] | None:
    """The experiment of a table with its decisions, as results.json has it; None if the table is no experiment."""
    experiment = item.experiment
    if experiment is None:
        return None
    said = {"question": experiment.question, "design": experiment.design, "known": experiment.known}
    trained = {row.id for row in item.rows if row.has_seeds}
    found = []
    for contrast in experiment.contrasts:
        scale = 100.0 if _percent(item, contrast) else 1.0
        decision = decide(experiment, contrast, cells, trained, scale)
        found.append({**contrast.model_dump(mode="json"), **asdict(decision)})
    return {**said, "rule": experiment.rule, "contrasts": found}


def _percent(item: Item, contrast: Contrast) -> bool:
    return item.column(contrast.cells("plus")[0][1]).percent


def decide(experiment: Experiment, contrast: Contrast, cells: Cells, trained: set[str], scale: float = 1.0) -> Decision:
    """Apply the rule. Rows that are not `trained` here have one cell, for all seeds of the others."""
    level = experiment.level(contrast)
    sides = [contrast.cells("plus"), contrast.cells("minus")]
    missing = [" of ".join(reversed(cell)) for side in sides for cell in side if not cells.get(cell)]
    if missing:
        return Decision(OPEN, level, why=f"not measured: {', '.join(missing)}")
    known = [cells[cell] for side in sides for cell in side]
    if reason := _not_paired(known):
        return Decision(OPEN, level, why=reason)
    count = max(len(each) for each in known)
    for side in sides:
        for cell in side:
            if len(cells[cell]) < count and not (len(cells[cell]) == 1 and cell[0] not in trained):
                return Decision(OPEN, level, why=f"{' of '.join(reversed(cell))} has fewer seeds than other cells")
    plus, minus = (np.mean([_by_seed(cells[cell], count) for cell in side], axis=0) for side in sides)
    return _decision(scale * (plus - minus), level, contrast.worth)


def _not_paired(cells: Sequence[Sequence[Cell]]) -> str | None:
    """Why cells cannot be compared image by image, if so."""
    flat = [each for cell in cells for each in cell]
    indices = [each.index for each in flat if each.images is not None and each.index is not None]
    if len(indices) < len(flat):
        return "a column has no number for each image"
    if not all(np.array_equal(each, indices[0]) for each in indices):
        return "cells were measured on different images"
    return None


def _by_seed(cell: Sequence[Cell], count: int) -> NDArray[np.float64]:
    """(seeds, images)"""
    rows = [each.images for each in cell if each.images is not None]
    return np.stack(rows * count if len(rows) == 1 else rows)


def _decision(differences: NDArray[np.float64], level: float, worth: float) -> Decision:
    """The rule, for the differences (seeds, images)."""
    count, n = differences.shape
    by_seed = differences.mean(axis=1)
    mean = float(by_seed.mean())
    low, high = bootstrap_mean(differences.mean(axis=0), level=level, rounds=_ROUNDS)
    seeds, images = tuple(map(float, by_seed)), (low, high)
    if count < 2:
        return Decision(OPEN, level, mean, seeds, n, images, why="one seed says nothing about another")
    deviation = float(by_seed.std(ddof=1)) / math.sqrt(count)
    spread = student_quantile((1 + level) / 2, count - 1) * deviation
    interval = mean - math.hypot(mean - low, spread), mean + math.hypot(high - mean, spread)
    verdict = OPEN
    if interval[0] > 0:
        verdict = CONFIRMED
    elif interval[1] < worth:
        verdict = REFUTED
    return Decision(verdict, level, mean, seeds, n, images, spread, interval)
