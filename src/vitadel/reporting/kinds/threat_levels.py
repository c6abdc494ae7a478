"""Threat levels: accuracy against attackers who know more and more about secret tokens, at several budgets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Shown

from vitadel.quantities import percent
from vitadel.reporting.figures import COLORS, Picture, add_legend, interval_reach, new_figure, style_axes
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table, share_cells, share_columns
from vitadel.reporting.terminal import show_findings

_BANK = "T8"  # attacks another model than the other levels, so no line leads to it
_LINE_COLORS = ("clean", "attack", "worst", "ink")
Levels = Mapping[str, Any]
"""The field `ladder` of the results."""


def _sections(run: Run) -> list[Section]:
    levels: Levels = run.results["ladder"]
    return [
        Section(
            "Threat levels",
            lambda: draw_threat_levels(run),
            "Each level counts the images that are classified correctly after all of its attacks, on the same images "
            "and model; a randomized bank (T8) counts an image only if every one of its token sets is right.",
            [level_table(levels), *([control_table(levels)] if levels["controls"] else [])],
            level_remarks(levels),
            file="threat-ladder",
            exported=[_exported_table(levels)],
        )
    ]


def _exported_table(levels: Levels) -> Table:
    columns = (*map(Column, ("attacker", "knows", "attack", "eps")), *share_columns("accuracy"))
    rows = tuple(
        (
            f"{entry['level']} {entry['title']}",
            *(entry[name] for name in ("knows", "attack", "eps_text")),
            *share_cells(entry, "robust_accuracy"),
        )
        for entry in levels["rows"]
    )
    return Table("Accuracy by what the attacker knows.", columns, rows)


def level_table(levels: Levels) -> Table:
    """One row per attack, one column per budget; budgets in other units than pixels stand beside the attack."""
    budgets = [entry["eps"] for entry in levels["budgets"]]
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in levels["rows"]:
        attacker = f"{entry['level']} {entry['title']}"
        row = rows.setdefault(
            (entry["level"], entry["attack"]), [attacker, entry["knows"], entry["attack"], *[""] * len(budgets)]
        )
        if entry["in_pixels"]:
            row[3 + budgets.index(entry["eps"])] = _accuracy(entry, "robust_accuracy")
        else:
            row[2] = f"{entry['attack']} ({entry['eps_text']}): {_accuracy(entry, 'robust_accuracy')}"
    columns = (
        *map(Column, ("attacker", "knows", "attack")),
        *(Column(each["eps_text"], 1) for each in levels["budgets"]),
    )
    return Table("Accuracy in % with its 95 % interval.", columns, tuple(map(tuple, rows.values())))


def control_table(levels: Levels) -> Table:
    """One row per control: its accuracy on clean images, and under each attack of T2."""
    clean: dict[str, str] = {}
    attacks: dict[str, dict[str, str]] = {}
    for entry in levels["controls"]:
        units = "" if entry["in_pixels"] else " normalized"
        clean[entry["control"]] = _accuracy(entry["clean"], "accuracy")
        column = attacks.setdefault(f"{entry['attack']}, {entry['eps_text']}{units}", {})
        column[entry["control"]] = _accuracy(entry, "robust_accuracy")
    columns = (Column("instead of the tokens"), *(Column(name, 1) for name in ("clean", *attacks)))
    rows = tuple(
        (name, accuracy, *(column.get(name, "") for column in attacks.values())) for name, accuracy in clean.items()
    )
    return Table("Controls: other changes under the attacks that know none of them (T2).", columns, rows)


def show_threat_levels(run: Run) -> None:
    """A part per attacker, a row per attack, a column per budget; then controls, remarks and findings."""
    console, results, levels = Console(), run.results, run.results["ladder"]
    title = (
        f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}: {_tokens(levels)}, "
        f"n = {results['data']['n']}, seed {results['seed']}, Linf; accuracy in % with its "
        "95 % interval"
    )
    clean = _accuracy(results["clean"], "accuracy")
    parts: dict[str, list[Sequence[Any]]] = {"": [("clean", *[clean] * len(levels["budgets"]))]}
    for attacker, _, *row in level_table(levels).rows:
        parts.setdefault(str(attacker), []).append(row)
    worst = [_accuracy(entry, "robust_accuracy") for entry in levels["worst_case"]]
    parts["all levels"] = [("worst case per image", *worst)] if worst else []
    console.print(_narrow_table("attacker and attack", levels, title, parts))
    if levels["controls"]:
        title = "Controls, under attacks that know none of them (T2)"
        console.print(_narrow_table("instead of the tokens", levels, title, _control_parts(levels)))
    for remark in level_remarks(levels):
        console.print(f"[dim]{escape(remark)}[/]")
    show_findings(results.get("findings") or [])


def _tokens(levels: Levels) -> str:
    return f"{levels['tokens']} secret tokens ({levels['fingerprint']})" if levels["tokens"] else "no tokens"


def _control_parts(levels: Levels) -> dict[str, list[Sequence[Any]]]:
    """A part for clean images and for each attack, a row per control."""
    budgets = [budget["eps"] for budget in levels["budgets"]]
    clean = {entry["control"]: _accuracy(entry["clean"], "accuracy") for entry in levels["controls"]}
    parts: dict[str, list[Sequence[Any]]] = {
        "clean": [(name, *[accuracy] * len(budgets)) for name, accuracy in clean.items()]
    }
    for attack in dict.fromkeys(entry["attack"] for entry in levels["controls"]):
        entries = [entry for entry in levels["controls"] if entry["attack"] == attack]
        units = "" if entries[0]["in_pixels"] else f", {entries[0]['eps_text']} normalized"
        rows = parts.setdefault(attack + units, [])
        for name in clean:
            found = {each["eps"]: _accuracy(each, "robust_accuracy") for each in entries if each["control"] == name}
            # A budget in other units has no column.
            rows.append((f"{name}: {', '.join(found.values())}",) if units else (name, *map(found.get, budgets)))
    return parts


def _narrow_table(heading: str, levels: Levels, title: str, parts: Mapping[str, Sequence[Sequence[Any]]]) -> Shown:
    """A column of words and one per budget. Four budgets fit into 80 columns: numbers are never cut, words wrap."""
    table = Shown(title=title, title_justify="left")
    table.add_column(heading, overflow="fold")
    for budget in levels["budgets"]:
        table.add_column(budget["eps_text"], justify="right", min_width=len("(10.0\u2013100.0)"))
    for name, rows in parts.items():
        if rows and name:
            table.add_section()
            table.add_row(f"[bold]{escape(name)}[/]")
        for row in rows:
            table.add_row(*(escape(cell or "") for cell in row))
    return table


def level_remarks(levels: Levels) -> list[str]:
    """What the tables have no room for: cosines, single draws of a bank, the fit of tokens, levels left out."""
    remarks = []
    for entry in levels["rows"]:
        if entry["cosines"] and entry["level"] != "T0":
            cosines = "; ".join(f"{_cosines(entry['cosines'], key)} {what}" for key, what in _COSINES.items())
            remarks.append(
                f"Feature cosines under {entry['level']} {entry['attack']}, eps {entry['eps_text']}: {cosines}."
            )
        if "expected_accuracy" in entry:
            remarks.append(
                f"{entry['level']} at {entry['eps_text']}: one random draw of the bank is right for "
                f"{percent(entry['expected_accuracy'])} ({percent(levels['bank_clean_accuracy'])} when clean)."
            )
    for entry in levels["extraction"]:
        remarks.append(
            f"Tokens fitted to the {entry['from']} of {entry['queries']} images: feature cosine "
            f"{entry['cosine']:.4f} on other images ({entry['cosine_before']:.4f} before the fit)."
        )
    if levels["left_out"]:
        remarks.append(f"Levels not run: {'; '.join(levels['left_out'])}.")
    return remarks


_COSINES = {"to bare": "to the bare backbone", "to own": "to its own", "no tokens": "without tokens"}


def _cosines(cosines: Mapping[str, float], key: str) -> str:
    """Per token and per channel, and of pooled features where the defense compares those."""
    kinds = {"token": "per token", "channel": "per channel", "pooled": "pooled"}
    found = {name: cosines.get(f"{key}, {kind}") for kind, name in kinds.items()}
    return ", ".join(f"{value:.2f} {name}" for name, value in found.items() if value is not None)


def draw_threat_levels(run: Run) -> Picture:
    """Accuracy by the attacker's knowledge, one line per budget, with 95 % intervals."""
    levels = run.results["ladder"]
    lines = [
        _Line(f"eps {budget['eps_text']}", color, _at(levels, budget["eps"]))
        for budget, color in zip(levels["budgets"], itertools.cycle(_LINE_COLORS))
    ]
    figure = _draw(lines, clean=run.results["clean"]["accuracy"])
    return Picture("ladder", figure, f"Accuracy by the attacker's knowledge. {level_sentence(run)}")


