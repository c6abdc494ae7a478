"""Every table and figure can be planned, offline; rows that are missing features say so."""

from __future__ import annotations

import pytest

from vitadel.papers.paper_documents import PAPERS, find_item, read_paper
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.table_plan import plan_table, plan_text, summaries

TABLES = [f"{paper}/{item.id}" for paper in PAPERS for item in read_paper(paper).items]
# What cannot be run yet, exactly: (table, row or column). Rows of others' models need their weights.
NEEDS = {"light-recipe/table6": {"resnext-152"}}
OTHERS = {
    "tora/table1": 16,
    "afat/table1": 10,
    "afat/table2": 8,
}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_every_table_can_be_planned(table, tmp_path):
    jobs = table_jobs(TableRequest(table=table, data_root=str(tmp_path)))
    plan = plan_table(jobs)
    item = find_item(table)[1]
    assert set(plan["needs"]) == NEEDS.get(table, set()) or len(plan["needs"]) == OTHERS[table]
    planned = {row for each in plan["evaluations"].values() for row in each["rows"]}
    runnable = {row.id for row in item.rows} - set(plan["needs"])
    assert planned == (runnable if any(column.of for column in item.columns) else set())
    text = plan_text(plan)
    assert item.title in text
    assert "estimate" in text
    stated, found = set(item.data), {each["data"] for each in plan["files"]}
    assert found <= stated
    assert found == stated or any(column.needs for column in item.columns)
    for each in plan["files"]:
        assert each["path"].startswith(str(tmp_path))
        assert not each["there"]


@pytest.mark.parametrize("table", [name for name in TABLES if find_item(name)[1].small])
def test_every_small_table_can_be_planned(table):
    plan = plan_table(table_jobs(TableRequest(table=table, small=True, seeds=2)))
    assert plan["trainings"]
    assert not plan["files"]
    item = find_item(table)[1]
    assert item.small.minutes <= 60
    assert set(item.small.rows) <= {row.id for row in item.rows}


def test_the_five_tables_that_users_try_first_have_a_small_version():
    tables = "aas/table5", "light-recipe/table2", "light-recipe/table4", "robustness-tokens/table4", "tora/table2"
    for table in (*tables, "afat/table5"):
        assert find_item(table)[1].small is not None


def test_the_list_has_every_table_and_figure():
    names = [name for name, _ in summaries()]
    assert set(TABLES) <= set(names)
    assert len(names) == len(set(names))
    assert dict(summaries())["aas/table5"].startswith("Six methods of adversarial training")


def test_rows_that_share_a_model_share_its_training_and_evaluation():
    jobs = table_jobs(TableRequest(table="tora/table2"))
    assert len(jobs.jobs) == 15
    assert [each.row for each in jobs.trainings()] == ["tora", *(f"lambda-0.{k}" for k in (1, 3, 5, 7, 9))]
    assert len({job.evaluation_name("heads") for job in jobs.jobs}) == 5


def test_data_specs_move_below_the_root():
    (job,) = table_jobs(TableRequest(table="aas/table4", rows=("trades",), data_root="/big/disk")).jobs
    assert job.training.overrides["data.train"] == "imagenet:/big/disk/imagenet(classes=100,seed=0)@train"
    assert job.test_data == "imagenet:/big/disk/imagenet(classes=100,seed=0)@val"


def test_seeds_multiply_trainings_but_not_models_of_others():
    jobs = table_jobs(TableRequest(table="light-recipe/table9", seeds=3))
    assert sum(job.training is None for job in jobs.jobs) == 2
    assert sum(job.training is not None for job in jobs.jobs) == 6
