"""Several runs on one page: side by side, image by image, and the most robust of them.

Pairing images makes small differences visible: images that both models get right, or neither, say nothing about which
is better, but widen unpaired intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitadel.quantities import interval_text, listed, p_text, percent
from vitadel.reporting.kind import Kind, Section, kind_of, name_damage
from vitadel.reporting.kinds.audit import accuracy_section
from vitadel.reporting.read_runs import Array, Run, aspects, differing_aspects, faced, run_labels, threat_text
from vitadel.statistics import difference_interval, holm, mcnemar


def overview(runs: Sequence[Run], pairs: Sequence[Pairing]) -> list[Section]:
    """Sections about several runs together; `pairs` are the `pairings` of the same runs."""
    found = [_comparison(runs), accuracy_section(runs)]
    found += [Section("The same images, one by one", block="pairs", content={"pairs": pairs})] if pairs else []
    kinds: dict[int, tuple[Kind, dict[str, Run]]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        kind = kind_of(run)
        kinds.setdefault(id(kind), (kind, {}))[1][label] = run
    for kind, same in kinds.values():
        if len(same) > 1:
            with name_damage(*same.values()):
                found.append(kind.compare(same))
    return [section for section in found if section is not None]


def _comparison(runs: Sequence[Run]) -> Section:
    """The runs in one table, with a warning where they may not be compared."""
    rows = [
        {
            "label": label,
            "place": place,
            "aspects": aspects(run),
            "odd": differing_aspects([runs[0], run]),
            "eps": run.results.get("threat", {}).get("eps", ""),
            "seed": run.results.get("seed", ""),
            "complete": run.complete,
            "clean": run.results.get("clean"),
            "worst": run.results.get("worst_case"),
        }
        for place, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True), start=1)
    ]
    differing = differing_aspects(runs)
    # Size and precision are mostly the same, and the table is wide without them.
    rare = {"selection", "size", "precision", "outputs"} - (set(differing) - {"selection"})
    columns = {name: name if name in ("n", "eps") else name.capitalize() for name in _ASPECTS if name not in rare}
    content = {"rows": rows, "differing": [_ASPECTS[name] for name in differing], "columns": columns}
    return Section("Side by side", block="comparison", content=content)


_ASPECTS = {
    "data": "data",
    "selection": "selection of images",
    "n": "number of images",
    "size": "size of attacked images",
    "precision": "precision",
    "norm": "norm",
    "eps": "eps",
    "attacks": "attacks",
    "outputs": "outputs that the model chooses from",
}
_SIGNIFICANT = 0.05


def headline(runs: Sequence[Run], pairs: Sequence[Pairing]) -> str:
    """Which model is most robust, by how much, in one to three sentences; '' without two runs of the same test.

    `pairs` are the `pairings` of the same runs.
    """
    named = [(run, label) for run, label in zip(runs, run_labels(runs), strict=True) if _judged(run)]
    together = max((_same_test(each, named) for each in named), key=len, default=[])
    if len(together) < 2:
        return ""
    order = sorted(together, key=lambda each: -float(each[0].results["worst_case"]["robust_accuracy"]))
    (best, first), (next_best, second) = order[:2]
    winners = [label for run, label in order if _held(run) == _held(best)]
    worst, names = best.results["worst_case"], [entry["name"] for entry in best.attacks if not entry.get("own_rules")]
    test = f"{listed(names)} with {threat_text(best)} on {worst['n']:,} images of {aspects(best)['data']}"
    among = "" if len(together) == len(runs) else f"Of the {len(together)} runs that took the same test, "
    if worst["held"] == 0:
        return f"{among or 'Of all runs, '}none is robust under {test}: 95 % interval {interval_text(worst['ci95'])}."
    share, next_share = (percent(run.results["worst_case"]["robust_accuracy"]) for run in (best, next_best))
    if len(winners) > 1:
        return f"{among}{listed(winners)} are equally robust: {share} under {test}."
    lead = f"{among}{first} is the most robust: {share} under {test}, before {second} with {next_share}."
    return lead + _by_how_much(pairs, first, second)


def _same_test(one: tuple[Run, str], named: Sequence[tuple[Run, str]]) -> list[tuple[Run, str]]:
    """The runs that took the same test as `one`; what an old run did not record counts as equal."""
    group = [one]
    for each in named:
        if each is not one and not differing_aspects([run for run, _ in (*group, each)]):
            group.append(each)
    return [each for each in named if each in group]


def _held(run: Run) -> int:
    return int(run.results["worst_case"]["held"])


def _by_how_much(pairs: Sequence[Pairing], first: str, second: str) -> str:
    pair = next((pair for pair in pairs if {pair.first, pair.second} == {first, second}), None)
    row = next((row for row in pair.rows if row.what == "worst case"), None) if pair else None
    if pair is None or row is None:
        return ""
    points = 100 if pair.first == first else -100
    low, high = sorted(points * end for end in row.ci95)
    verdict = "That is" if row.p_holm < _SIGNIFICANT else "Too close to call:"
    return (
        f" {verdict} {points * row.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, "
        f"p {p_text(row.p_holm)} by Holm over all comparisons)."
    )


def _judged(run: Run) -> bool:
    return run.complete and kind_of(run).one_budget and bool(run.results.get("worst_case")) and bool(run.attacks)


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
    p_holm: float = 1.0  # by Holm (1979), over all rows of all pairs


@dataclass(frozen=True)
class Pairing:
    """Two runs by their labels, and the rows that may be compared; `remark` says what may not, and why."""

    first: str
    second: str
    rows: tuple[PairRow, ...]
    remark: str = ""


def pairings(runs: Sequence[Run]) -> list[Pairing]:
    """Every two runs that have verdicts of single images, or will have, with what may be compared between them."""
    labeled = zip(runs, run_labels(runs), strict=True)
    able = [(run, label) for run, label in labeled if _clean_known(run) or _verdicts_to_come(run)]
    drafts = [
        Pairing(name, other_name, tuple(pair_rows(run, other)), remark=_remark(run, other))
        for (run, name), (other, other_name) in itertools.combinations(able, 2)
    ]
    adjusted = iter(holm([row.p_value for draft in drafts for row in draft.rows]))
    return [replace(draft, rows=tuple(replace(row, p_holm=next(adjusted)) for row in draft.rows)) for draft in drafts]


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
