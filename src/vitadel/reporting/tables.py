"""The report's tables as files for papers and spreadsheets: CSV, LaTeX with booktabs, and Markdown.

CSV holds numbers in full; LaTeX and Markdown round them, each column to digits of its own.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitadel.reporting.cells import Cell, Column, Table, share_cells, share_columns, texts
from vitadel.reporting.figures import printable
from vitadel.reporting.kinds.adapter_maps import check_table
from vitadel.reporting.kinds.corruptions import corruption_content
from vitadel.reporting.kinds.stability import stability_tables
from vitadel.reporting.kinds.trade_off import trade_off_tables
from vitadel.reporting.pairs import pairings
from vitadel.reporting.read_runs import Run, aspects, class_scores, plain, run_labels
from vitadel.reporting.studies import study_tables

__all__ = ["FORMATS", "Column", "Table", "as_csv", "as_latex", "as_markdown", "tables_of"]


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All tables that have a row."""
    labels = run_labels(runs)
    found = [_runs(runs, labels), _attacks(runs, labels), _pairs(runs), _findings(runs, labels)]
    for place, run in enumerate(runs, start=1):
        number = f"-{place}" if len(runs) > 1 else ""
        found += [_classes(run, labels[place - 1], number), *_of_suites(run, labels[place - 1], number)]
    return [table for table in found if table.rows]


_RUN = Column("run")


