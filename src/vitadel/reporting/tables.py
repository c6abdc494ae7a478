"""The report's tables as files for papers and spreadsheets: CSV, LaTeX with booktabs, and Markdown.

CSV holds numbers in full; LaTeX and Markdown round them, each column to digits of its own.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitadel.reporting.figures import printable
from vitadel.reporting.gather import Run, aspects, class_scores, plain, run_labels
from vitadel.reporting.pairs import pairings
from vitadel.reporting.sections import OF_A_RUN, one_budget

__all__ = ["FORMATS", "Column", "Table", "as_csv", "as_latex", "as_markdown", "tables_of"]

Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading; `digits` after the point where the column holds numbers, None where it holds text."""

    heading: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All tables that have a row."""
    labels = run_labels(runs)
    found = [_runs(runs, labels), _attacks(runs, labels), _pairs(runs), _findings(runs, labels)]
    for place, run in enumerate(runs, start=1):
        number = f"-{place}" if len(runs) > 1 else ""
        found += [_classes(run, labels[place - 1], number), *_of_suites(run, labels[place - 1], number)]
    return [table for table in found if table.rows]


def _share(entry: Mapping[str, Any] | None, name: str) -> tuple[Cell, Cell, Cell]:
    """A share and its interval in percent; nothing where it was not measured."""
    if not entry:
        return None, None, None
    low, high = entry["ci95"]
    return 100 * entry[name], 100 * low, 100 * high


def _share_columns(name: str) -> tuple[Column, Column, Column]:
    return Column(f"{name}, %", 1), Column(f"{name}, from", 1), Column(f"{name}, to", 1)


_RUN = Column("run")


def _runs(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    texts = [Column(name) for name in ("data", "norm", "eps", "attacks", "seed", "finished", "protocol")]
    columns = (_RUN, Column("n", 0), *_share_columns("clean"), *_share_columns("worst case"), *texts)
    rows = []
    for run, label in zip(runs, labels, strict=True):
        known, results = aspects(run), run.results
        rows.append(
            (
                label,
                results.get("data", {}).get("n"),
                *_share(results.get("clean"), "accuracy"),
                *_share(results.get("worst_case"), "robust_accuracy"),
                *(known[name] for name in ("data", "norm", "eps", "attacks")),
                str(results.get("seed", "")),
                "yes" if run.complete else "no",
                (results.get("protocol") or {}).get("name") or "none",
            )
        )
    return Table("runs", "Accuracy, clean and in the worst case, with 95 % intervals (Wilson).", columns, tuple(rows))


def _attacks(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    counts = ("held", "n", "attacked", "gradient_calls", "forward_calls")
    told = (*counts, "seconds", "counts")
    columns = [_RUN, Column("attack"), *_share_columns("accuracy")]
    columns += [*(Column(name.replace("_", " "), 0) for name in counts), Column("seconds", 1), Column("counts")]
    rows = [
        (label, entry["name"], *_share(entry, "robust_accuracy"), *(entry[name] for name in told))
        for run, label in zip(runs, labels, strict=True)
        if one_budget(run)
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
    names = ("check", "verdict", "evidence", "advice")
    rows = [
        (label, *(plain(entry.get(name, "")) for name in names))
        for run, label in zip(runs, labels, strict=True)
        for entry in run.results.get("findings") or []
    ]
    return Table("findings", "What the checks found.", (_RUN, *map(Column, names)), tuple(rows))


def _classes(run: Run, label: str, number: str) -> Table:
    scores = class_scores(run) if one_budget(run) else []
    attacks = [name for name, _ in scores[0].attacked] if scores else []
    shares = ("clean", *attacks, "worst case")
    rows = []
    for score in scores:
        counts = (score.correct, *(count for _, count in score.attacked), score.held)
        rows.append((score.name, score.n, *(None if count is None else 100 * count / score.n for count in counts)))
    columns = (Column("class"), Column("n", 0), *(Column(f"{name}, %", 1) for name in shares))
    return Table(f"classes{number}", f"Accuracy of {label} by class.", columns, tuple(rows))


def _of_suites(run: Run, label: str, number: str) -> list[Table]:
    """What sections of other suites show as tables, word by word."""
    found = []
    for section in filter(None, (make(run) for make in OF_A_RUN)):
        content = section.content
        shown: Sequence[Mapping[str, Any]] = content["tables"] if section.kind == "measured" else ()
        if section.kind == "corruptions" and content["rows"]:
            headings = ["corruption", *map(str, content["severities"]), "mean error, %", "CE"]
            cells = [[row["name"], *row["cells"], row["error"], row["ce"]] for row in content["rows"]]
            shown = [{"caption": "Errors in percent by severity.", "headings": headings, "rows": cells}]
        if section.kind == "ladder":
            headings = ["attacker", "knows", "attack", *content["budgets"]]
            cells = [[row["attacker"], row["knows"], row["attack"], *row["cells"]] for row in content["rows"]]
            shown = [{"caption": "What secret tokens are worth.", "headings": headings, "rows": cells}]
        slug = "-".join(section.title.lower().split())
        for place, table in enumerate(shown, start=1):
            name = f"{slug}{number}" + (f"-{place}" if len(shown) > 1 else "")
            rows = tuple(tuple(map(str, row)) for row in table["rows"])
            found.append(Table(name, f"{label}: {table['caption']}", tuple(map(Column, table["headings"])), rows))
    return found


def as_csv(table: Table) -> str:
    """Numbers in full. Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_harmless(column.heading) for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if cell is None else _harmless(cell) if isinstance(cell, str) else cell for cell in row])
    return buffer.getvalue()


def _harmless(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _rounded(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    return f"{cell:.{column.digits or 0}f}" if isinstance(cell, float) else str(cell)


def as_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_in_markdown(cell) for cell in cells)} |"

    rule = "|".join("---" if column.digits is None else "---:" for column in table.columns)
    head = [f"*{_in_markdown(table.caption)}*", "", line([column.heading for column in table.columns]), f"|{rule}|"]
    return "\n".join([*head, *(line(_texts(row, table)) for row in table.rows)]) + "\n"


def _texts(row: Sequence[Cell], table: Table) -> list[str]:
    return [_rounded(cell, column) for cell, column in zip(row, table.columns, strict=True)]


_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\char34{}"}
)


def _in_markdown(text: str) -> str:
    return text.translate(_MARKDOWN)


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
        *(line(_texts(row, table)) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Callable[[Table], str]] = {"csv": as_csv, "tex": as_latex, "md": as_markdown}
