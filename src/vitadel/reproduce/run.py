"""Reproduce a table: train what is missing, evaluate what is missing, and compare with the paper, in one run folder.

Trainings and evaluations are runs of their own below the folder (`trainings/`, `evaluations/`), so that a killed run
goes on where it was, and several processes can work on one table (`--shard`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from vitadel.errors import UserError
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, result_header
from vitadel.papers.paper_documents import Column, values_checksum
from vitadel.reproduce.decisions import decide_all
from vitadel.reproduce.evaluations import Subject, evaluate
from vitadel.reproduce.given_runs import check_given
from vitadel.reproduce.jobs import Job, TableJobs, Training
from vitadel.reproduce.measurements import Cell, read_cell
from vitadel.reproduce.required_files import check_files
from vitadel.reproduce.verdicts_on_claims import judge_claims
from vitadel.runtime.distributed import Processes
from vitadel.runtime.run_folder import Command, RunFolder, announce_run, write_json
from vitadel.runtime.run_shards import Shard
from vitadel.statistics import bootstrap_mean
from vitadel.training.recipes.build import build_recipe
from vitadel.training.run import run_harden, title_of

VERB = "reproduce"
_WAIT = 5.0  # seconds between looks at a training that another process works on


def run_table(table: TableJobs, processes: Processes, **options: Unpack[RunOptions]) -> Outcome:
    """Run all jobs and compare. A row that fails is reported with its error; the others go on."""
    check_files(table)
    out = options.get("out")
    if out is not None:
        check_given(table, Path(out))
        _reopen_failed(Path(out), options.get("resume", False))
    else:
        check_given(table, Path())

    def work(run: Run) -> dict[str, Any]:
        errors = _Runner(table, processes, run.path, run.show_progress).run_all(table.jobs)
        cells = _cells(table, run.path, errors)
        return _results(table, cells, errors, _sizes(table, run.path))

    return execute(VERB, table.name, _settings(table), processes, work, **options)


def run_shard(table: TableJobs, shard: Shard, processes: Processes, out: Path, show: bool) -> dict[str, str]:
    """Run the jobs of part i of n in the folder of the whole table; returns the errors of rows. No page is made."""
    check_files(table)
    check_given(table, out)
    announce_run(Command(VERB, _settings(table), sys.argv[1:]), table.name, out)
    by_model: dict[str, list[Job]] = {}
    for job in table.jobs:
        by_model.setdefault(job.model_name, []).append(job)
    mine = [job for number, jobs in enumerate(by_model.values()) if shard.has(number) for job in jobs]
    return _Runner(table, processes, out, show).run_all(mine)


def _settings(table: TableJobs) -> dict[str, Any]:
    asked = asdict(table.request)
    have = {row: list(runs) for row, runs in table.request.have.items()}
    return {**asked, "have": have, "published": values_checksum(table.paper)[:16]}


def _reopen_failed(out: Path, resume: bool) -> None:
    """Let a finished run with failed rows be resumed, which tries them again."""
    folder = RunFolder(out)
    if resume and folder.complete and (results := folder.results()).get("reproduce", {}).get("errors"):
        write_json(out / "results.json", {**results, "complete": False})


@dataclass(frozen=True)
class _Runner:
    table: TableJobs
    processes: Processes
    folder: Path
    show_progress: bool

    def run_all(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Train and evaluate; returns the errors by row."""
        errors: dict[str, str] = {}
        for job in jobs:
            error = self._guarded(lambda job=job: self._run(job))  # type: ignore[misc]
            if error is not None:
                errors[job.row.id] = error if job.seed == 0 else f"seed {job.seed}: {error}"
                self._say(f"row {job.row.id}: {error}")
        return errors

    def _guarded(self, work: Callable[[], None]) -> str | None:
        try:
            work()
        except UserError as error:
            return str(error)
        except Exception as error:  # a row must not stop the others, whatever goes wrong in it
            return f"{type(error).__name__}: {error}"
        return None

    def _say(self, text: str) -> None:
        if self.show_progress and self.processes.is_main:
            sys.stderr.write(f"{self.table.name}: {text}\n")

    def _options(self, kind: str, name: str) -> RunOptions:
        return {"out": self.folder / kind / name, "resume": True, "show_progress": self.show_progress}

    def _run(self, job: Job) -> None:
        for training in (job.training, job.other_end):
            if training is not None and job.have is None:
                self._train(training)
        for name, evaluation in job.evaluations.items():
            folder = self.folder / "evaluations" / job.evaluation_name(name)
            if not _is_finished(folder):
                self._say(f"row {job.row.id}, seed {job.seed}: {name}")
                options = self._options("evaluations", job.evaluation_name(name))
                evaluate(self._subject(job), evaluation, self.processes, options)

    def _subject(self, job: Job) -> Subject:
        root = self.table.request.data_root
        heads = self._head_of(job)
        if job.training is None:
            return Subject(job.have or str(job.row.model), job.row.options, job.test_data, root, heads=heads)
        folder = Path(job.have) if job.have is not None else self.folder / "trainings" / job.training.name
        end = None if job.other_end is None else str(self.folder / "trainings" / job.other_end.name)
        return Subject(str(folder), {}, job.test_data, root, folder, heads, end)

    def _head_of(self, job: Job) -> Callable[[str], Path]:
        return lambda name: self.folder / "evaluations" / job.evaluation_name(name)

    def _train(self, training: Training) -> None:
        for earlier in training.earlier:
            self._train(earlier)
        folder = self.folder / "trainings" / training.name
        while not _is_finished(folder):
            try:
                title = title_of(training.recipe, training.row)
                document = training.document(self.folder / "trainings")
                self._say(f"training {training.name}")
                options = self._options("trainings", training.name)
                run_harden(
                    build_recipe(document, title),
                    title,
                    self.processes,
                    data_root=self.table.request.data_root,
                    **options,
                )
            except UserError as error:
                if "another process is working" not in str(error):
                    raise
                time.sleep(_WAIT)  # another shard needs the same start and trains it


