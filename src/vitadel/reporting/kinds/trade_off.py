"""Trade-offs between accuracy and robustness: every model as a point, what lies above what, and maps of adapters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitadel.errors import UserError
from vitadel.quantities import percent
from vitadel.reporting.figures import (
    COLORS,
    Picture,
    Strip,
    add_legend,
    interval_reach,
    new_figure,
    strip_figure,
    style_axes,
)
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Array, Run, read_arrays
from vitadel.reporting.tables import Cell, Column, Table, mean_cells, mean_columns, share_cells, share_columns
from vitadel.statistics import mcnemar

_SERIES = {
    "tora": ("worst", "o", "TORA"),
    "knob": ("worst", ".", "between two fusions"),
    "adapterfusion": ("attack", "s", "AdapterFusion"),
    "single": ("clean", "^", "one adapter"),
    "head": ("ink", "v", "heads only"),
    "model": ("muted", "D", "other model"),
}
_ACROSS = 3  # panels beside each other
_SIGNIFICANT = 0.05


def _sections(run: Run) -> list[Section]:
    found = run.results["trade_off"]
    own = Section(
        "Trade-off of accuracy and robustness",
        lambda: draw_trade_off(run),
        "Numbers are lambdas, bars 95 % intervals both ways. Up and to the right is better.",
        trade_off_tables(found),
        trade_off_remarks(run),
        file="trade-off-of-accuracy-and-robustness",
    )
    if not found.get("maps"):
        return [own]
    maps = Section(
        "Maps of the adapters",
        lambda: draw_maps(run),
        "The accuracy adapter's share of what each patch contributes to the fusion, the mean over all queries.",
        [map_table(found["maps"])],
        [_MAPS_REMARK],
        file="maps-of-the-adapters",
    )
    return [own, maps]


def draw_trade_off(run: Run) -> Picture:
    """Clean accuracy against the worst case, a panel per budget, with 95 % intervals both ways."""
    found = run.results["trade_off"]
    budgets = found["budgets"]
    across = min(len(budgets), _ACROSS)
    down = math.ceil(len(budgets) / across)
    with new_figure(40 + 280 * down) as figure:
        grid = figure.add_gridspec(down, across, left=0.08, right=0.98, top=0.96, bottom=0.2 / down, wspace=0.25)
        for place, budget in enumerate(budgets):
            axes = figure.add_subplot(grid[place])
            for kind, entries in _by_kind(found):
                _draw_series(axes, kind, entries, place)
            axes.set(xlabel="clean accuracy, %", ylabel=f"worst case at {budget['eps_text']}, %")
            style_axes(axes)
        handles, names = figure.axes[0].get_legend_handles_labels()
        add_legend(figure, handles, names, loc="lower center", ncols=len(names))
    return Picture("trade-off", figure, f"Clean against robust accuracy. {_sentence(run)}")


def _draw_series(axes: Any, kind: str, entries: Sequence[Mapping[str, Any]], place: int) -> None:
    color, marker, label = _SERIES[kind]
    clean = [entry["clean"] for entry in entries]
    worst = [entry["worst_case"][place] for entry in entries]
    xs = [100 * each["accuracy"] for each in clean]
    ys = [100 * each["robust_accuracy"] for each in worst]
    ordered = kind != "model" and len(entries) > 1
    axes.errorbar(
        xs,
        ys,
        xerr=interval_reach(clean, "accuracy"),
        yerr=interval_reach(worst, "robust_accuracy"),
        color=COLORS[color],
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
            style = {"color": COLORS["muted"], "fontsize": 8}
            axes.annotate(f"{entry['lambda']:g}", (x, y), (4, 4), textcoords="offset points", **style)


def trade_off_tables(found: Mapping[str, Any]) -> list[Table]:
    """The deployed output under all attacks, then every head under RVT's protocol."""
    deployed: list[tuple[Cell, ...]] = []
    heads: list[tuple[Cell, ...]] = []
    for entry in found["contenders"]:
        name = entry["name"]
        deployed.append((name, _kind_text(entry), *_shares(entry["clean"], entry["worst_case"])))
        heads += [(name, head, *_shares(seen["clean"], seen["attacks"])) for head, seen in entry["rvt"].items()]
    budgets = [f"worst case, {budget['eps_text']}" for budget in found["budgets"]]
    protocol = [f"{name}, {found['rvt']['eps_text']}" for name in found["rvt"]["attacks"]]
    return [
        Table(
            "The joint output, which is deployed. A worst case counts images that are correct after all attacks within "
            "the budget, including those aimed at one head.",
            _columns("what", budgets),
            tuple(deployed),
        ),
        Table(
            "Every output by itself under RVT's protocol, each attack alone: weak attacks, for comparison with "
            "published tables only.",
            _columns("output", protocol),
            tuple(heads),
        ),
    ]


