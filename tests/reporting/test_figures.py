"""Figures show the numbers of the results, and names as mere text."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from run_folders import write_run
from vitadel.reporting.audit_figures import ClassScore, draw_accuracies, draw_classes, draw_examples, extreme_classes
from vitadel.reporting.figures import COLORS, Picture
from vitadel.reporting.read_runs import Run, read_run
from vitadel.statistics import wilson

HALF = [True, False] * 20


def made(path: Path, **settings: Any) -> Run:
    chosen = {"correct": [True] * 40, "attacks": {"fgsm": HALF}, **settings}
    return read_run(write_run(path, **chosen))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def widths(figure: Any) -> list[float]:
    return [round(patch.get_width(), 6) for patch in figure.axes[0].patches]


def test_accuracy_bars_have_the_lengths_of_the_results(tmp_path: Path) -> None:
    quarter = [True, False, False, False] * 10
    first = made(tmp_path / "a", attacks={"fgsm": HALF, "pgd-20": quarter})
    second = made(tmp_path / "b", model="deit_tiny", correct=[True] * 10 + [False] * 30, attacks={})
    picture = draw_accuracies([first, second])
    assert picture is not None
    assert widths(picture.figure) == [1.0, 0.5, 0.25, 0.25, 0.25]
    assert "zoo:shapes-robust (shapes, Linf 8/255, n = 40, seed 0): clean 100.0 %" in picture.alt
    assert "worst case 25.0 % (interval 14.2 to 40.2 %)" in picture.alt
    assert "deit_tiny (shapes, n = 40, seed 0): clean 25.0 %" in picture.alt  # no attack, so no threat is claimed


def test_accuracy_whiskers_end_where_the_intervals_do(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    picture = draw_accuracies([run])
    assert picture is not None
    spans = [(min(line.get_xdata()), max(line.get_xdata())) for line in picture.figure.axes[0].lines]
    worst = tuple(run.results["worst_case"]["ci95"])
    assert spans == [tuple(run.results["clean"]["ci95"]), worst, worst]


def test_many_runs_are_shown_without_their_single_attacks(tmp_path: Path) -> None:
    picture = draw_accuracies([made(tmp_path / str(n)) for n in range(7)])
    assert picture is not None
    assert widths(picture.figure) == [1.0, 0.5] * 7
    assert "fgsm" not in picture.alt


def test_accuracy_figure_is_a_png(tmp_path: Path) -> None:
    picture = draw_accuracies([made(tmp_path / "a")])
    assert picture is not None
    image = Image.open(io.BytesIO(picture.png()))
    assert image.format == "PNG"
    assert image.width == 1750
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_without_numbers_there_is_no_accuracy_figure(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", correct=HALF, attacks={}, pending=["fgsm"])
    (path / "results.json").unlink()
    run = read_run(path)
    assert draw_accuracies([run]) is None
    assert draw_classes(run) is None
    assert draw_examples(run) is None


def test_all_classes_are_shown_up_to_twenty_and_then_the_extremes() -> None:
    scores = [ClassScore(f"c{n}", 100, 100 - n, n) for n in range(21)]
    best, rest = extreme_classes(scores[:20])
    assert [score.name for score in best] == [f"c{n}" for n in reversed(range(20))]
    assert rest == []
    best, rest = extreme_classes(scores)
    assert [score.name for score in best] == [f"c{n}" for n in range(20, 10, -1)]
    assert [score.name for score in rest] == [f"c{n}" for n in range(9, -1, -1)]


def test_class_bars_show_clean_and_worst_case(tmp_path: Path) -> None:
    holds = [label == 0 for _ in range(10) for label in range(4)]
    correct = [label != 3 for _ in range(10) for label in range(4)]
    picture = draw_classes(made(tmp_path / "a", correct=correct, attacks={"fgsm": holds}))
    assert picture is not None
    assert widths(picture.figure) == [1, 1, 1, 0, 1, 0, 0, 0]  # disc, square, triangle, star: clean, worst case
    ends = [(min(line.get_xdata()), max(line.get_xdata())) for line in picture.figure.axes[0].lines]
    assert ends == [wilson(10, 10), wilson(0, 10), wilson(0, 10), wilson(0, 10)]
    assert "disc: 100.0 %, worst case 100.0 % of 10; square: 100.0 %, worst case 0.0 % of 10" in picture.alt
    assert "star: 0.0 %" in picture.alt


def test_classes_with_few_images_have_no_bars(tmp_path: Path) -> None:
    few, enough = ({"correct": [True] * n, "attacks": {"fgsm": [True] * n}} for n in (36, 40))
    assert draw_classes(made(tmp_path / "few", **few)) is None
    assert draw_classes(made(tmp_path / "enough", **enough)) is not None


def test_more_than_twenty_classes_say_how_many_are_left_out(tmp_path: Path) -> None:
    many = {"correct": [True] * 400, "attacks": {"fgsm": [True] * 400}}
    picture = draw_classes(made(tmp_path / "a", class_names=[f"class-{n}" for n in range(40)], **many))
    assert picture is not None
    written = texts(picture.svg("p-"))
    assert "… 20 classes in between …" in written
    assert sum(text.startswith("class-") for text in written) == 20


def test_examples_show_the_perturbation_around_gray(tmp_path: Path) -> None:
    run = made(tmp_path / "a", pictures=8)
    picture = draw_examples(run)
    assert picture is not None
    assert run.examples is not None
    images = [image.get_array() for image in picture.figure.axes[0].images]
    assert len(images) == 24
    np.testing.assert_allclose(images[0], run.examples["x"][0].transpose(1, 2, 0), atol=1e-6)
    np.testing.assert_allclose(images[16], run.examples["z"][0].transpose(1, 2, 0), atol=1e-6)
    # Every pixel moved by eps: 15.9 = 0.5 / (8 / 255) rounded down, so all cells are nearly black or white.
    sign = np.sign(run.examples["z"][0] - run.examples["x"][0]).transpose(1, 2, 0)
    np.testing.assert_allclose(images[8], 0.5 + 15.9 * sign * 8 / 255, atol=1e-5)
    assert "× 15.9" in " ".join(texts(picture.svg("p-")))
    assert picture.alt.count("becomes") == picture.alt.count("stays") == 4
    assert "disc becomes square; square stays square" in picture.alt


def test_unchanged_examples_are_plain_gray(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", correct=HALF, attacks={"fgsm": HALF})
    with np.load(path / "examples.npz") as file:
        arrays = dict(file)
    np.savez(path / "examples.npz", **{**arrays, "z": arrays["x"]})
    picture = draw_examples(read_run(path))
    assert picture is not None
    assert (picture.figure.axes[0].images[2].get_array() == 0.5).all()


def with_attention(path: Path, before: Any, after: Any) -> Run:
    write_run(path, correct=HALF, attacks={"fgsm": HALF}, pictures=2)
    with np.load(path / "examples.npz") as file:
        arrays = dict(file)
    np.savez(path / "examples.npz", **arrays, attention_x=before, attention_z=after)
    return read_run(path)


def test_attention_lies_over_the_images_on_one_scale(tmp_path: Path) -> None:
    before, after = np.zeros((2, 2, 4)), np.zeros((2, 2, 4))
    before[0, 0, 0], after[0, 1, 3] = 1, 1
    before[1] = after[1] = 0.125
    after[1, 0, :2] = 0.25, 0
    run = with_attention(tmp_path / "a", before, after)
    picture = draw_examples(run)
    assert picture is not None
    assert run.examples is not None
    shown = [image.get_array() for image in picture.figure.axes[0].images]
    assert len(shown) == 10
    most, none, half = (np.array(matplotlib.colormaps["inferno"](value)[:3]) for value in (1.0, 0.0, 0.5))
    gray = run.examples["x"][0].mean(0)[..., None]
    np.testing.assert_allclose(shown[6][:4, :2], 0.4 * gray[:4, :2] + 0.6 * most, atol=1e-6)
    np.testing.assert_allclose(shown[6][4:, 2:], 0.4 * gray[4:, 2:] + 0.6 * none, atol=1e-6)
    np.testing.assert_allclose(
        shown[7][:4, :2], 0.4 * run.examples["x"][1].mean(0)[:4, :2, None] + 0.6 * half, atol=1e-6
    )
    np.testing.assert_allclose(
        shown[8][4:, 6:], 0.4 * run.examples["z"][0].mean(0)[4:, 6:, None] + 0.6 * most, atol=1e-6
    )
    assert "disc becomes square, 100.0 % of its attention moves" in picture.alt
    assert "12.5 % of its attention moves" in picture.alt
    assert "attention,\nclean" in [text.get_text() for text in picture.figure.axes[0].texts]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 4), (2, 0, 3)])
def test_attention_that_fits_no_image_is_left_out(tmp_path: Path, shape: tuple[int, ...]) -> None:
    picture = draw_examples(with_attention(tmp_path / "a", np.ones(shape), np.ones(shape)))
    assert picture is not None
    assert len(picture.figure.axes[0].images) == 6
    assert "attention" not in picture.alt


def test_small_images_stay_pixels_and_large_ones_come_in_fours(tmp_path: Path) -> None:
    small, large = (
        draw_examples(made(tmp_path / name, pictures=8, size=size)) for name, size in (("a", 8), ("b", 100))
    )
    assert small is not None
    assert large is not None
    found = list(ElementTree.fromstring(small.svg("p-")).iter("image"))
    assert len(found) == 24
    assert all((e.get("width"), e.get("height")) == ("8", "8") for e in found)  # as they are, enlarged by the browser
    assert all("pixelated" in (e.get("style") or "") for e in found)
    assert len(large.figure.axes[0].images) == 12


@pytest.mark.slow
def test_svg_follows_the_page_and_keeps_its_ids_apart(tmp_path: Path) -> None:
    picture = draw_classes(made(tmp_path / "a"))
    assert picture is not None
    svg = picture.svg("left-")
    assert svg.startswith("<svg ")
    assert "<style" not in svg
    assert "DejaVu" not in svg
    for name in ("ink", "muted", "grid", "clean", "worst"):
        assert f"var(--figure-{name}, {COLORS[name]})" in svg
        assert COLORS[name] not in svg.replace(f"var(--figure-{name}, {COLORS[name]})", "")
    ids, used = set(re.findall(r' id="([^"]*)"', svg)), set(re.findall(r"url\(#([^)]*)\)", svg))
    assert ids
    assert all(name.startswith("left-") for name in ids)
    assert used <= ids
    assert svg.replace("left-", "right-") == picture.svg("right-")  # the same picture every time


def test_names_are_text_never_markup_or_mathematics(tmp_path: Path) -> None:
    hostile = ["<script>alert(1)</script>", "$\\frac{1}$", "a\x00b\x1b", "猫 & \U0001f600", 'x" onload="y']
    run = made(
        tmp_path / "a", model="<b>$m$</b>", class_names=hostile, correct=[True] * 50, attacks={"fgsm": [True] * 50}
    )
    pictures = [draw_accuracies([run]), draw_classes(run), draw_examples(run)]
    for picture in pictures:
        assert picture is not None
        svg = picture.svg("p-")
        assert "<script" not in svg
        assert "<b>" not in svg
        assert Image.open(io.BytesIO(picture.png())).width == 1750
    assert pictures[1] is not None
    written = texts(pictures[1].svg("p-"))
    assert {hostile[0], hostile[1], "a\ufffdb\ufffd", hostile[3], hostile[4]} <= set(written)


def test_whatever_a_figure_says_it_can_be_drawn_and_read() -> None:
    figure = Figure()
    axes = figure.add_subplot(title="$\\frac$\x01 & <b>", xlabel="a\ud800b\x1b$x$")
    axes.plot([0, 1], label="$\\undefined{")
    axes.legend()
    axes.set_xticks([0, 1], ["$\\frac$", "\x02"])
    picture = Picture("odd", figure, "odd\x01")
    ElementTree.fromstring(picture.svg_file())
    assert "<b>" not in picture.svg("p-")
    assert Image.open(io.BytesIO(picture.png())).width > 100


def test_powers_on_a_logarithmic_axis_are_set_as_such() -> None:
    figure = Figure()
    axes = figure.add_subplot(xscale="log", title="$names$ are none")
    axes.plot([0.01, 1000], [0, 1])
    drawn = re.sub("<!--.*?-->", "", Picture("log", figure, "log").svg_file().decode())
    assert "mathdefault" not in drawn
    assert "$names$ are none" in drawn


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture = draw_accuracies([made(tmp_path / "a")])
    assert picture is not None
    picture.png()
    assert dict(matplotlib.rcParams) == before
