"""The page as a real browser shows it: quiet, self-contained, no wider than a phone, with tables that sort."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from browsing import DESKTOP, PHONE, Visit, browsing, keep_screenshot
from run_folders import write_run
from vitadel.reporting.page import write_report

pytestmark = pytest.mark.browser

IMAGE = "<img src=x onerror=alert(1)>"


YES, NO = True, False


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with hostile and endless names; the last has no attacks, and another budget."""
    folder = tmp_path_factory.mktemp("runs")
    ways = {"first": 9, "second with a very long name " * 6 + "x" * 80: 5, IMAGE: 2}
    shared = {"correct": [YES] * 40, "class_names": ("a", IMAGE, "c" * 90, "d")}
    runs = [
        write_run(
            folder / str(place),
            attacks={"fgsm": [YES] * 40, "pgd-20": [number % 10 < stays for number in range(40)]},
            model=model,
            **shared,
        )
        for place, (model, stays) in enumerate(ways.items())
    ]
    runs.append(write_run(folder / "clean", attacks={}, model="clean only", norm="l2", eps="0.5", **shared))
    write_report(runs, folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def plain_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models as people meet them, with findings, examples with attention, and a study beside them."""
    folder = tmp_path_factory.mktemp("plain")
    looked = {"check": "the doctor's glance", "verdict": "ok", "evidence": "13 checks raised nothing", "advice": ""}
    odd = {"check": "outputs are logits", "verdict": "broken", "evidence": "all add up to 1", "advice": "return logits"}
    names = ("disc", "square", "triangle", "star", "plus", "ring", "crescent", "heart", "bar", "hourglass")
    runs = [
        write_run(
            folder / model,
            correct=[number % 50 != 7 for number in range(200)],
            attacks={
                "fgsm": [number % 10 < stays + 1 for number in range(200)],
                "pgd-20": [number % 10 < stays for number in range(200)],
            },
            model=f"zoo:shapes-{model}",
            class_names=names,
            pictures=8,
            size=32,
            findings=[finding],
        )
        for model, stays, finding in (("robust", 6, looked), ("standard", 0, odd))
    ]
    rng = np.random.default_rng(0)
    for run in runs:
        with np.load(run / "examples.npz") as file:
            arrays = dict(file)
        maps = {name: rng.random((len(arrays["x"]), 8, 8)) ** 4 for name in ("attention_x", "attention_z")}
        np.savez(run / "examples.npz", **arrays, **maps)
    write_report([*runs, _curves(folder / "curves")], folder / "page.html")
    return folder / "page.html"


def _curves(path: Path) -> Path:
    """The run folder of a study, whose table is longer than a page shows at once."""
    points = [
        {"at": step, "text": str(step), "robust_accuracy": 0.9 - step / 50, "ci95": [0.3, 0.95]} for step in range(15)
    ]
    reported = {
        "name": "curves",
        "attack": "pgd",
        "steps": 20,
        "norm": "linf",
        "n": 40,
        "eps_text": "8/255",
        "clean": {"accuracy": 0.95, "ci95": [0.8, 0.99]},
        "curves": [{"against": "steps", "points": points, "rises": [], "how": "runs of their own"}],
    }
    write_run(path, correct=[YES] * 8, attacks={}, model="zoo:shapes-robust")
    results = json.loads((path / "results.json").read_text())
    (path / "results.json").write_text(json.dumps({**results, "study": reported}))
    (path / "samples.parquet").unlink()
    return path


@pytest.fixture
def visit(report: Path) -> Iterator[Visit]:
    with browsing(report.as_uri()) as visit:
        visit.page.goto(report.as_uri())
        yield visit
        assert visit.errors == visit.outside == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["plain_report", "report"])
def test_no_wider_than_the_screen_in_any_light(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    address = request.getfixturevalue(which).as_uri()
    with browsing(address) as visit:
        visit.page.goto(address)
        for screen, scheme in itertools.product((DESKTOP, PHONE), ("light", "dark")):
            visit.page.set_viewport_size(screen)
            visit.page.emulate_media(color_scheme=scheme)
            is_open = "true" if which == "report" else "false"  # as it is met, and with everything unfolded
            visit.page.evaluate(f"document.querySelectorAll('details').forEach((each) => {{ each.open = {is_open}; }})")
            keep_screenshot(visit.page, f"{which.replace('_', '-')}-{screen['width']}-{scheme}", tmp_path)
            assert not visit.scrolls_sideways()
            light = visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
            assert light == (scheme == "light")
        assert visit.page.locator("img").count() == 0  # hostile names are words
        assert visit.errors == visit.outside == []


def test_on_paper_nothing_is_folded_or_dark(plain_report: Path, tmp_path: Path) -> None:
    with browsing(plain_report.as_uri()) as visit:
        visit.page.goto(plain_report.as_uri())
        visit.page.emulate_media(media="print", color_scheme="dark")
        assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(32, 36, 44)"
        assert visit.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
        assert not visit.page.locator("nav").is_visible()
        rows = visit.page.locator("details.long tbody tr")
        assert rows.count() == 15
        assert all(row.is_visible() for row in rows.all())
        paper = visit.page.pdf()
        assert paper.startswith(b"%PDF")
        keep_screenshot(visit.page, "plain-report-print", tmp_path)
        assert visit.errors == visit.outside == []


def test_tables_sort_by_number_and_by_name(visit: Visit) -> None:
    table = visit.page.locator("section.comparison table")
    names = table.locator("tbody th a")

    def sorted_by(heading: str) -> list[str]:
        table.locator("thead button", has_text=heading).click()
        return [text[:3] for text in names.all_inner_texts()]

    assert sorted_by("Worst case") == ["fir", "sec", "<im", "cle"]
    assert sorted_by("Worst case") == ["<im", "sec", "fir", "cle"]  # what was not measured comes last either way
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert sorted_by("eps")[0] == "cle"  # 0.5 is more than 8/255
    assert sorted_by("eps")[-1] == "cle"
    table.locator("thead button", has_text="Run").press("Enter")  # the keyboard will do
    assert [text[:3] for text in names.all_inner_texts()] == ["<im", "cle", "fir", "sec"]
    attacks = visit.page.locator("section.attacks table").first
    attacks.locator("thead button", has_text="Robust").click()
    attacks.locator("thead button", has_text="Robust").click()
    bodies = attacks.locator("tbody")
    assert [text.split()[0] for text in bodies.all_inner_texts()] == ["pgd-20", "fgsm"]
    assert "Settings of pgd-20" in bodies.first.inner_text()  # what belongs together stays together


def test_without_script_everything_is_there(report: Path) -> None:
    with browsing(report.as_uri(), java_script_enabled=False) as visit:
        visit.page.goto(report.as_uri())
        assert visit.page.locator("thead button").count() == 0
        assert visit.page.locator("section.comparison tbody tr").count() == 4
