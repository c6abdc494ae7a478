"""An experiment runs to its decisions: shared start, chosen settings, seeds, given data, and resuming after a kill."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
from built_models import BUILT

from new_processes import signaled_at, start
from tiny_paper import use_tiny_paper
from vitadel.errors import UserError
from vitadel.papers.paper_documents import (
    DOCUMENTS,
    PAPERS,
    SETTLE,
    find_item,
    parse_paper,
    read_paper,
    values_checksum,
)
from vitadel.reporting.page import write_report
from vitadel.reproduce.jobs import TableRequest, table_jobs
from vitadel.reproduce.run import run_table
from vitadel.reproduce.table_plan import plan_table, plan_text
from vitadel.runtime.distributed import join_processes
from vitadel.training.recipes.compose import texts

EXPERIMENTS = [f"{SETTLE}/{item.id}" for item in read_paper(SETTLE).items]
TINY = """
paper: aas
citation: the tests' own
about: nothing
items:
  - id: table1
    title: Is longer better?
    protocol: "2/255"
    gpu_hours: 1
    cost_basis: a guess
    experiment:
      question: Is longer better?
      design: the same start
      known: nothing
      seeds: 2
      shared_start: true
      contrasts:
        - {id: longer, question: "longer?", column: clean, plus: [long], minus: [short], worth: 1}
        - {id: attacked, question: "attacked?", rows: [short, long], plus: [clean], minus: [attacked], primary: false}
        - {id: public, question: "public?", column: clean, plus: [public], minus: [short], primary: false}
    evaluations:
      attacks: {run: audit, settings: {eps: 2/255, independent: true, limit: 20, attacks: [fgsm]}}
    columns:
      - {id: clean, title: clean, of: attacks, value: clean}
      - {id: attacked, title: attacked, of: attacks, value: fgsm}
    figure: {x: clean, y: attacked}
    rows:
      - {id: short, train: "FILE#short", after: &start {model.weights: "FILE#long"}}
      - {id: long, train: "FILE#long", after: *start, choose: {key: optimizer.lr, values: [1e-3, 1e-5], clean: 1}}
      - {id: public, model: "zoo:shapes-standard"}
    test_data: shapes@test
    small: {about: smaller, minutes: 1, set: {data.limit: 128}, set_start: {data.limit: 192}}