def compare_threat_levels(runs: Mapping[str, Run]) -> Section | None:
    """Several runs, such as tokens trained as in the paper and through themselves, by level and budget."""
    found = {label: run.results for label, run in runs.items() if run.results["ladder"].get("levels")}
    if len(found) < 2:
        return None
    budgets = {entry["eps"]: entry["eps_text"] for each in found.values() for entry in each["ladder"]["budgets"]}
    lines = [
        _Line(f"{label}, eps {budgets[eps]}", color, _at(each["ladder"], eps), style)
        for (label, each), color in zip(found.items(), itertools.cycle(_LINE_COLORS))
        for eps, style in zip(sorted(budgets), itertools.cycle(("-", "--", "-.", ":")))
    ]
    table = Table(
        "Accuracy in % with its 95 % interval. A level counts the images that are correct after all of its attacks.",
        (Column("attacker"), Column("eps"), *(Column(label, 1) for label in found)),
        tuple(map(tuple, _compared_rows(list(found.values()), budgets))),
    )
    return Section(
        "Threat levels side by side",
        lambda: Picture("ladders", _draw(lines), "Accuracy by the attacker's knowledge, run beside run."),
        "Bars are 95 % intervals.",
        [table],
    )


def _compared_rows(found: Sequence[Mapping[str, Any]], budgets: Mapping[float, str]) -> list[list[str]]:
    def cell(entry: Mapping[str, Any] | None) -> str:
        return "" if entry is None else _accuracy(entry, "robust_accuracy")

    levels = [{eps: _at(each["ladder"], eps) for eps in budgets} for each in found]
    worst = [{entry["eps"]: entry for entry in each["ladder"]["worst_case"]} for each in found]
    titles = {entry["level"]: entry["title"] for each in found for entry in each["ladder"]["levels"]}
    rows = [["clean", "", *(_accuracy(each["clean"], "accuracy") for each in found)]]
    rows += [
        [f"{code} {titles[code]}", budgets[eps], *(cell(each[eps].get(code)) for each in levels)]
        for code in sorted(titles)
        for eps in sorted(budgets)
        if any(code in each[eps] for each in levels)
    ]
    return rows + [["worst case", budgets[eps], *(cell(each.get(eps)) for each in worst)] for eps in sorted(budgets)]


