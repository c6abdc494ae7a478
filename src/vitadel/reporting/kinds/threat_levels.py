"""The threat ladder for people: a table of accuracy by attacker and budget, and the same as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, percent

__all__ = [
    "compare_ladders",
    "control_rows",
    "draw_ladder",
    "ladder_remarks",
    "ladder_rows",
    "ladder_sentence",
    "show_ladder",
]

_BANK = "T8"  # another victim than that of the other levels, so no line leads to it


def show_ladder(results: Mapping[str, Any]) -> None:
    """The table in the terminal: a part per attacker, a row per attack, a column per budget; then controls and what
    else was seen."""
    console, ladder = Console(), results["ladder"]
    title = (
        f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}: {ladder['tokens']} secret tokens "
        f"({ladder['fingerprint']}), n = {results['data']['n']}, seed {results['seed']}, Linf; accuracy in % with its "
        "95 % interval"
    )
    table = _table("attacker and attack", ladder, title)
    clean = _accuracy(results["clean"], "accuracy")
    table.add_row("clean", *[clean] * len(ladder["budgets"]))
    for attacker, rows in itertools.groupby(ladder_rows(ladder), key=lambda row: row["attacker"]):
        table.add_section()
        table.add_row(f"[bold]{escape(attacker)}[/]")
        for row in rows:
            table.add_row(escape(row["attack"]), *map(escape, row["cells"]))
    if ladder["worst_case"]:
        table.add_section()
        worst = [_accuracy(entry, "robust_accuracy") for entry in ladder["worst_case"]]
        table.add_row("[bold]worst case per image[/]", *worst)
    console.print(table)
    if ladder["controls"]:
        console.print(_control_table(ladder))
    for remark in ladder_remarks(ladder):
        console.print(f"[dim]{escape(remark)}[/]")


def _control_table(ladder: Mapping[str, Any]) -> Table:
    """As narrow as the ladder's own: a part for clean images and for each attack, a row per control."""
    table = _table("instead of the tokens", ladder, "Controls, under attacks that know none of them (T2)")
    budgets = [budget["eps"] for budget in ladder["budgets"]]
    clean = {entry["control"]: _accuracy(entry["clean"], "accuracy") for entry in ladder["controls"]}
    table.add_row("[bold]clean[/]")
    for name, accuracy in clean.items():
        table.add_row(escape(name), *[accuracy] * len(budgets))
    for attack in dict.fromkeys(entry["attack"] for entry in ladder["controls"]):
        entries = [entry for entry in ladder["controls"] if entry["attack"] == attack]
        units = "" if entries[0]["in_pixels"] else f", {entries[0]['eps_text']} normalised"
        table.add_section()
        table.add_row(f"[bold]{escape(attack + units)}[/]")
        for name in clean:
            told = {each["eps"]: _accuracy(each, "robust_accuracy") for each in entries if each["control"] == name}
            if units:  # of a budget that has no column
                table.add_row(escape(f"{name}: {', '.join(told.values())}"))
            else:
                table.add_row(escape(name), *(told.get(eps, "") for eps in budgets))
    return table


def _table(heading: str, ladder: Mapping[str, Any], title: str) -> Table:
    """A column of words, and one per budget, narrow enough for the four of the ladder in a terminal of 80 columns:
    numbers are never cut short, words are broken where there is no room for them."""
    table = Table(title=title, title_justify="left")
    table.add_column(heading, overflow="fold")
    for budget in ladder["budgets"]:
        table.add_column(budget["eps_text"], justify="right", min_width=len("(10.0\u2013100.0)"))
    return table


def ladder_remarks(ladder: Mapping[str, Any]) -> list[str]:
    """What the tables have no room for: cosines, single draws of a bank, the fit of tokens, what is left out."""
    remarks = []
    for entry in ladder["rows"]:
        cosines = entry["cosines"]
        if cosines and entry["level"] != "T0":
            told = "; ".join(
                f"{_cosines(cosines, key)} {what}"
                for key, what in (
                    ("to bare", "to the bare backbone"),
                    ("to own", "to its own"),
                    ("no tokens", "without tokens"),
                )
            )
            remarks.append(
                f"Feature cosines under {entry['level']} {entry['attack']}, eps {entry['eps_text']}: {told}."
            )
        if "expected_accuracy" in entry:
            remarks.append(
                f"{entry['level']} at {entry['eps_text']}: one random draw of the bank is right for "
                f"{percent(entry['expected_accuracy'])} ({percent(ladder['bank_clean_accuracy'])} when clean)."
            )
    for entry in ladder["extraction"]:
        remarks.append(
            f"Tokens fitted to the {entry['from']} of {entry['queries']} images: features alike to "
            f"{entry['cosine']:.4f} (cosine on other images; {entry['cosine_before']:.4f} before the fit)."
        )
    if ladder["left_out"]:
        remarks.append(f"Not climbed: {'; '.join(ladder['left_out'])}.")
    return remarks


