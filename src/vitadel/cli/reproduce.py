"""`vitadel reproduce`: the tables and figures of the papers, one command each, paper beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import present, run_options
from vitadel.cli.options import RunFlags, expand_groups, option, rare, split_list
from vitadel.errors import UserError

if TYPE_CHECKING:
    from vitadel.reproduce.jobs import TableJobs


@expand_groups
def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[PAPER/TABLE]", help="e.g. aas/table5; without it, all are listed")
    ] = None,
    plan: Annotated[bool, option("show what will run, the files it needs and what it costs", "--plan")] = False,
    small: Annotated[bool, option("the same table in small, on shipped or given data", "--small")] = False,
    rows: Annotated[str | None, option("only these rows, comma-separated")] = None,
    columns: Annotated[str | None, option("only these columns, comma-separated")] = None,
    seeds: Annotated[
        int | None,
        option("number of trainings of each row, with the seeds 0, 1, ...; by default 1, or the experiment's"),
    ] = None,
    have: Annotated[list[str] | None, option("ROW=RUNFOLDER: use what is trained already; repeatable")] = None,
    data_root: options.DataRoot = None,
    train_data: Annotated[
        str | None, rare("training data of a small table or an experiment, e.g. parquet:train.parquet")
    ] = None,
    test_data: Annotated[str | None, rare("its test data")] = None,
    shard: Annotated[str | None, rare("part I/N of the rows, for a cluster; all parts share --out")] = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Reproduce a table or figure of a paper, and compare with it.

    Trains what is missing, evaluates what is missing, and writes a page with the paper's numbers beside ours. Several
    devices (--device cuda:0,cuda:1) work side by side.
    """
    from vitadel.reproduce.given_runs import read_have
    from vitadel.reproduce.jobs import TableRequest, table_jobs

    if table is None:
        if any((small, rows, columns, have, shard)):
            raise UserError(
                "give the table that is meant, as in vitadel reproduce aas/table5; without one, all are listed"
            )
        _list()
        return
    request = TableRequest(
        table=table,
        rows=split_list(rows) or None,
        columns=split_list(columns) or None,
        seeds=seeds,
        small=small,
        data_root=None if data_root is None else str(data_root),
        train_data=train_data,
        test_data=test_data,
        have=read_have(have or []),
    )
    jobs = table_jobs(request)
    if plan:
        _plan(jobs, run.as_json)
    elif shard is not None:
        _run_shard(jobs, shard, run)
    else:
        _run(jobs, run)


def _list() -> None:
    from vitadel.reporting.terminal import show_names
    from vitadel.reproduce.table_plan import summaries

    show_names(summaries())
    typer.echo("\nvitadel reproduce PAPER/TABLE --plan shows what one of them needs; hours are estimates for an A100.")


def _plan(jobs: TableJobs, as_json: bool) -> None:
    import json

    from vitadel.reproduce.table_plan import plan_table, plan_text, time_here

    planned = {**plan_table(jobs), "here": time_here(jobs)}
    typer.echo(json.dumps(planned, indent=2) if as_json else plan_text(planned))


def _run_shard(jobs: TableJobs, shard: str, run: RunFlags) -> None:
    from vitadel.reproduce.run import run_shard
    from vitadel.runtime.distributed import join_processes
    from vitadel.runtime.run_shards import read_shard

    if run.out is None:
        raise UserError("--shard needs --out: all parts of the table work in one folder")
    errors = run_shard(jobs, read_shard(shard), join_processes(run.device), run.out, show=True)
    _end_if_failed(errors, run.out)
    typer.echo(str(run.out))


def _run(jobs: TableJobs, run: RunFlags) -> None:
    from dataclasses import replace

    from vitadel.reproduce.run import run_table
    from vitadel.reproduce.table_shards import new_folder, run_side_by_side
    from vitadel.runtime.distributed import join_processes

    devices = split_list(run.device)
    if len(devices) > 1:
        run = replace(run, out=run.out or new_folder(jobs.name), device=devices[0], resume=True)
        assert run.out is not None
        run_side_by_side(run.out, devices)
    outcome = run_table(jobs, join_processes(run.device), **run_options(run))
    if outcome.is_main and outcome.folder is not None:
        _write_pages(outcome.folder.path)
        present(outcome, run)
        _end_if_failed(outcome.results["reproduce"]["errors"], outcome.folder.path)


def _write_pages(folder: Path) -> None:
    """Write tables as CSV, LaTeX and Markdown, and the pages of runs that figures link to."""
    from vitadel.reporting.exports import export
    from vitadel.reporting.page import write_report
    from vitadel.runtime.run_folder import RunFolder

    export([folder], folder / "export")
    for run in sorted(found for kind in ("evaluations", "trainings") for found in folder.glob(f"{kind}/*")):
        # One that failed gets its page when it is resumed and finished.
        if RunFolder(run).complete and not (run / "report.html").exists() and (run / "command.json").exists():
            write_report([run], run / "report.html")


def _end_if_failed(errors: dict[str, str], folder: Path) -> None:
    if errors:
        lines = "\n".join(f"  {row}: {error}" for row, error in errors.items())
        raise UserError(
            f"{len(errors)} row{'s' * (len(errors) > 1)} failed; the others are done, in {folder}:\n{lines}\n"
            "Repeat the command with --out and --resume to try them again."
        )
