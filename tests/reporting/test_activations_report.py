"""Massive activations in a report: curves as the numbers say, a warning where there are few images."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from run_folders import write_run
from vitadel.reporting.kinds.activations import activations_sentence, activations_tables, draw_activations
from vitadel.reporting.kinds.training import show_training
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import Run, read_run

PLACE = {
    "kind": "patch", "kind_share": 0.75, "channel": 7, "channel_share": 0.5,
    "token": "patch 3", "token_share": 0.25, "same_place_share": 0.25,
}  # fmt: skip


def condition(name: str, images: str, tokens: bool, median: list[float]) -> dict[str, Any]:
    spread = {"lower": [value / 2 for value in median], "upper": [2 * value for value in median]}
    return {"name": name, "images": images, "tokens": tokens, "median": median, **spread, "places": [PLACE, PLACE]}


FOUND = {
    "n": 4,
    "attack": {"name": "features-30", "settings": {}},
    "layers": ["input of blocks.0", "blocks.0"],
    "conditions": [
        condition("clean", "clean", False, [2.0, 1234.0]),
        condition("attacked", "attacked", False, [3.0, 50.0]),
        condition("attacked through the tokens", "adaptive", True, [4.0, 60.0]),
    ],
    "warning": "n = 4 is too few",
}


def inspected(path, found):
    run = read_run(write_run(path, correct=[True], attacks={}))
    command = {**run.command, "verb": "inspect"}
    return replace(
        run, command=command, results={"complete": True, "data": {"spec": "shapes", "n": 4}, "activations": found}
    )


def test_curves_words_and_table(tmp_path):
    run = inspected(tmp_path / "run", FOUND)
    picture = draw_activations(run)
    (axes,) = picture.figure.axes
    curves = {line.get_label(): (line.get_ydata().tolist(), line.get_linestyle()) for line in axes.lines}
    assert curves == {
        "clean": ([2.0, 1234.0], "-"),
        "attacked": ([3.0, 50.0], "-"),
        "attacked through the tokens": ([4.0, 60.0], "--"),
    }
    assert axes.get_yscale() == "log"
    assert "in blocks.0; medians there: clean 1,234, attacked 50, attacked through the tokens 60" in picture.alt
    assert "Beware: n = 4 is too few." in activations_sentence(run)
    page = render([run]).replace("\u00a0", " ")
    assert "1,234 (617 to 2,468)" in page
    assert "patch 75.0 %, channel 7 50.0 %, same token and channel 25.0 %" in page


def test_enough_images_need_no_warning(tmp_path):
    assert "Beware" not in activations_sentence(inspected(tmp_path / "run", {**FOUND, "warning": None}))


def test_tables_have_a_row_per_layer_with_three_digits():
    small = {**FOUND, "conditions": [condition("clean", "clean", False, [0.01234, 1234.5])]}
    sizes, places = activations_tables(small)
    assert [row[0] for row in sizes.rows] == [row[0] for row in places.rows] == FOUND["layers"]
    assert [row[1] for row in sizes.rows] == ["0.0123 (0.00617 to 0.0247)", "1,234 (617 to 2,469)"]


COSINES = [
    {"step": 1, "loss": 1.0, "invariance": 0.6, "recovery": 0.4},
    {"step": 2, "loss": 0.5, "invariance": 0.8, "recovery": 0.7},
    {"step": 2, "epoch": 0, "validation_cosine_clean": 0.9, "validation_cosine_robust": 0.8},
]


def trained(path, losses=(1.0, 0.5), recipe="tokens/count:r1"):
    folder = write_run(path, correct=[True], attacks={}, verb="harden")
    rows = [{**row, **({"loss": losses[place]} if "loss" in row else {})} for place, row in enumerate(COSINES)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    training = {"recipe": recipe, "held_out": {"measure": "cosine"}}
    return replace(run, results={**run.results, "training": training})


def test_cosines_of_trainings_are_called_cosines(tmp_path):
    page = render([trained(tmp_path / "one")])
    assert "cosines on held-out images: clean 0.900, under attack 0.800" in page
    assert "the cosine of features with the token-free clean ones" in page
    assert "Trainings side by side" not in page
    assert "Both terms of the loss" in page
    assert "clean images, with the tokens: 0.600 to 0.700; attacked images, with the tokens: 0.400 to 0.550" in page


@pytest.mark.slow
def test_trainings_side_by_side(tmp_path):
    runs = [trained(tmp_path / "one"), trained(tmp_path / "two", (0.75, 0.25), "tokens/count:r10")]
    page = render(runs)
    assert "Trainings side by side" in page
    assert "Losses of 2 trainings, first step to last: tokens/count:r1: 1.000 to 0.750; tokens/count:r10: 0.750" in page
    assert page.count("cosine: clean 0.900, under attack 0.800") == 2
    audits = [read_run(write_run(tmp_path / name, correct=[True], attacks={})) for name in ("three", "four")]
    assert "Trainings side by side" not in render(audits)
    many = [trained(tmp_path / f"many{number}", recipe=f"r{number}") for number in range(8)]
    assert "Losses of 8" not in render(many)  # a tapestry
    assert "r7" in render(many)


def test_the_terminal_shows_budgets_that_are_not_pixels(capsys, tmp_path):
    training = {
        "stopped": None, "held_out": None, "recipe": "tokens/paper:dinov2-b", "steps": 1,
        "attack": {"effective_eps": "8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels"},
    }  # fmt: skip
    show_training(Run(tmp_path, {}, {"training": training}, {}, None, None))
    assert "attack in training: eps 8/255 in normalised units = 1.83, 1.79" in capsys.readouterr().out
    show_training(Run(tmp_path, {}, {"training": {**training, "attack": None}}, {}, None, None))
    assert "normalised" not in capsys.readouterr().out
