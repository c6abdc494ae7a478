"""Reproduce a tiny table: numbers, resumption, failures, shards, given runs, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from command_line import vitadel
from new_processes import signaled_at, start
from tiny_paper import PAPER, use_tiny_paper
from vitadel.errors import UserError
from vitadel.reporting.kinds.reproduce import _sizes, _values
from vitadel.reporting.page import write_report
from vitadel.reproduce.given_runs import read_have
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.run import run_shard, run_table
from vitadel.reproduce.table_shards import run_side_by_side
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.run_shards import Shard, read_shard


def reproduce(out, **asked):
    jobs = table_jobs(TableRequest(table="aas/table1", **asked))
    return run_table(jobs, join_processes("cpu"), out=out, resume=out.exists()).results["reproduce"]


def cell(found, row, column):
    names = [each["column"] for each in found["columns"]]
    return next(each for each in found["rows"] if each["row"] == row)["cells"][names.index(column)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The whole tiny table, and its folder."""
    folder = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_paper(folder, patch)
        found = reproduce(folder / "out")
        page = folder / "out" / "report.html"
        write_report([folder / "out"], page)
    return folder, found, page.read_text()


@pytest.mark.slow
def test_numbers_of_a_small_table_are_not_subtracted_from_the_papers(finished):
    _, found, page = finished
    whole, small = _values(found), _values({**found, "small": "a tiny model"})
    place = [column.heading for column in whole.columns].index("difference")
    assert "difference" in page
    assert any(row[place] is not None for row in whole.rows)
    assert small.columns == whole.columns[:place] + whole.columns[place + 1 :]
    assert small.rows == tuple(row[:place] + row[place + 1 :] for row in whole.rows)


@pytest.mark.slow
def test_a_table_is_run_and_compared(finished):
    folder, found, page = finished
    assert not found["errors"]
    ours = cell(found, "long", "attacked")
    audit = next((folder / "out" / "evaluations").glob("*long*-attacks-*"))
    entry = next(e for e in json.loads((audit / "results.json").read_text())["attacks"] if e["name"] == "pgd-2")
    assert ours["ours"] == pytest.approx(100 * entry["robust_accuracy"])
    assert ours["ci95"] == pytest.approx([100 * each for each in entry["ci95"]])
    assert ours["difference"] == pytest.approx(ours["ours"] - 60.0)
    assert cell(found, "public", "parameters")["ours"] > cell(found, "short", "parameters")["ours"]
    sizes = {row["row"]: row["size"] for row in found["rows"] if row["size"]}
    assert sizes["public"]["parameters"] / 1e6 == cell(found, "public", "parameters")["ours"]
    assert sizes["public"]["macs"] > sizes["short"]["macs"] > 0
    assert "Sizes" not in page  # its own columns have them
    bare = {**found, "columns": [], "rows": [{**row, "cells": []} for row in found["rows"]]}
    assert [row[0] for row in _sizes(bare).rows] == list(sizes)
    verdicts = {entry["claim"]: entry["verdict"] for entry in found["claims"]}
    assert verdicts["the public one is larger"] == "holds"
    assert "what was not measured" not in verdicts
    assert "the authors" in page
    assert "cannot be told from 20 images and 1 seed" in page
    assert page.count("<html") == 1
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_nothing_is_computed_twice(finished, monkeypatch):
    folder, found, _ = finished
    use_tiny_paper(folder, monkeypatch)
    times = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("results.json")}
    assert len(times) == 1 + 2 + 3 + 3  # the table, trainings, audits, sizes
    assert reproduce(folder / "out") == found
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.slow
def test_shards_give_the_same_page(finished, tmp_path, monkeypatch):
    folder, found, _ = finished
    use_tiny_paper(folder, monkeypatch)
    out = tmp_path / "out"
    jobs = table_jobs(TableRequest(table="aas/table1"))
    for part in (1, 2):
        assert not run_shard(jobs, Shard(part, 2), join_processes("cpu"), out, show=False)
    assert len(list(out.glob("trainings/*/results.json"))) == 2
    assert reproduce(out) == found


@pytest.mark.slow
def test_given_runs_are_used_and_others_refused(finished, tmp_path, monkeypatch):
    folder, found, _ = finished
    use_tiny_paper(folder, monkeypatch)
    short, long = (next((folder / "out" / "trainings").glob(f"*-{row}-*")) for row in ("short", "long"))
    asked = {"rows": ("short",), "columns": ("clean",)}
    again = reproduce(tmp_path / "again", **asked, have={"short": (str(short),)})
    assert cell(again, "short", "clean")["ours"] == cell(found, "short", "clean")["ours"]
    assert not (tmp_path / "again" / "trainings").exists()
    with pytest.raises(UserError, match=r"trained by another recipe .*\n  train.epochs: the row has 1, the run 2\n"):
        reproduce(tmp_path / "other", **asked, have={"short": (str(long),)})
    with pytest.raises(UserError, match="this is no run folder of `vitadel harden`"):
        reproduce(tmp_path / "none", **asked, have={"short": (str(tmp_path),)})
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_failed_row_does_not_stop_the_others_and_is_tried_again(tmp_path, monkeypatch):
    text = PAPER.replace("zoo:shapes-standard", "zoo:not-there")
    use_tiny_paper(tmp_path, monkeypatch, text)
    out = tmp_path / "out"
    found = reproduce(out, rows=("public", "short"), columns=("clean",))
    assert "not-there" in found["errors"]["public"]
    assert cell(found, "short", "clean")["ours"] is not None
    use_tiny_paper(tmp_path, monkeypatch, PAPER)
    monkeypatch.setattr("vitadel.reproduce.run.values_checksum", lambda paper: "the same values")
    shutil.copy(out / "results.json", tmp_path / "before.json")
    # The model exists now: only this row is run.
    settings = json.loads((out / "command.json").read_text())
    settings["settings"]["published"] = "the same values"[:16]
    (out / "command.json").write_text(json.dumps(settings))
    again = reproduce(out, rows=("public", "short"), columns=("clean",))
    assert not again["errors"]
    assert cell(again, "short", "clean") == cell(found, "short", "clean")


