"""`vitadel report`: one self-contained HTML page from any number of run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli.options import option, split_list


def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    out: Annotated[
        Path | None, option("HTML file (default: report.html in the run; comparison.html in the first of several)")
    ] = None,
    title: Annotated[str | None, option("title of the page")] = None,
    names: Annotated[str | None, option("what to call the runs, comma-separated, instead of their models")] = None,
    export: Annotated[
        Path | None, option("folder for tables (CSV, LaTeX, Markdown), figures (SVG, PNG), and files for other tools")
    ] = None,
    columns: Annotated[
        str | None, option("columns of the exported LaTeX and Markdown tables, e.g. run,clean,worst case")
    ] = None,
    robustbench: Annotated[
        bool, option("also write RobustBench's model_info file and new-model issue into each run", "--robustbench")
    ] = False,
) -> None:
    """Write one self-contained HTML page about runs."""
    from vitadel.reporting.page import write_report

    target = out or runs[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    called = split_list(names)
    write_report(runs, target, title=title, names=called)
    if export is not None:
        from vitadel.reporting import exports

        exports.export(runs, export, called, split_list(columns))
        typer.echo(f"tables and figures: {export}", err=True)
    if robustbench:
        from vitadel.reporting.robustbench import write_robustbench

        for path in (path for run in runs for path in write_robustbench(run)):
            typer.echo(f"for RobustBench: {path}", err=True)
    typer.echo(str(target))