def _columns(second: str, attacks: Sequence[str]) -> tuple[Column, ...]:
    shares = (column for name in ("clean", *attacks) for column in share_columns(name))
    return (Column("model"), Column(second), *shares)


def _shares(clean: Mapping[str, Any], attacked: Sequence[Mapping[str, Any]]) -> tuple[Cell, ...]:
    cells = [share_cells(clean, "accuracy"), *(share_cells(entry, "robust_accuracy") for entry in attacked)]
    return tuple(itertools.chain(*cells))


def _sentence(run: Run) -> str:
    """Every model: clean, and the worst case at each budget."""
    found, n = run.results["trade_off"], run.results["data"]["n"]
    parts = [
        f"{entry['name']}: clean {percent(entry['clean']['accuracy'])}, "
        + ", ".join(f"{percent(each['robust_accuracy'])} at {each['eps_text']}" for each in entry["worst_case"])
        for entry in found["contenders"]
    ]
    return f"On {n:,} images, {'; '.join(parts)}."


@dataclass(frozen=True)
class _Point:
    """A candidate at one budget: which images are correct when clean, and which in the worst case."""

    entry: Mapping[str, Any]
    clean: Array
    held: Array

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    def above(self, other: _Point) -> bool:
        """At least as good in both accuracies, and better in one."""
        mine, theirs = ((int(each.clean.sum()), int(each.held.sum())) for each in (self, other))
        return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]


def trade_off_remarks(run: Run) -> list[str]:
    """The effect of larger lambdas, and which models lie above which, image by image at each budget."""
    if run.samples is None:
        return []
    found = run.results["trade_off"]
    remarks: list[str] = []
    for budget in found["budgets"]:
        points = [_point(run, entry, budget["eps_text"]) for entry in found["contenders"]]
        remarks += _about_lambdas(points, budget["eps_text"])
        remarks += _about_baselines(points, budget["eps_text"])
    if remarks:
        remarks.append(
            "p is the exact two-sided p-value of McNemar's test on the same images, not corrected for the number of "
            "comparisons. Each model was trained once, so it does not include the effect of the seed."
        )
    return remarks


def _point(run: Run, entry: Mapping[str, Any], budget: str) -> _Point:
    name = entry["name"]
    return _Point(entry, run.column(f"correct:{name}"), run.column(f"worst:{name}: {budget}"))


def _about_lambdas(points: Sequence[_Point], budget: str) -> Iterator[str]:
    for kind in _SERIES:
        series = [each for each in points if each.entry["kind"] == kind and each.entry["lambda"] is not None]
        series.sort(key=lambda each: float(each.entry["lambda"]))
        for small, large in itertools.pairwise(series):
            if small.entry["lambda"] == large.entry["lambda"]:
                continue
            yield (
                f"At {budget}, {_SERIES[kind][2]}, lambda {small.entry['lambda']:g} to {large.entry['lambda']:g}: "
                f"worst case {_change(small.held, large.held)}, clean {_change(small.clean, large.clean)}."
            )


def _about_baselines(points: Sequence[_Point], budget: str) -> Iterator[str]:
    ours = [each for each in points if each.entry["kind"] == "tora" and each.entry["knob"] is None]
    for baseline in (each for each in points if each.entry["kind"] != "tora" and ours):
        above = [each for each in ours if each.above(baseline)]
        below = [each for each in ours if baseline.above(each)]
        for point, word in (*((each, "above") for each in above), *((each, "below") for each in below)):
            sure = "" if _differ(baseline, point) else ", not significantly"
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


def _differ(one: _Point, other: _Point) -> bool:
    return min(_p(one.clean, other.clean), _p(one.held, other.held)) < _SIGNIFICANT


