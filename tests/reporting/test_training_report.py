"""Training curves: there for a training, absent elsewhere, and spoken of in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from run_folders import write_run
from vitadel.errors import UserError
from vitadel.reporting.kinds.training import compare_trainings, draw_training
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import read_run

ROWS = [
    {"step": 1, "loss": 2.0},
    {"step": 2, "loss": 1.0},
    {"step": 2, "epoch": 0, "validation_clean": 0.5, "validation_robust": 0.25},
    {"step": 3, "loss": 0.5},
]


def trained(path, rows=ROWS, verb="harden"):
    folder = write_run(path, correct=[True, False], attacks={}, verb=verb)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


def test_an_audit_has_no_curves(tmp_path):
    assert "Curves of a training" not in render([trained(tmp_path / "audit", verb="audit")])
    assert "Curves of a training" not in render([trained(tmp_path / "training", rows=())])


def test_curves_show_every_step_and_the_means_of_epochs(tmp_path):
    run = trained(tmp_path / "training")
    picture = draw_training(run)
    loss, accuracy = picture.figure.axes
    assert loss.lines[0].get_ydata().tolist() == [2.0, 1.0, 0.5]
    assert loss.lines[1].get_ydata().tolist() == [1.5]
    assert [line.get_ydata().tolist() for line in accuracy.lines] == [[50.0], [25.0]]
    assert "from 2.000 to 0.500" in picture.alt
    assert "clean 50.0 %, under attack 25.0 %" in picture.alt
    assert "Curves of a training of 3 steps" in render([run])


def test_a_training_without_an_epoch_yet_is_drawn(tmp_path):
    run = replace(
        read_run(write_run(tmp_path / "run", correct=[True, False], attacks={})), metrics=({"step": 1, "loss": 2.0},)
    )
    assert "1 steps" in draw_training(run).alt


def test_damaged_metrics_are_reported(tmp_path):
    folder = write_run(tmp_path / "run", correct=[True, False], attacks={})
    for line in ("{torn\n", '{"loss": 2}\n'):
        (folder / "metrics.jsonl").write_text(line)
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
            read_run(folder)


def test_the_last_line_of_a_killed_training_may_be_torn(tmp_path):
    folder = write_run(tmp_path / "run", correct=[True, False], attacks={})
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_run(folder).metrics == ({"step": 1.0, "loss": 2.0},)


def test_trainings_by_one_recipe_are_labeled_by_folder_and_their_accuracies_drawn(tmp_path):
    runs = {name: trained(tmp_path / name) for name in ("without", "with")}
    runs = {name: replace(run, results={**run.results, "training": {"recipe": "mine"}}) for name, run in runs.items()}
    section = compare_trainings(runs)
    assert [row[0] for row in section.tables[0].rows] == ["mine (without)", "mine (with)"]
    losses, accuracies = section.picture.figure.axes
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["mine (without)", "mine (with)"]
    drawn = [line.get_ydata().tolist() for line in accuracies.lines if len(line.get_ydata())]
    assert drawn == [[50.0], [25.0]] * 2