def _runs(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    shown = ("data", "size", "precision", "norm", "eps", "attacks")
    texts = [Column(name) for name in (*shown, "seed", "finished", "protocol")]
    columns = (_RUN, Column("n", 0), *share_columns("clean"), *share_columns("worst case"), *texts)
    rows = []
    for run, label in zip(runs, labels, strict=True):
        known, results = aspects(run), run.results
        rows.append(
            (
                label,
                results.get("data", {}).get("n"),
                *share_cells(results.get("clean"), "accuracy"),
                *share_cells(results.get("worst_case"), "robust_accuracy"),
                *(known[name] for name in shown),
                str(results.get("seed", "")),
                "yes" if run.complete else "no",
                (results.get("protocol") or {}).get("name") or "none",
            )
        )
    return Table("runs", "Accuracy, clean and in the worst case, with 95 % intervals (Wilson).", columns, tuple(rows))


def _attacks(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    counts = ("held", "n", "attacked", "gradient_calls", "forward_calls")
    told = (*counts, "seconds", "counts")
    columns = [_RUN, Column("attack"), *share_columns("accuracy")]
    columns += [*(Column(name.replace("_", " "), 0) for name in counts), Column("seconds", 1), Column("counts")]
    rows = [
        (label, entry["name"], *share_cells(entry, "robust_accuracy"), *(entry[name] for name in told))
        for run, label in zip(runs, labels, strict=True)
        if run.one_budget
        for entry in run.attacks
    ]
    return Table("attacks", "Accuracy under each attack, and what it cost.", tuple(columns), tuple(rows))


_PAIR_COLUMNS = (
    *(Column("A"), Column("B"), Column("images"), Column("A - B, points", 1), Column("from", 1), Column("to", 1)),
    *(Column("p (McNemar)", 4), Column("p (Holm)", 4)),
    *(Column(name, 0) for name in ("both right", "only A", "only B", "neither")),
)


def _pairs(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in pairings(runs):
        for row, p_of_all in zip(pair.rows, pair.adjusted, strict=True):
            points = [100 * value for value in (row.difference, *row.ci95)]
            counts = (row.both, row.only_first, row.only_second, row.neither)
            rows.append((pair.first, pair.second, row.what, *points, row.p_value, p_of_all, *counts))
    return Table("pairs", "Runs on the same images, one by one.", _PAIR_COLUMNS, tuple(rows))


def _findings(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    names = ("check", "title", "verdict", "evidence", "advice")
    rows = [
        (label, *(plain(entry.get(name, "")) for name in names))
        for run, label in zip(runs, labels, strict=True)
        for entry in run.results.get("findings") or []
    ]
    return Table("findings", "What the checks found.", (_RUN, *map(Column, names)), tuple(rows))


def _classes(run: Run, label: str, number: str) -> Table:
    scores = class_scores(run) if run.one_budget else []
    attacks = [name for name, _ in scores[0].attacked] if scores else []
    shares = ("clean", *attacks, "worst case")
    rows = []
    for score in scores:
        counts = (score.correct, *(count for _, count in score.attacked), score.held)
        rows.append((score.name, score.n, *(None if count is None else 100 * count / score.n for count in counts)))
    columns = (Column("class"), Column("n", 0), *(Column(f"{name}, %", 1) for name in shares))
    return Table(f"classes{number}", f"Accuracy of {label} by class.", columns, tuple(rows))


def _of_suites(run: Run, label: str, number: str) -> list[Table]:
    """What sections of other suites show, with its numbers in full and intervals in columns of their own."""
    found = []
    for slug, tables_in in _SUITES.items():
        shown = [table for table in tables_in(run) if table.rows]
        for place, table in enumerate(shown, start=1):
            name = f"{slug}{number}" + (f"-{place}" if len(shown) > 1 else "")
            found.append(replace(table, name=name, caption=f"{label}: {table.caption}"))
    return found


def _ladder(run: Run) -> list[Table]:
    told = run.results.get("ladder") or {}
    columns = (*map(Column, ("attacker", "knows", "attack", "eps")), *share_columns("accuracy"))
    rows = [
        (
            f"{entry['level']} {entry['title']}",
            *(entry[name] for name in ("knows", "attack", "eps_text")),
            *share_cells(entry, "robust_accuracy"),
        )
        for entry in (told.get("rows", ()) if told.get("levels") else ())
    ]
    return [Table("", "What secret tokens are worth.", columns, tuple(rows))]


def _trade_off(run: Run) -> list[Table]:
    told = run.results.get("trade_off")
    if not told or not run.complete:
        return []
    # Words come from the tables of the page, numbers from the results: there they are rounded.
    deployed, by_rvt = trade_off_tables(told)
    judged = [(entry["clean"], *entry["worst_case"]) for entry in told["contenders"]]
    heads = [(seen["clean"], *seen["attacks"]) for entry in told["contenders"] for seen in entry["rvt"].values()]
    return [_of_shares(shown, measured) for shown, measured in ((deployed, judged), (by_rvt, heads))]


def _of_shares(shown: Mapping[str, Any], measured: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """Two columns of words, then the accuracy on clean images and under attacks."""
    words, names = shown["headings"][:2], shown["headings"][2:]
    columns = (*map(Column, words), *(column for name in names for column in share_columns(name)))
    rows = []
    for cells, (clean, *attacked) in zip(shown["rows"], measured, strict=True):
        shares = [share_cells(clean, "accuracy"), *(share_cells(entry, "robust_accuracy") for entry in attacked)]
        rows.append((*cells[:2], *itertools.chain(*shares)))
    return Table("", shown["caption"], columns, tuple(rows))


def _mean(entry: Mapping[str, Any]) -> tuple[Cell, Cell, Cell]:
    return entry["mean"], *entry["ci95"]


def _mean_columns(name: str) -> tuple[Column, Column, Column]:
    return Column(name, 3), Column(f"{name}, from", 3), Column(f"{name}, to", 3)


def _maps(run: Run) -> list[Table]:
    told = (run.results.get("trade_off") or {}).get("maps")
    if not told or not run.complete:
        return []
    requests, others = ("map", "attention", "random"), ("random", "attention")
    headings = (*requests, *(f"map - {other}" for other in others))
    columns = (Column("model"), Column("check"), *(column for name in headings for column in _mean_columns(name)))
    rows = []
    for entry in told["contenders"]:
        for kind in ("deletion", "insertion"):
            means = [entry[kind][name] for name in requests]
            means += [entry[f"{kind}_differences"][f"map - {other}"] for other in others]
            rows.append((entry["name"], kind, *itertools.chain(*map(_mean, means))))
    return [Table("", check_table(told)["caption"], columns, tuple(rows))]


_WAYS = ("random", "learned", "transfer")


def _stability(run: Run) -> list[Table]:
    told = run.results.get("stability")
    if not told or not run.complete:
        return []
    under, near = stability_tables(told)
    worst, best = (f"{end} of {told['masks']}" for end in ("worst", "best"))
    quartiles = [Column(f"{name} quartile, %", 1) for name in ("lower", "middle", "upper")]
    shares = (*share_columns("mean over masks"), *share_columns(worst), *quartiles, *share_columns(best))
    moved = (Column("worst mask of each image", 3), Column("drift, last block", 3))
    right, like = (Column("patches"), *shares), (Column("patches"), *_mean_columns("cosine of attention"), *moved)
    accuracy, nearness = [], []
    for who, (name, *_) in zip([who for who in _WAYS if who in told], under["rows"], strict=True):
        seen, alike = told[who]["accuracy"], told[who]["similarity"]
        several = who == "random" and told["masks"] > 1
        low, high = (share_cells(seen[end] if several else None, "accuracy") for end in ("worst", "best"))
        middle = [100 * each if several else None for each in seen["quartiles"]]
        accuracy.append((name, *share_cells(seen, "mean"), *low, *middle, *high))
        of_worst = alike["worst_mask"]["mean"] if several else None
        nearness.append((name, *_mean(alike), of_worst, told[who]["drift"]["median"][-1]))
    return [Table("", under["caption"], right, tuple(accuracy)), Table("", near["caption"], like, tuple(nearness))]


def _corruptions(run: Run) -> list[Table]:
    told, shown = run.results.get("corruptions") or {}, corruption_content(run)
    if not told or shown is None:
        return []
    errors = {(cell["corruption"], cell["severity"]): 100 * cell["error"] for cell in told["cells"]}
    levels = told["severities"]
    columns = (Column("corruption"), *(Column(str(level), 1) for level in levels), Column("mean error, %", 1))
    rows = [
        (words["name"], *(errors[row["corruption"], level] for level in levels), 100 * row["error"], row.get("ce"))
        for words, row in zip(shown["rows"], told["rows"], strict=True)
    ]
    return [Table("", "Errors in percent by severity.", (*columns, Column("CE", 1)), tuple(rows))]


_SUITES: Mapping[str, Callable[[Run], list[Table]]] = {
    "threat-ladder": _ladder,
    "trade-off-of-accuracy-and-robustness": _trade_off,
    "maps-of-the-adapters": _maps,
    "stability-under-noisy-patches": _stability,
    "corruptions": _corruptions,
    "study": study_tables,
}
"""By the names of their files."""


def as_csv(table: Table) -> str:
    """Numbers in full. Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_harmless(column.heading) for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if cell is None else _harmless(cell) if isinstance(cell, str) else cell for cell in row])
    return buffer.getvalue()


def _harmless(text: str) -> str:
    risky = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if risky else text


_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


def as_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_in_markdown(cell) for cell in cells)} |"

    rule = "|".join("---" if column.digits is None else "---:" for column in table.columns)
    head = [f"*{_in_markdown(table.caption)}*", "", line([column.heading for column in table.columns]), f"|{rule}|"]
    return "\n".join([*head, *(line(texts(row, table)) for row in table.rows)]) + "\n"


_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\char34{}"}
)


def _in_markdown(text: str) -> str:
    return printable(text).translate(_MARKDOWN)


def as_latex(table: Table) -> str:
    """A `table` for \\usepackage{booktabs}; everything that TeX would read as a command is escaped."""
    aligned = "".join("l" if column.digits is None else "r" for column in table.columns)

    def line(cells: Sequence[str]) -> str:
        # An empty group first: a line that begins with a bracket or a star would be read as an option of the last one.
        return "{}" + " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"

    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{printable(table.caption).translate(_LATEX)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{aligned}}}",
        r"\toprule",
        line([printable(column.heading) for column in table.columns]),
        r"\midrule",
        *(line(texts(row, table)) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Callable[[Table], str]] = {"csv": as_csv, "tex": as_latex, "md": as_markdown}
