"""The page as a real browser shows it: quiet, self-contained, no wider than a phone, with tables that sort."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browsing import DESKTOP, PHONE, Visit, browsing, keep_screenshot
from run_folders import write_run
from vitadel.reporting.page import write_report

IMAGE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    ways = {"first": 9, "second with a very long name " * 6 + "x" * 80: 5, IMAGE: 2}
    runs = [
        write_run(
            folder / str(place),
            correct=[True] * 40,
            attacks={"fgsm": [True] * 40, "pgd-20": [number % 10 < stays for number in range(40)]},
            model=model,
            class_names=("a", IMAGE, "c" * 90, "d"),
        )
        for place, (model, stays) in enumerate(ways.items())
    ]
    write_report(runs, folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def visit(report: Path) -> Iterator[Visit]:
    with browsing(report.as_uri()) as visit:
        visit.page.goto(report.as_uri())
        yield visit
        assert visit.errors == visit.outside == []


@pytest.mark.parametrize(("screen", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_no_wider_than_the_screen(visit: Visit, screen: dict[str, int], scheme: str, tmp_path: Path) -> None:
    visit.page.set_viewport_size(screen)
    visit.page.emulate_media(color_scheme=scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    keep_screenshot(visit.page, f"report-{screen['width']}-{scheme}", tmp_path)
    assert not visit.scrolls_sideways()
    assert visit.page.locator("img").count() == 0  # hostile names are words


def test_tables_sort_by_number_and_by_name(visit: Visit) -> None:
    table = visit.page.locator("section.comparison table")
    names = table.locator("tbody th a")
    worst = table.locator("thead button", has_text="Worst case")
    worst.click()
    assert [text[:3] for text in names.all_inner_texts()] == ["fir", "sec", "<im"]
    worst.click()
    assert [text[:3] for text in names.all_inner_texts()] == ["<im", "sec", "fir"]
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    table.locator("thead button", has_text="Run").press("Enter")  # the keyboard will do
    assert [text[:3] for text in names.all_inner_texts()] == ["<im", "fir", "sec"]
    attacks = visit.page.locator("section.attacks table").first
    attacks.locator("thead button", has_text="Held").click()
    attacks.locator("thead button", has_text="Held").click()
    bodies = attacks.locator("tbody")
    assert [text.split()[0] for text in bodies.all_inner_texts()] == ["pgd-20", "fgsm"]
    assert "Settings of pgd-20" in bodies.first.inner_text()  # what belongs together stays together


def test_without_script_everything_is_there(report: Path) -> None:
    with browsing(report.as_uri(), java_script_enabled=False) as visit:
        visit.page.goto(report.as_uri())
        assert visit.page.locator("thead button").count() == 0
        assert visit.page.locator("section.comparison tbody tr").count() == 3
