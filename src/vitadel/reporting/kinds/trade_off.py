"""The trade-off between accuracy and robustness for people: figure, tables, and what lies above what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.pairs import mcnemar
from vitadel.reporting.read_runs import Array, Run, interval_text, percent

__all__ = ["draw_trade_off", "show_trade_off", "trade_off_remarks", "trade_off_sentence", "trade_off_tables"]

_KINDS = {
    "tora": ("worst", "o", "TORA"),
    "knob": ("worst", ".", "between two fusions"),
    "adapterfusion": ("attack", "s", "AdapterFusion"),
    "single": ("clean", "^", "one adapter"),
    "head": ("ink", "v", "heads only"),
    "model": ("muted", "D", "other model"),
}
_ACROSS = 3  # panels beside each other
_SURE = 0.05


def draw_trade_off(run: Run) -> Picture | None:
    """Clean accuracy against the worst case, a panel per budget, with 95 % intervals both ways; None for other runs."""
    told = _told(run)
    if told is None:
        return None
    budgets = told["budgets"]
    across = min(len(budgets), _ACROSS)
    down = math.ceil(len(budgets) / across)
    with our_style():
        figure = blank(40 + 280 * down)
        grid = figure.add_gridspec(down, across, left=0.08, right=0.98, top=0.96, bottom=0.2 / down, wspace=0.25)
        for place, budget in enumerate(budgets):
            axes = figure.add_subplot(grid[place])
            for kind, entries in _by_kind(told):
                _draw_series(axes, kind, entries, place)
            axes.set(xlabel="clean accuracy, %", ylabel=f"worst case at {budget['eps_text']}, %")
            plain_axes(axes)
        handles, names = figure.axes[0].get_legend_handles_labels()
        style = {"frameon": False, "fontsize": 9, "labelcolor": COLOURS["muted"]}
        figure.legend(handles, names, loc="lower center", ncols=len(names), **style)
    return Picture("trade-off", figure, f"Clean against robust accuracy. {trade_off_sentence(run.results)}")


def _draw_series(axes: Any, kind: str, entries: Sequence[Mapping[str, Any]], place: int) -> None:
    color, marker, label = _KINDS[kind]
    clean = [entry["clean"] for entry in entries]
    worst = [entry["worst_case"][place] for entry in entries]
    xs = [100 * each["accuracy"] for each in clean]
    ys = [100 * each["robust_accuracy"] for each in worst]
    ordered = kind != "model" and len(entries) > 1
    axes.errorbar(
        xs,
        ys,
        xerr=_reach(clean, "accuracy"),
        yerr=_reach(worst, "robust_accuracy"),
        color=COLOURS[color],
        marker=marker,
        markersize=5,
        linestyle={"knob": ":"}.get(kind, "-") if ordered else "",
        linewidth=1.3,
        elinewidth=0.6 if kind != "knob" else 0,
        capsize=2 if kind != "knob" else 0,
        label=label,
    )
    for entry, x, y in zip(entries, xs, ys, strict=True):
        if entry["lambda"] is not None:
            style = {"color": COLOURS["muted"], "fontsize": 8}
            axes.annotate(f"{entry['lambda']:g}", (x, y), (4, 4), textcoords="offset points", **style)


def _reach(entries: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """How far the intervals reach below and above their values, in percent."""
    low = [max(0.0, 100 * (entry[name] - entry["ci95"][0])) for entry in entries]
    high = [max(0.0, 100 * (entry["ci95"][1] - entry[name])) for entry in entries]
    return [low, high]


def trade_off_tables(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The deployed output under all attacks, then every head under RVT's protocol."""
    budgets = [f"worst case, {budget['eps_text']}" for budget in told["budgets"]]
    deployed = [
        [entry["name"], _kind_text(entry), _share(entry["clean"], "accuracy")]
        + [_share(each, "robust_accuracy") for each in entry["worst_case"]]
        for entry in told["contenders"]
    ]
    rvt = [
        [entry["name"], head, _share(seen["clean"], "accuracy")]
        + [_share(each, "robust_accuracy") for each in seen["attacks"]]
        for entry in told["contenders"]
        for head, seen in entry["rvt"].items()
    ]
    protocol = [f"{name}, {told['rvt']['eps_text']}" for name in told["rvt"]["attacks"]]
    return [
        {
            "caption": "The joint output, which is deployed. A worst case counts what holds against all attacks within "
            "the budget, those aimed at one head among them.",
            "headings": ["model", "what", "clean", *budgets],
            "rows": deployed,
        },
        {
            "caption": "Every output by itself under RVT's protocol, each attack alone: weak attacks, for comparison "
            "with published tables only.",
            "headings": ["model", "output", "clean", *protocol],
            "rows": rvt,
        },
    ]


def show_trade_off(run: Run) -> None:
    """The tables in the terminal, then what lies above what."""
    console, told, results = Console(), _told(run), run.results
    if told is None:
        return
    console.print(f"{escape(results['data']['spec'])}: n = {results['data']['n']}, seed {results['seed']}, Linf")
    for each in trade_off_tables(told):
        table = Table(*each["headings"], title=each["caption"], title_justify="left")
        for row in each["rows"]:
            table.add_row(*map(escape, row))
        console.print(table)
    for remark in trade_off_remarks(run):
        console.print(f"[dim]{escape(remark)}[/]")


