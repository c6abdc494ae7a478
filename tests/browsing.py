"""A real browser for tests: Debian's chromium through Playwright, with everything it complains about or asks for."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DESKTOP", "PHONE", "Visit", "browsing", "keep_screenshot"]

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Visit:
    """A page, what its console said in anger, and the addresses elsewhere that it asked for (in vain)."""

    page: Any
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def scrolls_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@contextmanager
def browsing(home: str, **settings: Any) -> Iterator[Visit]:
    """A fresh browser that may reach addresses beginning with `home` and nothing else."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("browser tests need playwright: pip install playwright")
    if chromium is None:
        pytest.skip("browser tests need chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=chromium, args=_FLAGS, headless=True, viewport=DESKTOP, **settings
        )
        visit = Visit(context.new_page())
        visit.page.set_default_timeout(60_000)

        def route(route: Any) -> None:
            if route.request.url.startswith((home, "data:", "blob:")):
                route.continue_()
            else:
                visit.outside.append(route.request.url)
                route.abort()

        context.route("**/*", route)
        visit.page.on("console", lambda said: visit.errors.append(said.text) if said.type == "error" else None)
        visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
        yield visit
        context.close()


def keep_screenshot(page: Any, name: str, otherwise: Path) -> Path:
    """The whole page as a picture, in the folder VITADEL_SCREENSHOTS for people to look at, or in `otherwise`."""
    folder = Path(os.environ.get("VITADEL_SCREENSHOTS", otherwise))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png", full_page=True)
    return folder / f"{name}.png"
