"""The page of licenses states what the metadata of the installed packages states."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_the_page_of_licenses_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import make_licenses

    def rows(text: str) -> list[str]:
        """Without torch: `make` takes the version that is there, and its metadata changed over time."""
        return [line for line in text.splitlines() if not line.startswith("| torch")]

    written = make_licenses.PAGE.read_text(encoding="utf-8")
    assert rows(make_licenses.page()) == rows(written), "docs/licenses.md is out of date: run scripts/make_licenses.py"
    assert "not stated" not in written
    assert "| torch |" in written