def trade_off_sentence(results: Mapping[str, Any]) -> str:
    """Every model in words: clean, and the worst case at each budget."""
    told, n = results["trade_off"], results["data"]["n"]
    parts = [
        f"{entry['name']}: clean {percent(entry['clean']['accuracy'])}, "
        + ", ".join(f"{percent(each['robust_accuracy'])} at {each['eps_text']}" for each in entry["worst_case"])
        for entry in told["contenders"]
    ]
    return f"On {n:,} images, {'; '.join(parts)}."


@dataclass(frozen=True)
class _Point:
    """A contender at one budget: which images it gets right when clean, and which hold."""

    entry: Mapping[str, Any]
    clean: Array
    held: Array

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    def above(self, other: _Point) -> bool:
        """At least as good both ways, and better in one."""
        mine, theirs = ((int(each.clean.sum()), int(each.held.sum())) for each in (self, other))
        return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]


def trade_off_remarks(run: Run) -> list[str]:
    """Whether larger lambdas hold more, and what lies above what: image by image, at each budget."""
    told = _told(run)
    if told is None or run.samples is None:
        return []
    remarks: list[str] = []
    for budget in told["budgets"]:
        points = [_point(run, entry, budget["eps_text"]) for entry in told["contenders"]]
        remarks += _about_lambdas(points, budget["eps_text"])
        remarks += _about_baselines(points, budget["eps_text"])
    if remarks:
        remarks.append(
            "p is McNemar's exact two-sided one on the same images, not corrected for the number of comparisons. Each "
            "model was trained once, so that what another seed would change is not in it."
        )
    return remarks


def _point(run: Run, entry: Mapping[str, Any], budget: str) -> _Point:
    name = entry["name"]
    return _Point(entry, run.column(f"correct:{name}"), run.column(f"worst:{name}: {budget}"))


def _about_lambdas(points: Sequence[_Point], budget: str) -> Iterator[str]:
    for kind in _KINDS:
        series = [each for each in points if each.entry["kind"] == kind and each.entry["lambda"] is not None]
        series.sort(key=lambda each: float(each.entry["lambda"]))
        for small, large in itertools.pairwise(series):
            if small.entry["lambda"] == large.entry["lambda"]:
                continue
            yield (
                f"At {budget}, {_KINDS[kind][2]}, lambda {small.entry['lambda']:g} to {large.entry['lambda']:g}: worst "
                f"case {_change(small.held, large.held)}, clean {_change(small.clean, large.clean)}."
            )


def _about_baselines(points: Sequence[_Point], budget: str) -> Iterator[str]:
    ours = [each for each in points if each.entry["kind"] == "tora" and each.entry["knob"] is None]
    for baseline in (each for each in points if each.entry["kind"] != "tora" and ours):
        above = [each for each in ours if each.above(baseline)]
        below = [each for each in ours if baseline.above(each)]
        for point, word in (*((each, "above") for each in above), *((each, "below") for each in below)):
            sure = "" if _surely_apart(baseline, point) else ", by less than these images can show"
            yield (
                f"At {budget}, {point.name} lies {word} {baseline.name}{sure}: worst case "
                f"{_change(baseline.held, point.held)}, clean {_change(baseline.clean, point.clean)}."
            )
        if not above and not below:
            yield f"At {budget}, no point of TORA lies above {baseline.name} or below it."


def _change(before: Array, after: Array) -> str:
    return f"{percent(float(before.mean()))} to {percent(float(after.mean()))} (p = {_p(before, after):.2g})"


def _p(one: Array, other: Array) -> float:
    return mcnemar(int((one & ~other).sum()), int((other & ~one).sum()))


def _surely_apart(one: _Point, other: _Point) -> bool:
    return min(_p(one.clean, other.clean), _p(one.held, other.held)) < _SURE


def _told(run: Run) -> dict[str, Any] | None:
    told = run.results.get("trade_off")
    return told if isinstance(told, dict) and run.complete else None


def _by_kind(told: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The points of each kind, in the order of their lambdas, or of their places between two fusions."""
    found = []
    for kind in _KINDS:
        entries = [each for each in told["contenders"] if ("knob" if each["knob"] else each["kind"]) == kind]
        if entries:
            found.append((kind, sorted(entries, key=_place)))
    return found


def _place(entry: Mapping[str, Any]) -> float:
    if entry["knob"]:
        return float(entry["knob"]["at"])
    return -1.0 if entry["lambda"] is None else float(entry["lambda"])


def _kind_text(entry: Mapping[str, Any]) -> str:
    if entry["knob"]:
        return "between two fusions"
    lean = "" if entry["lambda"] is None else f", lambda {entry['lambda']:g}"
    return f"{_KINDS[entry['kind']][2]}{lean}"


def _share(entry: Mapping[str, Any], name: str) -> str:
    return f"{percent(entry[name])} ({interval_text(entry['ci95'])})"
