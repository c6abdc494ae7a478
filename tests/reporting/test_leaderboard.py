"""The leaderboard: boards, tests, ranges of ranks, and the page in a browser."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browsing import DESKTOP, PHONE, Visit, browsing, keep_screenshot
from run_folders import write_run
from vitadel.errors import UserError
from vitadel.reporting.leaderboard import boards_of, write_leaderboard
from vitadel.reporting.read_runs import read_all, read_run

N = 200


def change(run: Path, **fields: Any) -> Path:
    results = json.loads((run / "results.json").read_text())
    model = fields.pop("family", None)
    results["model"] |= {"family": model} if model else {}
    (run / "results.json").write_text(json.dumps({**results, **fields}))
    return run


def run_with(path: Path, robust: int, *, attack: str = "autoattack", first: int = 0, **more: Any) -> Path:
    """A run whose first `robust` images are robust, so that a larger number is always nested in a smaller one."""
    held = [number < robust for number in range(N)]
    return write_run(path, correct=[True] * N, attacks={attack: held}, first_index=first, model=path.name, **more)


def ranks(runs: list[Path]) -> Mapping[str, str]:
    (board,) = boards_of(read_all(runs))
    return {entry.label: entry.rank for _, entry in board.rows}


def test_ranks_are_ranges_that_the_same_images_allow(tmp_path: Path) -> None:
    # Nested verdicts: 3 images apart give p = 0.25, 60 apart p = 2 ** -59.
    runs = [run_with(tmp_path / name, robust) for name, robust in (("b", 117), ("c", 60), ("a", 120))]
    assert ranks(runs) == {"a": "1 to 2", "b": "1 to 2", "c": "3"}
    (board,) = boards_of(read_all(runs))
    assert [entry.near for _, entry in board.rows] == [("b",), ("a",), ()]
    assert board.headline == "a leads, but is not separable from b."


def test_the_same_accuracy_on_disjoint_images_is_not_separable_and_holm_counts_all_pairs(tmp_path: Path) -> None:
    half = np.arange(N) % 2 == 0
    one = write_run(tmp_path / "one", correct=[True] * N, attacks={"autoattack": half}, model="one")
    other = write_run(tmp_path / "other", correct=[True] * N, attacks={"autoattack": ~half}, model="other")
    assert ranks([one, other]) == {"one": "1 to 2", "other": "1 to 2"}
    # 7 nested images give p = 2/128 = 0.0156: separable alone, and for Holm among 3 pairs (0.0167), not among 6.
    pair = [run_with(tmp_path / name, robust) for name, robust in (("x", 107), ("y", 100))]
    assert ranks(pair) == {"x": "1", "y": "2"}
    assert ranks([*pair, run_with(tmp_path / "z", 107)]) == {"x": "1 to 2", "z": "1 to 2", "y": "3"}
    assert ranks([*pair, run_with(tmp_path / "v", 101), run_with(tmp_path / "w", 104)])["x"] == "1 to 4"


def test_runs_of_different_tests_are_not_ranked_together(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path / "a", 120),
        run_with(tmp_path / "b", 60),
        run_with(tmp_path / "pgd", 190, attack="pgd-20"),
        run_with(tmp_path / "elsewhere", 190, first=1000),
        run_with(tmp_path / "l2", 150, norm="l2", eps="0.5"),
    ]
    wide, narrow = boards_of(read_all(runs))
    assert (wide.threat, narrow.threat) == ("Linf 8/255", "L2 0.5")
    assert [[entry.label for entry in test.entries] for test in wide.tests] == [["a", "b"], ["pgd"], ["elsewhere"]]
    assert [test.ranked for test in wide.tests] == [True, False, False]
    assert wide.shows_worst  # one row has no AutoAttack
    assert not narrow.shows_worst
    assert narrow.headline == ""


def test_models_have_their_size(tmp_path: Path) -> None:
    """Runs of earlier versions have no multiply-adds."""
    runs = [run_with(tmp_path / "new", 100), run_with(tmp_path / "old", 60, older=True)]
    write_leaderboard(runs, tmp_path / "board.html")
    words = " ".join((tmp_path / "board.html").read_text().split())
    assert words.count("vit, 5.5 M parameters, 1.26 GMACs") == 1
    assert words.count("vit, 5.5 M parameters") == 2


def test_cost_is_passes_per_image(tmp_path: Path) -> None:
    ((_, entry),) = boards_of([read_run(run_with(tmp_path / "a", 120))])[0].rows
    assert (entry.gradients, entry.forwards, entry.cost) == (20, 22, 82)  # as write_run records them


@pytest.mark.parametrize(
    ("what", "message"),
    [("unfinished", "is not finished"), ("clean", "has no accuracy under attack"), ("suite", "under one threat model")],
)
def test_runs_without_a_place_are_refused(tmp_path: Path, what: str, message: str) -> None:
    attacks = {} if what == "clean" else {"autoattack": [True] * 8}
    pending = ["square"] if what == "unfinished" else []
    run = write_run(tmp_path / "run", correct=[True] * 8, attacks=attacks, pending=pending)
    if what == "suite":
        change(run, suite="corruptions")
    with pytest.raises(UserError, match=message):
        write_leaderboard([run], tmp_path / "page.html")
    with pytest.raises(UserError, match=r"must end in \.html"):
        write_leaderboard([run], tmp_path / "page.txt")
    assert not list(tmp_path.glob("page*"))


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten runs of four families under two threats, one with a hostile name, some published, some with findings."""
    folder = tmp_path_factory.mktemp("board")
    rows = [
        ("published:Singh2023Revisiting_ViT-B-ConvStem", 136, "convstem_vit"),
        ("published:Debenedetti2022Light_XCiT-L12", 133, "xcit"),
        ("published:Liu2023Comprehensive_Swin-B", 130, "swin"),
        ("deit_small_patch16_224", 96, "vit"),
        ("zoo:shapes-robust", 93, "vit"),
        ('<img src=x onerror="alert(1)">', 61, "vit"),
        ("vit_tiny_patch16_224", 0, "vit"),
    ]
    broken = {"check": "zero-gradients", "verdict": "broken", "evidence": "of 40 images", "advice": "attack the logits"}
    odd = {"check": "staircase", "verdict": "suspicious", "evidence": "8 levels", "advice": ""}
    names = {"zero-gradients": "Gradients vanish on correctly classified images", "staircase": "Output is a staircase"}
    rng, runs = np.random.default_rng(0), []
    for place, (model, robust, family) in enumerate(rows):
        held = rng.permutation(N) < robust if place > 2 else np.arange(N) < robust
        findings = [each | {"title": names[each["check"]]} for each in ([broken], [odd], [])[min(abs(place - 4), 2)]]
        run = write_run(
            folder / f"run {place}",
            correct=rng.random(N) < 0.9 + place / 100,
            attacks={"autoattack": held},
            model=model,
            findings=findings or [{"check": "precheck", "verdict": "ok", "evidence": "", "advice": ""}],
            data="imagenet:val",
        )
        if model.startswith("published"):
            numbers = {"clean": 0.76, "robust": 0.56, "best_known": 0.55 if place else None, "consistent": place != 1}
            change(run, published={"source": "arXiv:2303.01870", "model": model, "sentences": [], **numbers})
        change(run, family=family)
        if place != 3:
            (run / "report.html").write_text("<title>the report</title>")
        runs.append(run)
    for model, robust in (("l2-a", 120), ("l2-b", 90), ("l2-c", 85)):
        runs.append(change(run_with(folder / model, robust, norm="l2", eps="0.5", data="cifar10@test"), family="xcit"))
    write_leaderboard(runs, folder / "board.html")
    return folder / "board.html"


