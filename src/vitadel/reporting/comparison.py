"""Several runs on one page: side by side in a table and a figure, image by image, and the most robust of them."""

from __future__ import annotations

from collections.abc import Sequence

from vitadel.reporting.audit_figures import draw_accuracies
from vitadel.reporting.kind import Kind, Section, kind_of, name_damage
from vitadel.reporting.pairs import Pairing, PairRow
from vitadel.reporting.read_runs import Run, aspects, differing_aspects, run_labels, threat_text
from vitadel.reporting.text import interval_text, listed, p_text, percent

__all__ = ["headline", "overview"]


def overview(runs: Sequence[Run], pairs: Sequence[Pairing]) -> list[Section]:
    """Sections about all runs together; `pairs` are the `pairings` of the same runs."""
    found = [_comparison(runs) if len(runs) > 1 else None, _accuracies(runs)]
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
    rare = {"selection", "size", "precision"} - (set(differing) - {"selection"})
    columns = {name: _HEADINGS.get(name, name) for name in _ASPECTS if name not in rare}
    content = {"rows": rows, "differing": [_ASPECTS[name] for name in differing], "columns": columns}
    return Section("Side by side", block="comparison", content=content)


_HEADINGS = {
    "data": "Data",
    "size": "Size",
    "precision": "Precision",
    "norm": "Norm",
    "attacks": "Attacks",
}


def _accuracies(runs: Sequence[Run]) -> Section | None:
    shown = [run for run in runs if kind_of(run).one_budget]
    # For one run without attacks the gauge above says it all.
    if not any(run.attacks if len(runs) == 1 else run.results.get("clean") or run.attacks for run in shown):
        return None
    others = sorted({entry["name"] for run in shown for entry in run.attacks if entry.get("own_rules")})
    caption = _ACCURACIES + (
        f" Different threat model, not part of the worst case: {listed(others)}." if others else ""
    )
    return Section("Accuracy, clean and under attack", lambda: draw_accuracies(shown), caption)


_ACCURACIES = (
    "Bars are shares of all images, lines their 95 % intervals (Wilson 1927). The worst case counts an image only if "
    "it is classified correctly when clean and after every attack."
)


_ASPECTS = {
    "data": "data",
    "selection": "selection of images",
    "n": "number of images",
    "size": "size of attacked images",
    "precision": "precision",
    "norm": "norm",
    "eps": "eps",
    "attacks": "attacks",
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
    row, p_of_all, turned = _between(pairs, first, second)
    if row is None:
        return ""
    low, high = sorted(100 * turned * end for end in row.ci95)
    verdict = "That is" if p_of_all < _SIGNIFICANT else "Too close to call:"
    return (
        f" {verdict} {100 * turned * row.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, "
        f"p {p_text(p_of_all)} by Holm over all comparisons)."
    )


def _judged(run: Run) -> bool:
    return run.complete and kind_of(run).one_budget and bool(run.results.get("worst_case")) and bool(run.attacks)


def _between(pairs: Sequence[Pairing], first: str, second: str) -> tuple[PairRow | None, float, int]:
    """The paired worst cases of two runs, p by Holm, and -1 if they were compared the other way round."""
    for pair in pairs:
        if {pair.first, pair.second} == {first, second}:
            for row, p_of_all in zip(pair.rows, pair.adjusted, strict=True):
                if row.what == "worst case":
                    return row, p_of_all, 1 if pair.first == first else -1
    return None, 1.0, 1
