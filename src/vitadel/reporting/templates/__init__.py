"""HTML templates and scripts of pages, and how they are filled in: everything is escaped, one script may run."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitadel.quantities import duration
from vitadel.reporting.tables import fold_intervals, row_texts
from vitadel.reporting.text import interval_text, listed, p_text, percent, plain
from vitadel.version import __version__

__all__ = ["load_template", "script_fields"]


@functools.cache
def load_template(name: str) -> Any:
    """The template of this file name, with the filters that write numbers."""
    loader = PackageLoader("vitadel.reporting", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=percent,
        interval=interval_text,
        duration=duration,
        p_value=p_text,
        points=lambda share: f"{100 * share:+.1f}",
        listed=listed,
        plain=plain,
        folded=fold_intervals,
        texts=row_texts,
        identity=id,
        parts=lambda text: re.findall(r"[^:_/-]*[:_/-]?", text),
        unbroken=lambda text: text.replace(" %", "\u00a0%"),  # no line begins with a percent sign
    )
    return environment.get_template(name)


def script_fields(*names: str) -> dict[str, Any]:
    """What a page says of itself: its script, the hash that its policy names so that nothing else runs, the version."""
    script = "\n".join(files("vitadel.reporting").joinpath("templates", name).read_text("utf-8") for name in names)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": Markup(script), "script_hash": f"sha256-{digest}", "version": __version__}