"""


def request(**asked):
    return TableRequest(table="aas/table1", **asked)


def run(out, **asked):
    return run_table(table_jobs(request(**asked)), join_processes("cpu"), out=out, resume=out.exists()).results


def test_rows_share_their_start_and_choose_by_seeds_of_their_own(tmp_path, monkeypatch):
    use_tiny_paper(tmp_path, monkeypatch, TINY)
    jobs = table_jobs(request(small=True))
    assert jobs.seeds == 2
    assert len(jobs.jobs) == 2 + 2 + 1
    starts = {each.name for job in jobs.jobs if job.training for _, each in job.training.after}
    assert len(starts) == 1  # of seed 0
    by_seed = {job.seed: job.training for job in jobs.jobs if job.row.id == "long"}
    assert by_seed[0].candidates() == by_seed[1].candidates()
    assert {each.seed for each in by_seed[0].candidates()} == {1000}
    assert [each.overrides["optimizer.lr"] for each in by_seed[0].candidates()] == [1e-3, 1e-5]
    assert by_seed[0].overrides["data.limit"] == 128
    assert by_seed[0].after[0][1].overrides["data.limit"] == 192
    # The start of candidates has their seed; it is made once.
    assert len(jobs.trainings()) == 1 + 2 + 1 + 2 + 2
    assert table_jobs(request(seeds=4)).seeds == 4


def test_a_setting_is_chosen_by_held_out_accuracy(tmp_path, monkeypatch):
    use_tiny_paper(tmp_path, monkeypatch, TINY)
    training = next(job.training for job in table_jobs(request()).jobs if job.row.id == "long")
    for candidate, (clean, robust) in zip(training.candidates(), [(0.5, 0.4), (0.6, 0.1)], strict=True):
        folder = tmp_path / candidate.name
        folder.mkdir()
        score = {"schema": 1, "training": {"held_out": {"clean": clean, "robust": robust}}, "complete": False}
        (folder / "results.json").write_text(json.dumps(score))
    assert training.chosen(tmp_path) == {"optimizer.lr": 1e-5}
    half = replace(training, choose=training.choose.model_copy(update={"clean": 0.5}))
    assert half.candidates() == training.candidates()
    assert half.chosen(tmp_path) == {"optimizer.lr": 1e-3}


@pytest.mark.slow
def test_an_experiment_runs_to_its_decisions_and_is_the_same_after_a_kill(tmp_path, monkeypatch):
    use_tiny_paper(tmp_path, monkeypatch, TINY)
    whole = run(tmp_path / "whole", small=True)
    found = whole["reproduce"]
    assert not found["errors"]
    decisions = {entry["id"]: entry for entry in found["experiment"]["contrasts"]}
    assert decisions["longer"]["n"] == 20
    assert len(decisions["longer"]["seeds"]) == 2
    assert decisions["attacked"]["seeds"] == pytest.approx(
        [
            sum(row["cells"][0]["seeds"][seed] - row["cells"][1]["seeds"][seed] for row in found["rows"][:2]) / 2
            for seed in range(2)
        ]
    )
    assert decisions["public"]["verdict"] in ("confirmed", "undecided")
    killed = tmp_path / "killed"
    third_training = signal.SIGKILL, "vitadel.reproduce.run.run_harden", 3
    start(signaled_at, *third_training, run_tiny_paper, tmp_path, killed).finish(-signal.SIGKILL)
    assert len(list(killed.glob("trainings/*/results.json"))) == 2
    assert not (killed / "results.json").exists() or not json.loads((killed / "results.json").read_text())["complete"]
    assert run(killed, small=True)["reproduce"] == found
    write_report([tmp_path / "whole"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in ("Is longer better?", "Design, fixed before any result", "Decisions", "attacked (second)"):
        assert text in page
    assert "Paper and ours" not in page


def run_tiny_paper(folder, out):
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_paper(folder, patch, TINY)
        run(out, small=True)


def test_data_of_the_user_replaces_that_of_all_arms(tmp_path, monkeypatch):
    use_tiny_paper(tmp_path, monkeypatch, TINY)
    jobs = table_jobs(request(train_data="shapes@train", test_data="shapes@val"))
    for job in jobs.jobs:
        assert job.test_data == "shapes@val"
        for training in [] if job.training is None else [job.training, *job.training.earlier]:
            assert training.overrides["data.train"] == "shapes@train"
    monkeypatch.undo()
    with pytest.raises(UserError, match="are for --small"):
        table_jobs(TableRequest(table="aas/table5", train_data="shapes@train", test_data="shapes@test"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("plus: [long]", "plus: [longest]", "there is no cell longest, clean"),
        ("column: clean, plus: [long]", "plus: [long]", "give column or rows"),
        ("figure: {x: clean", "figure: {x: dirty", "the figure names a column that is not there, dirty"),
        ("seeds: 2", "seeds: 1", "greater than or equal to 2"),
        ("minus: [short], worth: 1}", "minus: [], worth: 1}", "at least 1 item"),
    ],
)
def test_designs_that_make_no_sense_are_refused(old, new, said):
    assert old in TINY
    with pytest.raises(UserError, match=said):
        parse_paper(TINY.replace(old, new, 1), "aas")


def test_a_changed_rule_changes_the_checksum_and_so_the_run():
    text = TINY.replace("FILE", "shapes/standard")
    before, after = parse_paper(text, "aas"), parse_paper(text.replace("worth: 1}", "worth: 2}"), "aas")
    assert values_checksum(before) != values_checksum(after)
    assert (*PAPERS, SETTLE) == DOCUMENTS


def test_runs_are_not_given_for_rows_that_are_made_of_others():
    with pytest.raises(UserError, match=r"made of tora-0.1 and tora-0.5, not trained"):
        table_jobs(TableRequest(table="settle/tora", have={"halfway-0.3": ("runs/x",)}))


def test_a_row_between_two_others_takes_both_trainings():
    jobs = table_jobs(TableRequest(table="settle/tora", seeds=2, rows=("halfway-0.3",), columns=("balance",)))
    assert [job.seed for job in jobs.jobs] == [0, 1]
    first = jobs.jobs[0]
    assert (first.training.row, first.other_end.row) == ("tora-0.1", "tora-0.5")
    assert first.training.after == first.other_end.after  # one phase 1
    assert len({job.model_name for job in jobs.jobs}) == 2
    assert {"tora-0.1", "tora-0.5", "tora"} == {each.row for each in jobs.trainings()}


@pytest.mark.parametrize("table", EXPERIMENTS)
def test_every_experiment_says_what_decides_it(table):
    item = find_item(table)[1]
    assert item.experiment.seeds >= 2
    assert sum(each.primary for each in item.experiment.contrasts) >= 1
    assert len({each.id for each in item.experiment.contrasts}) == len(item.experiment.contrasts)
    assert item.small is not None
    recipe = str(item.rows[0].train or next(row.train for row in item.rows if row.train)).partition("#")[0]
    said = texts(recipe)["expected"]
    for part in (
        item.experiment.question,
        item.experiment.rule,
        *(each.question for each in item.experiment.contrasts),
    ):
        assert part in said


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("table", EXPERIMENTS)
def test_every_experiment_can_be_planned(table, small):
    jobs = table_jobs(TableRequest(table=table, small=small, seeds=1))
    plan = plan_table(jobs, BUILT)
    assert plan["trainings"]
    assert not plan["needs"]
    assert jobs.item.experiment.question in plan_text(plan)