def _is_finished(path: Path) -> bool:
    """Whether the run there is finished; what it left if it was killed right after its results is removed."""
    folder = RunFolder(path)
    if folder.complete:
        folder.finish()
    return folder.complete


def _cells(table: TableJobs, folder: Path, errors: dict[str, str]) -> dict[tuple[str, str], list[Cell]]:
    """All cells that were measured; what cannot be read is added to the errors."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for job in table.jobs:
        if job.row.id in errors:
            continue
        for column in table.columns:
            if column.of is None or column.id not in job.values:
                continue
            try:
                cell = _cell(job, column, folder)
            except (UserError, LookupError, OSError, ValueError, TypeError) as error:
                errors[job.row.id] = f"column {column.id} cannot be read: {type(error).__name__} {error}"
                continue
            cells.setdefault((job.row.id, column.id), []).append(cell)
    return cells


def _cell(job: Job, column: Column, folder: Path) -> Cell:
    evaluation = job.evaluations[str(column.of)]
    place = folder / "evaluations" / job.evaluation_name(str(column.of))
    if evaluation.run == "training":
        if job.training is None:  # a model of others: nothing is known of its training
            return Cell(None)
        place = Path(job.have) if job.have is not None else folder / "trainings" / job.training.name
    cell = read_cell(evaluation.run, place, job.values[column.id])
    value = job.values[column.id]
    if value in ("hours", "passes") and job.training is not None and job.training.after:
        starts = [read_cell("training", folder / "trainings" / each.name, value) for _, each in job.training.after]
        spent = [each.value for each in (cell, *starts)]
        # A given run does not say what its start took.
        return Cell(None if job.have is not None or None in spent else sum(each or 0.0 for each in spent))
    return cell


def _sizes(table: TableJobs, folder: Path) -> dict[str, Any]:
    """Parameters and multiply-adds of the rows' models, as their evaluations recorded them."""
    sizes: dict[str, Any] = {}
    for job in table.jobs:
        for name in job.evaluations:
            place = RunFolder(folder / "evaluations" / job.evaluation_name(name))
            # A disk that fails here must end the run, or it would be finished without these sizes.
            results = place.results() if (place.path / "results.json").exists() else {}
            model = results.get("model", {}) if results.get("complete") else {}
            if "parameters" in model:
                sizes.setdefault(job.row.id, {key: model.get(key) for key in ("parameters", "macs")})
    return sizes


def _results(
    table: TableJobs,
    cells: Mapping[tuple[str, str], Sequence[Cell]],
    errors: Mapping[str, str],
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    item, request = table.item, table.request
    return {
        **result_header(0),
        "model": {"spec": table.name},
        "data": {"spec": _data(table)},
        "reproduce": {
            "paper": table.paper.paper,
            "citation": table.paper.citation,
            "table": item.id,
            "title": item.title,
            "protocol": item.protocol,
            "small": None if not request.small or item.small is None else item.small.about,
            "given_data": request.train_data,
            "seeds": table.seeds,
            "columns": [_about(column) for column in table.columns],
            "rows": [
                {
                    "row": row.id,
                    "note": row.note,
                    "size": sizes.get(row.id),
                    "error": errors.get(row.id),
                    "needs": table.lacking.get(row.id),
                    "cells": [
                        _entry(item.published(row.id, column.id), column, cells.get((row.id, column.id), ()))
                        for column in table.columns
                    ],
                }
                for row in table.rows
            ],
            "claims": judge_claims(item, cells),
            **({} if item.experiment is None else {"experiment": decide_all(item, cells)}),
            **({} if item.figure is None else {"figure": item.figure.model_dump(mode="json")}),
            "errors": dict(errors),
            "notes": [*table.paper.notes, *item.notes],
        },
    }


def _data(table: TableJobs) -> str:
    request = table.request
    specs = dict.fromkeys(job.test_data for job in table.jobs if job.test_data is not None)
    return request.test_data or ", ".join(specs) or "the paper's data"


def _about(column: Column) -> dict[str, Any]:
    about = column.model_dump(include={"id", "title", "better", "percent", "digits", "needs"})
    return {"column": about.pop("id"), **about}


def _entry(published: float | None, column: Column, cells: Sequence[Cell]) -> dict[str, Any]:
    """A cell of the page, in the unit of the paper: the mean over seeds, with the interval over images."""
    scale = 100.0 if column.percent else 1.0
    known = [cell for cell in cells if cell.value is not None]
    entry: dict[str, Any] = {"published": published, "ours": None, "ci95": None, "n": None, "seeds": []}
    if pages := [cell.page for cell in cells if cell.page is not None]:
        entry["page"] = pages
    if not known:
        return entry
    values = [scale * float(cell.value or 0) for cell in known]
    interval = _interval(known)
    entry |= {
        "ours": sum(values) / len(values),
        "ci95": None if interval is None else [scale * each for each in interval],
        "n": known[0].n,
        "seeds": values,
        "difference": None if published is None else sum(values) / len(values) - published,
    }
    return entry


def _interval(cells: Sequence[Cell]) -> Sequence[float] | None:
    """Of one seed its own; of several, that of the mean over seeds, with images as samples."""
    if len(cells) == 1:
        return cells[0].ci95
    images = [cell.images for cell in cells if cell.images is not None]
    if len(images) < len(cells) or len({len(each) for each in images}) > 1:
        return None
    return bootstrap_mean(np.mean(images, axis=0))