def _cosines(cosines: Mapping[str, float], key: str) -> str:
    """Per token and per channel, and of pooled features where the defence compares those."""
    kinds = {"token": "per token", "channel": "per channel", "pooled": "pooled"}
    there = {called: cosines.get(f"{key}, {kind}") for kind, called in kinds.items()}
    return ", ".join(f"{value:.2f} {called}" for called, value in there.items() if value is not None)


def ladder_rows(ladder: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per attack: who, what, and the accuracy at each budget; other units than pixels in their own words."""
    budgets = [entry["eps"] for entry in ladder["budgets"]]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in ladder["rows"]:
        row = rows.setdefault(
            (entry["level"], entry["attack"]),
            {
                "attacker": f"{entry['level']} {entry['title']}",
                "knows": entry["knows"],
                "attack": entry["attack"],
                "cells": [""] * len(budgets),
            },
        )
        if entry["in_pixels"]:
            row["cells"][budgets.index(entry["eps"])] = _accuracy(entry, "robust_accuracy")
        else:
            row["attack"] = f"{entry['attack']} ({entry['eps_text']}): {_accuracy(entry, 'robust_accuracy')}"
    return list(rows.values())


def control_rows(ladder: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per control: its accuracy on clean images, and under each attack of T2."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in ladder["controls"]:
        clean = _accuracy(entry["clean"], "accuracy")
        row = rows.setdefault(entry["control"], {"control": entry["control"], "clean": clean, "attacks": {}})
        units = "" if entry["in_pixels"] else " normalised"
        row["attacks"][f"{entry['attack']}, {entry['eps_text']}{units}"] = _accuracy(entry, "robust_accuracy")
    return list(rows.values())


def draw_ladder(run: Run) -> Picture | None:
    """Accuracy against the attacker's knowledge, one line per budget, with 95 % intervals; None for other runs."""
    ladder = run.results.get("ladder")
    if not isinstance(ladder, Mapping) or not ladder.get("levels"):
        return None
    lines = [
        _Line(f"eps {budget['eps_text']}", color, _at(ladder, budget["eps"]))
        for budget, color in zip(ladder["budgets"], itertools.cycle(_LINE_COLOURS))
    ]
    figure = _drawn(lines, clean=run.results["clean"]["accuracy"])
    return Picture("ladder", figure, f"Accuracy by the attacker's knowledge. {ladder_sentence(run.results)}")


def compare_ladders(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Any] | None:
    """Several climbs beside each other, such as tokens trained as in the paper and through themselves: a figure and a
    table with a row per level and budget, and a column per climb. None if there are fewer than two."""
    climbs = {
        label: run.results
        for run, label in zip(runs, labels, strict=True)
        if (run.results.get("ladder") or {}).get("levels")
    }
    if len(climbs) < 2:
        return None
    budgets = {entry["eps"]: entry["eps_text"] for told in climbs.values() for entry in told["ladder"]["budgets"]}
    lines = [
        _Line(f"{label}, eps {budgets[eps]}", color, _at(told["ladder"], eps), style)
        for (label, told), color in zip(climbs.items(), itertools.cycle(_LINE_COLOURS))
        for eps, style in zip(sorted(budgets), itertools.cycle(("-", "--", "-.", ":")))
    ]
    picture = Picture("ladders", _drawn(lines), "Accuracy by the attacker's knowledge, climb beside climb.")
    table = {
        "caption": "Accuracy in % with its 95 % interval. A level counts what all of its attacks leave standing.",
        "headings": ["attacker", "eps", *climbs],
        "rows": _compared(list(climbs.values()), budgets),
    }
    return {"picture": picture, "caption": "Bars are 95 % intervals.", "tables": [table], "remarks": []}


def _compared(climbs: Sequence[Mapping[str, Any]], budgets: Mapping[float, str]) -> list[list[str]]:
    def cell(entry: Mapping[str, Any] | None) -> str:
        return "" if entry is None else _accuracy(entry, "robust_accuracy")

    levels = [{eps: _at(told["ladder"], eps) for eps in budgets} for told in climbs]
    worst = [{entry["eps"]: entry for entry in told["ladder"]["worst_case"]} for told in climbs]
    titles = {entry["level"]: entry["title"] for told in climbs for entry in told["ladder"]["levels"]}
    rows = [["clean", "", *(_accuracy(told["clean"], "accuracy") for told in climbs)]]
    rows += [
        [f"{code} {titles[code]}", budgets[eps], *(cell(each[eps].get(code)) for each in levels)]
        for code in sorted(titles)
        for eps in sorted(budgets)
        if any(code in each[eps] for each in levels)
    ]
    return rows + [["worst case", budgets[eps], *(cell(each.get(eps)) for each in worst)] for eps in sorted(budgets)]


def _at(ladder: Mapping[str, Any], eps: float) -> dict[str, Mapping[str, Any]]:
    """What each level left standing at one budget."""
    return {entry["level"]: entry for entry in ladder["levels"] if entry["eps"] == eps}


@dataclass(frozen=True)
class _Line:
    """One curve of a figure: what each level left standing."""

    label: str
    color: str
    levels: Mapping[str, Mapping[str, Any]]
    style: str = "-"


_LINE_COLOURS = ("clean", "attack", "worst", "ink")


def _drawn(lines: Sequence[_Line], clean: float | None = None) -> Figure:
    titles = {code: entry["title"] for line in lines for code, entry in line.levels.items()}
    codes = sorted(titles)
    with our_style():
        figure: Figure = blank(300)
        axes = figure.add_axes((0.08, 0.26, 0.9, 0.7))
        if clean is not None:
            axes.axhline(100 * clean, color=COLOURS["muted"], linewidth=1, linestyle=":", label="clean")
        for line in lines:
            there = [code for code in codes if code in line.levels]
            parts = ([code for code in there if code != _BANK], line.style), ([_BANK] * (_BANK in there), "")
            for part, style in parts:
                middle = [100 * line.levels[code]["robust_accuracy"] for code in part]
                ends = [[100 * end for end in line.levels[code]["ci95"]] for code in part]
                reach = [[value - low for value, (low, _) in zip(middle, ends, strict=True)]]
                reach += [[high - value for value, (_, high) in zip(middle, ends, strict=True)]]
                axes.errorbar(
                    [codes.index(code) for code in part],
                    middle,
                    yerr=reach,
                    color=COLOURS[line.color],
                    label=line.label if style else None,
                    linestyle=style,
                    linewidth=1.5,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    elinewidth=0.8,
                )
        axes.set(ylim=(-2, 102), ylabel="accuracy, %", xlabel="what the attacker knows")
        axes.set_xticks(range(len(codes)), [f"{code}\n{titles[code].replace(' ', chr(10))}" for code in codes])
        axes.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"])
        plain_axes(axes)
    return figure


def ladder_sentence(results: Mapping[str, Any]) -> str:
    """What the secret is worth, in words: the paper's setting beside the worst case, at every budget."""
    ladder, n = results["ladder"], results["data"]["n"]
    told = []
    worst = {entry["eps"]: entry for entry in ladder["worst_case"]}
    for budget in ladder["budgets"]:
        by_level = {entry["level"]: entry for entry in ladder["levels"] if entry["eps"] == budget["eps"]}
        parts = [
            f"{percent(by_level[code]['robust_accuracy'])} {what}"
            for code, what in (("T2", "if the tokens stay unknown (T2)"), ("T6", "if they are known (T6)"))
            if code in by_level
        ]
        if budget["eps"] in worst:
            parts.append(f"{percent(worst[budget['eps']]['robust_accuracy'])} in the worst case")
        told.append(f"at {budget['eps_text']} {', '.join(parts)}")
    clean = percent(results["clean"]["accuracy"])
    return f"Of {n:,} images {clean} are classified correctly when clean; {'; '.join(told)}."


def _accuracy(entry: Mapping[str, Any], name: str) -> str:
    low, high = entry["ci95"]
    return f"{100 * entry[name]:.1f} ({100 * low:.1f}\u2013{100 * high:.1f})"
