"""Tables and figures of a report as files: CSV, LaTeX and Markdown; SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitadel.errors import UserError
from vitadel.quantities import plain
from vitadel.reporting.audit_figures import class_scores
from vitadel.reporting.comparison import Pairing, overview, pairings
from vitadel.reporting.interchange import interchange_files
from vitadel.reporting.kind import Section, kind_of, name_damage
from vitadel.reporting.kinds.audit import accuracy_section
from vitadel.reporting.read_runs import Run, aspects, read_all, run_labels
from vitadel.reporting.tables import (
    FORMATS,
    Cell,
    Column,
    Table,
    check_columns,
    choose_columns,
    narrow,
    share_cells,
    share_columns,
    size_cells,
)
from vitadel.runtime.run_folder import write_atomically


def export(paths: Sequence[Path], out: Path, names: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Path]:
    """Write DIR/tables and DIR/figures for papers, and files for other tools; returns all of them.

    They replace those of an earlier export. `names` are what to call the runs; `columns` are those of the LaTeX and
    Markdown tables that have any of them, else the tables are made narrow by themselves. CSV has all columns.
    """
    if out.is_file():
        raise UserError(f"{out} is a file; --export takes a folder, for tables/ and figures/ below it")
    runs = read_all(paths, names)
    tables = tables_of(runs)
    check_columns(columns, tables)
    shared = overview(runs, pairings(runs)) if len(runs) > 1 else filter(None, [accuracy_section(runs)])
    pictures = {picture.name: picture for section in shared if (picture := section.picture)}
    for place, run in enumerate(runs, start=1):
        number = f"-{place}" if len(runs) > 1 else ""
        with name_damage(run):
            drawn = [section.picture for section in kind_of(run).sections(run)]
        pictures |= {f"{picture.name}{number}": picture for picture in drawn if picture}
    written: list[Path] = []

    def write(path: Path, content: bytes) -> None:
        write_atomically(path, content)
        written.append(path)

    for table in tables:
        for ending, convert in FORMATS.items():
            shown = table if ending == "csv" else choose_columns(narrow(table), columns)
            write(out / "tables" / f"{table.name}.{ending}", convert(shown).encode("utf-8", errors="replace"))
    for name, text in interchange_files(runs, run_labels(runs)).items():
        write(out / name, text.encode("utf-8", errors="replace"))
    for name, picture in pictures.items():
        write(out / "figures" / f"{name}.svg", picture.svg_file())
        write(out / "figures" / f"{name}.png", picture.png())
    return written


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """All tables that have a row."""
    labels = run_labels(runs)
    found = [_runs(runs, labels), _attacks(runs, labels), _pairs(pairings(runs)), _findings(runs, labels)]
    for place, (run, label) in enumerate(zip(runs, labels, strict=True), start=1):
        number = f"-{place}" if len(runs) > 1 else ""
        found.append(_classes(run, label, number))
        with name_damage(run):
            sections: Sequence[Section] = kind_of(run).sections(run)
            own = [table for section in sections for table in section.files(number)]
        found += [replace(table, caption=f"{label}: {table.caption}") for table in own]
    return [table for table in found if table.rows]


_RUN = Column("run")


def _runs(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    shown = ("data", "size", "precision", "norm", "eps", "attacks")
    texts = [Column(name) for name in (*shown, "seed", "finished", "protocol")]
    sizes = (Column("parameters, M", 2), Column("GMACs", 2))
    columns = (_RUN, *sizes, Column("n", 0), *share_columns("clean"), *share_columns("worst case"), *texts)
    rows = []
    for run, label in zip(runs, labels, strict=True):
        known, results = aspects(run), run.results
        rows.append(
            (
                label,
                *size_cells(results.get("model", {})),
                results.get("data", {}).get("n"),
                *share_cells(results.get("clean"), "accuracy"),
                *share_cells(results.get("worst_case"), "robust_accuracy"),
                *(known[name] for name in shown),
                str(results.get("seed", "")),
                "yes" if run.complete else "no",
                (results.get("protocol") or {}).get("name") or "none",
            )
        )
    return Table("Accuracy, clean and in the worst case, with 95 % intervals (Wilson).", columns, tuple(rows), "runs")


def _attacks(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    counts = ("held", "n", "attacked", "gradient_calls", "forward_calls")
    columns = [_RUN, Column("attack"), *share_columns("accuracy")]
    columns += [*(Column(name.replace("_", " "), 0) for name in counts), Column("seconds", 1), Column("counts")]
    rows = [
        (
            *(label, entry["name"], *share_cells(entry, "robust_accuracy")),
            *(entry[name] for name in (*counts, "seconds", "counts")),
        )
        for run, label in zip(runs, labels, strict=True)
        if kind_of(run).one_budget
        for entry in run.attacks
    ]
    return Table("Accuracy under each attack, and what it cost.", tuple(columns), tuple(rows), "attacks")


def _pairs(pairs: Sequence[Pairing]) -> Table:
    columns = (
        *(Column("A"), Column("B"), Column("images"), Column("A - B, points", 1), Column("from", 1), Column("to", 1)),
        *(Column("p (McNemar)", 4), Column("p (Holm)", 4)),
        *(Column(name, 0) for name in ("both right", "only A", "only B", "neither")),
    )
    rows: list[tuple[Cell, ...]] = []
    for pair in pairs:
        for row in pair.rows:
            points = [100 * value for value in (row.difference, *row.ci95)]
            counts = (row.both, row.only_first, row.only_second, row.neither)
            rows.append((pair.first, pair.second, row.what, *points, row.p_value, row.p_holm, *counts))
    return Table("Runs on the same images, one by one.", columns, tuple(rows), "pairs")


def _findings(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    names = ("check", "title", "verdict", "evidence", "advice")
    rows = [
        (label, *(plain(entry.get(name, "")) for name in names))
        for run, label in zip(runs, labels, strict=True)
        for entry in run.results.get("findings") or []
    ]
    return Table("What the checks found.", (_RUN, *map(Column, names)), tuple(rows), "findings")


def _classes(run: Run, label: str, number: str) -> Table:
    scores = class_scores(run) if kind_of(run).one_budget else []
    attacks = [name for name, _ in scores[0].attacked] if scores else []
    rows = []
    for score in scores:
        counts = (score.correct, *(count for _, count in score.attacked), score.held)
        rows.append((score.name, score.n, *(None if count is None else 100 * count / score.n for count in counts)))
    columns = (
        Column("class"),
        Column("n", 0),
        *(Column(f"{name}, %", 1) for name in ("clean", *attacks, "worst case")),
    )
    return Table(f"Accuracy of {label} by class.", columns, tuple(rows), f"classes{number}")
