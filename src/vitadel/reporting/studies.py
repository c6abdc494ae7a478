"""Until commands call show_run."""

from __future__ import annotations

from typing import Any

from vitadel.reporting.kind import study_names
from vitadel.reporting.terminal import as_run, show_sections

STUDIES = study_names()


def show_study(results: dict[str, Any]) -> None:
    show_sections(as_run(results))