def reproduce_tiny_paper(folder: Path, out: Path) -> None:
    use_tiny_paper(folder, pytest.MonkeyPatch())
    reproduce(out)


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_page(finished, tmp_path, monkeypatch):
    folder, found, page = finished
    use_tiny_paper(folder, monkeypatch)
    out = tmp_path / "out"
    for moment, call, there in (
        ("vitadel.training.loop._Trainer._checked", 4, "trainings/*/metrics.jsonl"),
        ("vitadel.runtime.run_folder.FolderCache.save", 2, "evaluations/*"),
    ):
        start(signaled_at, signal.SIGKILL, moment, call, reproduce_tiny_paper, folder, out).finish(-signal.SIGKILL)
        assert list(out.glob(there))
    assert reproduce(out) == found
    for file in ("command.json",):  # the words typed differ between the tests' processes
        shutil.copy(folder / "out" / file, out / file)
    write_report([out], out / "report.html")
    assert (out / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reproduce", "aas/table9", "--plan"], "unknown table or figure 'table9' of aas; did you mean table"),
        (["reproduce", "aas/table5", "--rows", "tradse"], "unknown row 'tradse' of aas/table5; did you mean trades"),
        (["reproduce", "aas/table5", "--columns", "aa"], "unknown column 'aa' of aas/table5; did you mean aas"),
        (["reproduce", "aas/table5", "--have", "trades"], "--have takes ROW=RUNFOLDER"),
        (
            ["reproduce", "aas/table5", "--have", "trades=a,b"],
            "2 runs for trades, which has room for 1: give --seeds 2",
        ),
        (["reproduce", "aas/table5", "--have", "trades=a", "--rows", "mart"], "is not used: --rows leaves out trades"),
        (["reproduce", "aas/table5", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["reproduce", "aas/table1", "--small"], "aas/table1 has no small version; of this paper aas/table5 has one"),
        (["reproduce", "--small"], "give the table that is meant"),
        (["reproduce", "aas/table5", "--small", "--train-data", "shapes"], "--train-data and --test-data belong"),
        (["reproduce", "tora/table2", "--shard", "3/2", "--out", "x"], "--shard takes a part and the number of parts"),
    ],
)
def test_mistakes_get_one_message(words, said):
    assert said in vitadel(*words, code=2).stderr


def test_missing_data_is_named_with_its_source_and_what_runs_without(tmp_path):
    words = "reproduce", "light-recipe/table8", "--data-root", str(tmp_path), "--out", str(tmp_path / "out")
    said = vitadel(*words, code=2).stderr
    assert re.search(r"cifar10_sehwag.npz: images generated by DDPM, .* from https://github.com", said)
    assert "No row can run without it." in said
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert "Without it: --rows real." in vitadel(*words, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_changed_files_are_found_before_anything_is_trained(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "imagenette").mkdir()
    said = vitadel(
        "reproduce", "settle/finetune", "--small", "--data-root", str(tmp_path), "--out", str(tmp_path / "x"), code=2
    ).stderr
    assert "settle/finetune: cifar10: no complete copy below" in said
    assert "Other files with the same classes: --train-data SPEC" in said
    assert not (tmp_path / "x").exists()


def test_have_and_shard_are_read():
    assert read_have(["a=x", "b=y,z", "a=w"]) == {"a": ("x", "w"), "b": ("y", "z")}
    assert read_shard("2/3") == Shard(2, 3)


def test_devices_work_side_by_side_as_parts_of_one_table(monkeypatch, tmp_path):
    started = []

    class Process:
        def __init__(self, command, **_):
            started.append(command[1:])

        def wait(self):
            pass

    monkeypatch.setattr("vitadel.reproduce.table_shards.subprocess.Popen", Process)
    typed = ["vitadel", "reproduce", "aas/table5", "--device", "cuda:0,cuda:1", "--small", "--out=x", "--resume"]
    monkeypatch.setattr(sys, "argv", typed)
    run_side_by_side(tmp_path, ["cuda:0", "cuda:1"])
    common = ["-m", "vitadel", "reproduce", "aas/table5", "--small", "--out", str(tmp_path), "--device"]
    assert started == [[*common, "cuda:0", "--shard", "1/2"], [*common, "cuda:1", "--shard", "2/2"]]
