"""The trade-off's figure, tables and remarks, of verdicts that were chosen."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitadel.reporting.kind import kind_of
from vitadel.reporting.kinds.trade_off import (
    draw_maps,
    draw_trade_off,
    map_table,
    trade_off_remarks,
    trade_off_tables,
)
from vitadel.reporting.page import render, write_report
from vitadel.reporting.read_runs import read_run
from vitadel.reporting.tables import fold_intervals, row_texts
from vitadel.reporting.terminal import show_run
from vitadel.statistics import share

N = 40
AREAS = {name: {"mean": 0.5, "ci95": [0.4, 0.6]} for name in ("map", "attention", "random")}
DIFFERENCES = {name: {"mean": -0.1, "ci95": [-0.2, 0.0]} for name in ("map - random", "map - attention")}


def entry(name, kind, trade_off, clean, worst, knob=None):
    rvt = {"clean": share(clean, N, "correct", "accuracy")}
    rvt["attacks"] = [share(worst, N, "held", "robust_accuracy")] * 2
    return {
        "name": name,
        "kind": kind,
        "lambda": trade_off,
        "knob": knob,
        "clean": share(clean, N, "correct", "accuracy"),
        "rvt": {"joint": rvt},
        "attacks": [],
        "worst_case": [{"eps": 4 / 255, "eps_text": "4/255", **share(worst, N, "held", "robust_accuracy")}],
    }


POINTS = [
    entry("low", "tora", 0.1, 38, 10),
    entry("high", "tora", 0.9, 36, 24),
    entry("middle", "tora", None, 37, 17, {"from": "low", "to": "high", "lambdas": [0.1, 0.9], "at": 0.5}),
    entry("one", "single", 0.5, 36, 9),
    entry("bare", "head", 0.5, 40, 5),
    entry("strong", "model", None, 36, 26),
]


@pytest.fixture
def folder(tmp_path):
    """The first so many images are right, and the first so many of these hold."""
    place = np.arange(N)
    columns = {"index": place, "label": place % 4, "clean_prediction": place % 4, "clean_correct": place < 36}
    for point in POINTS:
        columns[f"correct:{point['name']}"] = place < point["clean"]["correct"]
        columns[f"worst:{point['name']}: 4/255"] = place < point["worst_case"][0]["held"]
    maps = {"name": "low", "lambda": 0.1, "deletion": AREAS, "insertion": AREAS}
    maps |= {"deletion_differences": DIFFERENCES, "insertion_differences": DIFFERENCES}
    results = {
        "schema": 1,
        "complete": True,
        "suite": "trade-off",
        "seed": 3,
        "model": {"spec": "low, high"},
        "data": {"spec": "shapes", "n": N, "classes": 4, "class_names": list("abcd")},
        "threat": {"norm": "linf", "eps": 4 / 255, "eps_text": "4/255"},
        "clean": None,
        "attacks": [],
        "worst_case": None,
        "trade_off": {
            "budgets": [{"eps": 4 / 255, "eps_text": "4/255"}],
            "rvt": {"eps": 1 / 255, "eps_text": "1/255", "attacks": ["fgsm", "pgd-5"]},
            "contenders": POINTS,
            "maps": {"n": 5, "contenders": [maps]},
        },
        "findings": [],
    }
    command = {"verb": "trade-off", "argv": ["trade-off", "low"], "settings": {"model": "low"}, "version": "0"}
    (tmp_path / "command.json").write_text(json.dumps(command))
    (tmp_path / "results.json").write_text(json.dumps(results))
    pq.write_table(pa.table(columns), tmp_path / "samples.parquet")
    image = np.zeros((2, 3, 8, 8), np.uint8)
    grid = np.full((2, 2, 2, 2), 0.5, np.float32)
    grid[1, 0, 0, 0] = 0.7
    np.savez(tmp_path / "maps.npz", **{"x": image, "maps:low": grid})
    return tmp_path


def test_remarks_say_what_lies_above_what(folder):
    remarks = trade_off_remarks(read_run(folder))
    # 14 images that only the larger lambda holds: p = 2 / 2^14; 2 that only the smaller one gets right: p = 0.5
    assert remarks[0] == (
        "At 4/255, TORA, lambda 0.1 to 0.9: worst case 25.0 % to 60.0 % (p = 0.00012), "
        "clean 95.0 % to 90.0 % (p = 0.5)."
    )
    reported = " ".join(remarks)
    assert "low lies above one, not significantly: worst case 22.5 % to 25.0 % (p = 1)" in reported
    assert "high lies above one: worst case 22.5 % to 60.0 % (p = 6.1e-05), clean 90.0 % to 90.0 % (p = 1)" in reported
    assert "no point of TORA lies above bare or below it" in reported
    assert "high lies below strong, not significantly: worst case 65.0 % to 60.0 %" in reported
    assert "middle lies" not in reported  # what was not trained is no answer about the training
    assert "not corrected for the number of comparisons" in remarks[-1]


def test_tables_and_sentence(folder, capsys):
    run = read_run(folder)
    deployed, rvt = map(fold_intervals, trade_off_tables(run.results["trade_off"]))
    headings = [column.heading for column in deployed.columns]
    assert headings == ["model", "what", "clean, %", "worst case, 4/255, %"]
    assert deployed.rows[1][:2] == ("high", "TORA, lambda 0.9")
    assert str(deployed.rows[1][3]).startswith("60.0 (")
    assert deployed.rows[2][1] == "between two fusions"
    assert rvt.rows[0][:2] == ("low", "joint")
    assert "high: clean 90.0 %, 60.0 % at 4/255" in kind_of(run).sentence(run)
    show_run(folder)
    assert "lies above" in capsys.readouterr().out.replace("\n", " ")


def test_points_stand_where_their_accuracies_say(folder):
    picture = draw_trade_off(read_run(folder))
    (axes,) = picture.figure.axes
    lines = {each.get_label(): each for each in axes.containers}
    assert list(lines) == ["TORA", "between two fusions", "one adapter", "heads only", "other model"]
    xs, ys = lines["TORA"].lines[0].get_data()
    assert (list(xs), list(ys)) == ([95.0, 90.0], [25.0, 60.0])  # in the order of lambda
    assert [text.get_text() for text in axes.texts] == ["0.1", "0.9", "0.5", "0.5"]
    low, high = (100 * end for end in POINTS[0]["worst_case"][0]["ci95"])
    across, down = lines["TORA"].lines[2]
    assert down.get_segments()[0][:, 1].tolist() == pytest.approx([low, high])
    assert across.get_segments()[0][0, 1] == 25.0


def test_maps_are_colored_around_one_half(folder):
    picture = draw_maps(read_run(folder))
    maps = [image for image in picture.figure.axes[0].images if image.get_array().ndim == 2]
    assert len(maps) == 4  # two images, two blocks
    assert all(image.get_clim() == pytest.approx((0.3, 0.7)) for image in maps)
    middle = maps[0].cmap(maps[0].norm(0.5))
    assert min(middle[:3]) > 0.95  # white
    assert "0.200 away from one half" in picture.alt
    table = fold_intervals(map_table(read_run(folder).results["trade_off"]["maps"]))
    row = row_texts(table.rows[0], table)
    assert row[:3] == ["low", "deletion", "0.500 (0.400 to 0.600)"]
    assert row[5] == "-0.100 (-0.200 to 0.000)"


def test_the_page_has_both_and_the_folder_their_pictures(folder):
    write_report([folder], folder / "report.html")
    page = (folder / "report.html").read_text()
    for words in (
        "Trade-off of accuracy and robustness",
        "Maps of the adapters",
        "maps sum to one at every patch",
        "lies above one",
    ):
        assert words in page
    assert "There are no results yet" not in page
    for name in ("trade-off", "adapter-maps"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 1000
    assert not (folder / "figures" / "classes.png").exists()


def test_other_and_unfinished_runs_have_nothing_of_it(folder):
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, "complete": False}))
    (folder / "maps.npz").write_bytes(b"broken")
    run = read_run(folder)
    assert draw_maps(run) is None
    assert "Trade-off of accuracy" not in render([run])
