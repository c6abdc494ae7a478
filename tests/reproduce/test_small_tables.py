"""Every small table runs to its end, with trainings and attacks of a few steps on a few images."""

from __future__ import annotations

import pytest

from docs_world import shrink
from vitadel.papers.paper_documents import PAPERS, read_paper
from vitadel.reporting.page import write_report
from vitadel.reproduce import evaluations
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.run import run_table
from vitadel.runtime.distributed import join_processes

TABLES = [f"{paper}/{item.id}" for paper in PAPERS for item in read_paper(paper).items if item.small]
IMAGES = 6


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
