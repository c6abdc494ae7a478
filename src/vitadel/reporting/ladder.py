"""The threat ladder for people: a table of accuracy by attacker and budget, and the same as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.curves import plain_axes
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.gather import Run, percent

__all__ = ["control_rows", "draw_ladder", "ladder_remarks", "ladder_rows", "ladder_sentence", "show_ladder"]

_BANK = "T8"  # another victim than that of the other levels, so no line leads to it


def show_ladder(results: Mapping[str, Any]) -> None:
    """The table in the terminal: one row per attack, one column per budget, then controls and what else was seen."""
    console, ladder = Console(), results["ladder"]
    title = (
        f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}: {ladder['tokens']} secret tokens "
        f"({ladder['fingerprint']}), n = {results['data']['n']}, seed {results['seed']}, Linf; accuracy in % with its "
        "95 % interval"
    )
    table = Table("attacker", "attack", title=title, title_justify="left")
    for budget in ladder["budgets"]:
        table.add_column(budget["eps_text"], justify="right")
    clean = _accuracy(results["clean"], "accuracy")
    table.add_row("clean", "", *[clean] * len(ladder["budgets"]))
    for row in ladder_rows(ladder):
        table.add_row(escape(row["attacker"]), escape(row["attack"]), *map(escape, row["cells"]))
    if ladder["worst_case"]:
        table.add_section()
        worst = [_accuracy(entry, "robust_accuracy") for entry in ladder["worst_case"]]
        table.add_row("worst case", "per image", *worst)
    console.print(table)
    controls = control_rows(ladder)
    if controls:
        title = "Controls, under attacks that know none of them (T2)"
        beside = Table("instead of the tokens", "clean", title=title, title_justify="left")
        for heading in controls[0]["attacks"]:
            beside.add_column(heading, justify="right")
        for row in controls:
            beside.add_row(escape(row["control"]), row["clean"], *row["attacks"].values())
        console.print(beside)
    for remark in ladder_remarks(ladder):
        console.print(f"[dim]{escape(remark)}[/]")


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
    codes = list(dict.fromkeys(entry["level"] for entry in ladder["levels"]))
    titles = {entry["level"]: entry["title"] for entry in ladder["levels"]}
    clean = run.results["clean"]["accuracy"]
    with our_style():
        figure = blank(300)
        axes = figure.add_axes((0.08, 0.26, 0.9, 0.7))
        axes.axhline(100 * clean, color=COLOURS["muted"], linewidth=1, linestyle=":", label="clean")
        for budget, colour in zip(ladder["budgets"], itertools.cycle(("clean", "attack", "worst", "ink"))):
            entries = {entry["level"]: entry for entry in ladder["levels"] if entry["eps"] == budget["eps"]}
            there = [code for code in codes if code in entries]
            for part, style in (([code for code in there if code != _BANK], "-"), ([_BANK] * (_BANK in there), "")):
                middle = [100 * entries[code]["robust_accuracy"] for code in part]
                ends = [[100 * end for end in entries[code]["ci95"]] for code in part]
                reach = [[value - low for value, (low, _) in zip(middle, ends, strict=True)]]
                reach += [[high - value for value, (_, high) in zip(middle, ends, strict=True)]]
                axes.errorbar(
                    [codes.index(code) for code in part],
                    middle,
                    yerr=reach,
                    color=COLOURS[colour],
                    label=f"eps {budget['eps_text']}" if style else None,
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
    return Picture("ladder", figure, f"Accuracy by the attacker's knowledge. {ladder_sentence(run.results)}")


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
