"""Every small table runs to its end, with trainings and attacks of a few steps on a few images."""

from __future__ import annotations

import html

import pytest

from docs_world import shrink
from vitadel.evaluation.stability import run as stability
from vitadel.papers.paper_documents import PAPERS, SETTLE, find_item, read_paper
from vitadel.reporting.page import write_report
from vitadel.reproduce import evaluations
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.run import run_table
from vitadel.runtime.distributed import join_processes

TABLES = [f"{paper}/{item.id}" for paper in PAPERS for item in read_paper(paper).items if item.small]
IMAGES = 6
STABILITY = stability.StabilityRequest


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_small_table_runs_to_its_end(table, tmp_path, monkeypatch):
    shrink(tmp_path, monkeypatch)
    read = evaluations.read_settings
    monkeypatch.setattr(evaluations, "read_settings", lambda settings: {**read(settings), "limit": IMAGES})
    jobs = table_jobs(TableRequest(table=table, small=True))
    found = run_table(jobs, join_processes("cpu"), out=tmp_path / "out").results["reproduce"]
    assert not found["errors"]
    lacking = {column["column"] for column in found["columns"] if column["needs"]}
    for row in found["rows"]:
        names = [each["column"] for each in found["columns"]]
        measured = {name for name, cell in zip(names, row["cells"], strict=True) if cell["ours"] is not None}
        assert row["needs"] or row["row"] not in jobs.item.small.rows or measured == set(names) - lacking
    assert found["claims"]
    write_report([tmp_path / "out"], tmp_path / "out" / "report.html")
    assert "compare orderings, not numbers" in (tmp_path / "out" / "report.html").read_text()


ROWS = {
    "afat": ("plain", "afat-10", "random-10", "credited-10"),
    "tokens": ("deit-300", "vit-300"),
    "secrecy": ("deit-300", "vit-300"),
    "tora": ("matched-0.5", "halfway-0.3"),
    "light": ("xcit-w10-weak-0.5", "xcit-w0-full-0.05"),
    "light-imagenette": ("xcit-w10-weak-0.5", "xcit-w0-full-0.05"),
    "finetune": ("robust", "scratch"),
    "five": ("pgd-at", "light", "aas-at", "afat", "tora-robust", "tokens-robust"),
}
"""Arms of the experiments that differ in kind."""
ON_SHAPES = ("afat", "light", "light-imagenette", "five")


@pytest.mark.slow
@pytest.mark.parametrize("name", [item.id for item in read_paper(SETTLE).items])
def test_an_experiment_runs_to_its_end_in_small(name, tmp_path, monkeypatch):
    shrink(tmp_path, monkeypatch)
    read = evaluations.read_settings
    monkeypatch.setattr(evaluations, "read_settings", lambda settings: {**read(settings), **_smaller(settings)})
    data = {"train_data": "shapes@train", "test_data": "shapes@test"} if name in ON_SHAPES else {}
    monkeypatch.setattr(stability, "StabilityRequest", STABILITY)  # a document names its fields
    monkeypatch.setattr("vitadel.reproduce.run.check_files", lambda table: None)
    monkeypatch.setattr("vitadel.reproduce.jobs.find_item", _with_fewer_choices)
    jobs = table_jobs(TableRequest(table=f"{SETTLE}/{name}", small=True, seeds=1, rows=ROWS[name], **data))
    found = run_table(jobs, join_processes("cpu"), out=tmp_path / "out").results["reproduce"]
    assert not found["errors"]
    for row, cells in ((jobs.item.row(row["row"]), row["cells"]) for row in found["rows"]):
        names = [each["column"] for each in found["columns"]]
        measured = {each for each, cell in zip(names, cells, strict=True) if cell["ours"] is not None}
        assert measured == set(row.only or names)
    decided = [entry for entry in found["experiment"]["contrasts"] if entry["difference"] is not None]
    assert decided or name in ("tora", "light", "light-imagenette", "finetune")  # whose contrasts need more arms
    write_report([tmp_path / "out"], tmp_path / "out" / "report.html")
    assert jobs.item.experiment.question in html.unescape((tmp_path / "out" / "report.html").read_text())


def _with_fewer_choices(name):
    paper, item = find_item(name)

    def two(choose):
        return None if choose is None else choose.model_copy(update={"values": choose.values[:2]})

    rows = [
        row.model_copy(update={"choose": two(row.choose), "choose_start": two(row.choose_start)}) for row in item.rows
    ]
    return paper, item.model_copy(update={"rows": tuple(rows)})


def _smaller(settings):
    """Fewer images and searches of an evaluation."""
    fewer = {"masks": 1, "training_steps": 1}
    extraction = {"extraction": (4, 1)} if "T7" in settings.get("levels", ()) else {}
    return {"limit": IMAGES, **{key: value for key, value in fewer.items() if key in settings}, **extraction}