@pytest.mark.slow
def test_ten_runs_in_seconds_without_torch(board: Path) -> None:
    runs = [str(path.parent) for path in sorted(board.parent.glob("*/results.json"))]
    assert len(runs) == 10
    code = (
        "import sys; from pathlib import Path; from vitadel.reporting.leaderboard import write_leaderboard as write; "
        "write([Path(name) for name in sys.argv[1:-1]], Path(sys.argv[-1])); sys.exit('torch' in sys.modules)"
    )
    before = _children()
    again = board.with_name("again.html")
    assert subprocess.run([sys.executable, "-c", code, *runs, str(again)], check=False).returncode == 0
    assert _children() - before < 5
    assert again.stat().st_size < 300_000


def _children() -> float:
    """Processor time of finished child processes, which a busy machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def visit(board: Path) -> Iterator[Visit]:
    with browsing(board.parent.as_uri()) as visit:
        visit.page.goto(board.as_uri())
        yield visit
        assert visit.errors == visit.outside == []


def test_page_filters_sorts_and_links(visit: Visit, board: Path) -> None:
    page = visit.page
    shown = page.locator("section.board tbody tr:visible")
    assert shown.count() == 10
    assert page.locator("section.board:visible").count() == 2
    assert page.locator("img").count() == 0  # hostile names are words
    first = page.locator("section.board").first
    first.locator("thead button", has_text="Clean").click()
    clean = [float(text.split()[0]) for text in first.locator("td[data-label=Clean]").all_inner_texts()]
    assert clean == sorted(clean, reverse=True)
    first.locator("thead button", has_text="Rank").click()
    ranks = [text.split()[0] for text in first.locator("td.rank").all_inner_texts()]
    assert ranks == sorted(ranks, reverse=True)
    page.select_option("select[name=family]", "xcit")
    assert shown.count() == 4
    page.select_option("select[name=threat]", "L2 0.5")
    assert shown.count() == 3
    assert page.locator("section.board:visible").count() == 1
    assert page.locator("form output").inner_text() == "3 of 10 runs"
    page.select_option("select[name=family]", "")
    page.select_option("select[name=threat]", "")
    page.fill("input[name=words]", "swin")
    assert shown.count() == 1
    page.fill("input[name=words]", "")
    assert page.locator("tbody th a").count() == 6  # one run has no report, and those of L2 have none
    page.locator("tbody th a", has_text="Swin-B").click()
    assert page.title() == "the report"


@pytest.mark.slow
def test_page_fits_a_phone_in_any_light(visit: Visit, tmp_path: Path) -> None:
    for screen in (DESKTOP, PHONE):
        for scheme in ("light", "dark"):
            visit.page.set_viewport_size(screen)
            visit.page.emulate_media(color_scheme=scheme)
            keep_screenshot(visit.page, f"leaderboard-{screen['width']}-{scheme}", tmp_path)
            assert not visit.scrolls_sideways()
    order = visit.page.locator("select[name=order]")
    assert order.is_visible()  # headings are not shown here
    assert order.input_value() == "Rank"  # as the rows stand
    order.select_option("Clean")
    clean = [
        text.split()[0]
        for text in visit.page.locator("section.board").first.locator("td[data-label=Clean]").all_inner_texts()
    ]
    assert clean == sorted(clean, key=lambda text: -float(text) if text[0].isdigit() else 0)


def test_page_without_script_has_all_rows(board: Path) -> None:
    with browsing(board.parent.as_uri(), java_script_enabled=False) as visit:
        visit.page.goto(board.as_uri())
        assert visit.page.locator("section.board tbody tr").count() == 10
        assert not visit.page.locator("form.filters").is_visible()