def _by_kind(found: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The points of each kind, in the order of their lambdas, or of their places between two fusions."""
    series = []
    for kind in _SERIES:
        entries = [each for each in found["contenders"] if ("knob" if each["knob"] else each["kind"]) == kind]
        if entries:
            series.append((kind, sorted(entries, key=_place)))
    return series


def _place(entry: Mapping[str, Any]) -> float:
    if entry["knob"]:
        return float(entry["knob"]["at"])
    return -1.0 if entry["lambda"] is None else float(entry["lambda"])


def _kind_text(entry: Mapping[str, Any]) -> str:
    if entry["knob"]:
        return "between two fusions"
    lean = "" if entry["lambda"] is None else f", lambda {entry['lambda']:g}"
    return f"{_SERIES[entry['kind']][2]}{lean}"


_MAPS_REMARK = (
    "The two adapters' maps sum to one at every patch by construction, whatever they learned: that they complement "
    "each other is no finding. Deletion hides the patches that an order names first, insertion shows them first; a "
    "map that finds what matters has a smaller area than a random order in the one and a larger in the other. The "
    "robustness adapter's order is this one reversed, so its areas are these with deletion and insertion exchanged."
)
_IMAGES, _LAYERS = 3, 7  # most that are drawn
_ORDERS, _OTHERS = ("map", "attention", "random"), ("random", "attention")


def draw_maps(run: Run) -> Picture | None:
    """Images down, a row for each model; blocks across. Colors are centered at one half; None without maps."""
    try:
        arrays = read_arrays(run.path / "maps.npz")
    except UserError:
        return None
    if "x" not in arrays or len(arrays) < 2:
        return None
    images = arrays.pop("x").transpose(0, 2, 3, 1)[:_IMAGES]
    maps = {name.removeprefix("maps:"): each[:, :_IMAGES] for name, each in arrays.items()}
    depth = min(len(each) for each in maps.values())
    layers = np.unique(np.linspace(0, depth - 1, min(depth, _LAYERS)).round().astype(int)).tolist()
    reach = max(max(float(np.abs(each[layers] - 0.5).max()) for each in maps.values()), 1e-6)
    scale = {"cmap": "RdBu", "vmin": 0.5 - reach, "vmax": 0.5 + reach}
    rows = [
        (name, [image, *each[layers, number]]) for number, image in enumerate(images) for name, each in maps.items()
    ]
    titles = ["image", *(f"block {layer + 1}" for layer in layers)]
    strips = [
        Strip(name, cells, titles if place == len(rows) else (), scale=scale)
        for place, (name, cells) in enumerate(rows, start=1)
    ]
    with strip_figure(strips, below=30) as figure:
        axes, height = figure.axes[0], 72 * figure.get_figheight()
        bar = axes.inset_axes((110, height - 20, 160, 8), transform=axes.transData)
        bar.imshow(np.linspace(0, 1, 64)[None], cmap=scale["cmap"], aspect="auto")
        bar.set_axis_off()
        words = f"{scale['vmin']:.3f} (robustness)  to  {scale['vmax']:.3f} (accuracy), white is 0.5"
        axes.text(278, height - 16, words, ha="left", va="center", fontsize=9, color=COLORS["muted"])
    alt = f"The accuracy adapter's share at every patch, of {len(images)} images, for {', '.join(maps)}, by block."
    return Picture("adapter-maps", figure, f"{alt} It reaches {reach:.3f} away from one half.")


def map_table(maps: Mapping[str, Any]) -> Table:
    """Areas of the deletion and insertion curves by order, and the map's difference from the others."""
    rows: list[tuple[Cell, ...]] = []
    for entry in maps["contenders"]:
        for kind in ("deletion", "insertion"):
            means = [entry[kind][name] for name in _ORDERS]
            means += [entry[f"{kind}_differences"][f"map - {other}"] for other in _OTHERS]
            rows.append((entry["name"], kind, *itertools.chain(*map(mean_cells, means))))
    headings = (*_ORDERS, *(f"map - {other}" for other in _OTHERS))
    return Table(
        f"Area under the probability of the model's own answer, over {maps['n']} images, with bootstrapped 95 % "
        "intervals. The map is the mean of all blocks'; attention is the class token's in the last block.",
        (Column("model"), Column("check"), *(column for name in headings for column in mean_columns(name))),
        tuple(rows),
    )


KIND = Kind(_sentence, _sections, one_budget=False)