def _at(levels: Levels, eps: float) -> dict[str, Mapping[str, Any]]:
    """The entry of each level at one budget."""
    return {entry["level"]: entry for entry in levels["levels"] if entry["eps"] == eps}


@dataclass(frozen=True)
class _Line:
    """One curve of a figure: the entries of levels by their codes."""

    label: str
    color: str
    levels: Mapping[str, Mapping[str, Any]]
    style: str = "-"


def _draw(lines: Sequence[_Line], clean: float | None = None) -> Any:
    titles = {code: entry["title"] for line in lines for code, entry in line.levels.items()}
    codes = sorted(titles)
    with new_figure(300) as figure:
        axes = figure.add_axes((0.08, 0.26, 0.9, 0.7))
        if clean is not None:
            axes.axhline(100 * clean, color=COLORS["muted"], linewidth=1, linestyle=":", label="clean")
        for line in lines:
            present = [code for code in codes if code in line.levels]
            parts = ([code for code in present if code != _BANK], line.style), ([_BANK] * (_BANK in present), "")
            for part, style in parts:
                entries = [line.levels[code] for code in part]
                axes.errorbar(
                    [codes.index(code) for code in part],
                    [100 * entry["robust_accuracy"] for entry in entries],
                    yerr=interval_reach(entries, "robust_accuracy"),
                    color=COLORS[line.color],
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
        add_legend(axes)
        style_axes(axes)
    return figure


def level_sentence(run: Run) -> str:
    """Accuracy at every budget if the tokens are unknown, if they are known, and in the worst case."""
    results, levels = run.results, run.results["ladder"]
    worst = {entry["eps"]: entry for entry in levels["worst_case"]}
    parts = []
    for budget in levels["budgets"]:
        by_level = _at(levels, budget["eps"])
        shares = [
            f"{percent(by_level[code]['robust_accuracy'])} {what}"
            for code, what in (("T2", "if the tokens stay unknown (T2)"), ("T6", "if they are known (T6)"))
            if code in by_level
        ]
        if budget["eps"] in worst:
            shares.append(f"{percent(worst[budget['eps']]['robust_accuracy'])} in the worst case")
        parts.append(f"at {budget['eps_text']} {', '.join(shares)}")
    clean = percent(results["clean"]["accuracy"])
    return f"Of {results['data']['n']:,} images {clean} are classified correctly when clean; {'; '.join(parts)}."


def _accuracy(entry: Mapping[str, Any], name: str) -> str:
    low, high = entry["ci95"]
    return f"{100 * entry[name]:.1f} ({100 * low:.1f}\u2013{100 * high:.1f})"


KIND = Kind(level_sentence, _sections, compare_threat_levels, show=show_threat_levels, one_budget=False)
