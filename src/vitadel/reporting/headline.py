"""The verdict over several runs: which model withstands most, if they took the same test, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from vitadel.reporting.pairs import Pairing, PairRow, p_text
from vitadel.reporting.read_runs import (
    Run,
    aspects,
    differing_aspects,
    interval_text,
    listed,
    percent,
    run_labels,
    threat_text,
)

__all__ = ["ASPECTS", "headline"]

ASPECTS = {
    "data": "data",
    "selection": "selection of images",
    "n": "number of images",
    "size": "size of attacked images",
    "precision": "precision",
    "norm": "norm",
    "eps": "eps",
    "attacks": "attacks",
}
"""How to say in what runs differ."""

_CLEAR = 0.05


def headline(runs: Sequence[Run], pairs: Sequence[Pairing]) -> str:
    """One to three sentences; nothing where no two runs have a finished worst case in the same test.

    `pairs` are what `pairings` makes of the same runs.
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
        return f"{among or 'Of all runs, '}none withstands {test}: 95 % interval {interval_text(worst['ci95'])}."
    share, next_share = (percent(run.results["worst_case"]["robust_accuracy"]) for run in (best, next_best))
    if len(winners) > 1:
        return f"{among}{listed(winners)} withstand most, and as much as each other: {share} under {test}."
    told = f"{among}{first} withstands most: {share} under {test}, before {second} with {next_share}."
    return told + _by_how_much(pairs, first, second)


def _same_test(one: tuple[Run, str], named: Sequence[tuple[Run, str]]) -> list[tuple[Run, str]]:
    """With `one`, and each with every other: what an old run does not tell may be anything, but not two things."""
    group = [one]
    for each in named:
        if each is not one and not differing_aspects([run for run, _ in (*group, each)]):
            group.append(each)
    return [each for each in named if each in group]


def _held(run: Run) -> int:
    return int(run.results["worst_case"]["held"])


def _by_how_much(pairs: Sequence[Pairing], first: str, second: str) -> str:
    row, p_of_all, turned = _between(pairs, first, second)
    if row is None:
        return ""
    low, high = sorted(100 * turned * end for end in row.ci95)
    verdict = "That is" if p_of_all < _CLEAR else "Too close to call:"
    return (
        f" {verdict} {100 * turned * row.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, "
        f"p {p_text(p_of_all)} by Holm over all comparisons)."
    )


def _judged(run: Run) -> bool:
    return run.complete and run.one_budget and bool(run.results.get("worst_case")) and bool(run.attacks)


def _between(pairs: Sequence[Pairing], first: str, second: str) -> tuple[PairRow | None, float, int]:
    """The paired worst cases of two runs, p by Holm, and -1 if they were compared the other way round."""
    for pair in pairs:
        if {pair.first, pair.second} == {first, second}:
            for row, p_of_all in zip(pair.rows, pair.adjusted, strict=True):
                if row.what == "worst case":
                    return row, p_of_all, 1 if pair.first == first else -1
    return None, 1.0, 1
