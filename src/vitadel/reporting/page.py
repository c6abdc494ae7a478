"""One self-contained HTML page from any number of run folders: no network, one script that sorts, all else escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitadel.errors import UserError
from vitadel.quantities import duration, interval_text, listed, p_text, percent, plain
from vitadel.reporting.comparison import headline, overview, pairings
from vitadel.reporting.figures import Picture, lighten_images
from vitadel.reporting.kind import Section, Trust, kind_of, name_damage
from vitadel.reporting.kinds.audit import accuracy_section
from vitadel.reporting.read_runs import Run, aspects, faced, read_all, run_labels, threat_text
from vitadel.reporting.tables import fold_intervals, row_texts
from vitadel.runtime.opening import typed_words
from vitadel.runtime.run_folder import write_atomically
from vitadel.version import __version__

MOST_BYTES = 10_000_000
"""Size of a page that can still be mailed."""


def write_report(runs: Sequence[Path], out: Path, *, title: str | None = None, names: Sequence[str] = ()) -> None:
    """Write the page, and the figures as PNG into the run folder that contains the page.

    `names` are what to call the runs, instead of their models.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"the report is an HTML page and its name must end in .html, got {out}; use for example report.html"
        )
    found = read_all(runs, names)
    views = _views(found)
    page = _render(found, views, title)  # first: if anything cannot be shown, nothing is written
    for run, view in zip(found, views, strict=True):
        if out.resolve().is_relative_to(run.path.resolve()):
            for picture in filter(None, [section.picture for section in (*_accuracies(run), *view.sections)]):
                write_atomically(run.path / "figures" / f"{picture.name}.png", picture.png())
    write_atomically(out, page.encode("utf-8", errors="replace"))


def render(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    return _render(runs, _views(runs))


@dataclass(frozen=True)
class _View:
    """What the template shows of one run."""

    label: str
    facts: list[str]
    verdict: str
    trust: Trust | None
    unfinished: dict[str, Any] | None
    gauges: list[dict[str, Any]]
    sections: list[Section]


def _views(runs: Sequence[Run]) -> list[_View]:
    return [_view(run, label) for run, label in zip(runs, run_labels(runs), strict=True)]


def _view(run: Run, label: str) -> _View:
    model = run.results.get("model", {})
    parameters = f"{model['parameters']:,} parameters" if "parameters" in model else ""
    macs = f"{model['macs'] / 1e9:.2f} GMACs per image" if model.get("macs") else ""
    family = f"family {model['family']}" if model.get("family") else ""
    kind = kind_of(run)
    with name_damage(run):
        sections = [_findings(run), *kind.sections(run), _left_out(run), _assumptions(run), _provenance(run)]
        view = _View(
            label=label,
            facts=[fact for fact in (f"data {aspects(run)['data']}", family, parameters, macs) if fact],
            verdict=kind.sentence(run),
            trust=kind.trust(run),
            unfinished=None if run.complete else _unfinished(run),
            gauges=_gauges(run),
            sections=[section for section in sections if section is not None],
        )
        for section in view.sections:
            section.picture  # noqa: B018 (draws it, while damage is named)
    return view


def _assumptions(run: Run) -> Section | None:
    """What was not stated and had to be assumed."""
    assumed = run.results.get("assumptions")
    return Section("Assumptions", sentences=assumed) if assumed else None


def _render(runs: Sequence[Run], views: Sequence[_View], title: str | None = None) -> str:
    several = len(runs) > 1
    pairs = pairings(runs) if several else []
    page = functools.partial(
        load_template("report.html").render,
        title=title or (f"{len(runs)} runs compared" if several else f"{views[0].label} on {aspects(runs[0])['data']}"),
        headline=headline(runs, pairs) if several else "",
        doubted=[view for view in views if view.trust and view.trust.verdict in ("broken", "suspicious")],
        overview=overview(runs, pairs) if several else _accuracies(runs[0]),
        runs=views,
        **script_fields("sort.js"),
    )
    pictures: list[Picture] = []

    def collect(picture: Picture) -> str:
        pictures.append(picture)
        return ""

    words: str = page(inline=collect)
    drawn = [picture.svg(f"figure{number}-") for number, picture in enumerate(pictures, start=1)]
    figures = iter(_fit(drawn, MOST_BYTES - _bytes_of(words)))
    whole: str = page(inline=lambda picture: next(figures))
    return whole


def _accuracies(run: Run) -> list[Section]:
    """The chart of accuracies; of a run without attacks the gauge of clean images already says it all."""
    section = accuracy_section([run]) if run.attacks else None
    return [] if section is None else [section]


def _fit(drawn: Sequence[str], room: int) -> list[Markup]:
    """Figures as they are if there is room for all, else with lighter images, and without those that do not fit."""
    if sum(map(_bytes_of, drawn)) > room:
        drawn = [lighten_images(figure) for figure in drawn]
    fitting = []
    for figure in drawn:
        fits = _bytes_of(figure) <= room
        room -= _bytes_of(figure) if fits else 0
        # Safe as it is: an XML serializer wrote it, so all text in it is escaped.
        fitting.append(Markup(figure) if fits else _LEFT_OUT)
    return fitting


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", errors="replace"))


_LEFT_OUT = Markup(
    '<p class="note">Left out, to keep the page below 10 MB: make a report of this run alone, or <code>--export</code> '
    "the figures.</p>"
)


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


def _gauges(run: Run) -> list[dict[str, Any]]:
    clean, worst = run.results.get("clean"), run.results.get("worst_case")
    if not clean:
        return []
    base = f"n = {clean['n']:,}, seed {run.results.get('seed')}"
    gauges = [
        {"kind": "clean", "name": "clean images", "value": clean["accuracy"], "ci95": clean["ci95"], "note": base}
    ]
    if worst and run.attacks:
        every = "every attack" if len(faced(run)) == len(run.attacks) else "every attack within the budget"
        note = f"{threat_text(run)}, {base}; counts images that are classified correctly after {every}"
        worst = {"value": worst["robust_accuracy"], "ci95": worst["ci95"], "note": note}
        gauges.append({"kind": "worst", "name": "worst case under attack", **worst})
    return gauges


def _from_command_line(run: Run) -> bool:
    return bool(typed_words(run.command))


def _command_line(run: Run) -> str:
    argv = [str(part) for part in run.command.get("argv") or []]
    return shlex.join(["vitadel", *argv] if _from_command_line(run) else argv)


def _unfinished(run: Run) -> dict[str, Any]:
    done = len(run.attacks)
    text = "it has no results yet"
    if run.results.get("clean"):
        text = f"{done} of {done + len(run.pending)} attacks are done, and only these are counted"
    command = _command_line(run)
    can_resume = _from_command_line(run) and "--resume" not in run.command["argv"]
    return {"text": text, "pending": run.pending, "command": f"{command} --resume" if can_resume else command}


def _findings(run: Run) -> Section | None:
    found = run.results.get("findings") or []
    return Section("Findings", block="findings", content={"findings": found}) if found else None


def _left_out(run: Run) -> Section | None:
    """Samples that no number on the page counts."""
    data = run.results.get("data", {})
    count, names, unopened = data.get("left_out", 0), data.get("left_out_names", []), data.get("not_opened", [])
    if not count and not unopened:
        return None
    content = {"count": count, "names": names, "more": max(count - len(names), 0), "unopened": unopened}
    return Section("Data left out", block="left_out", content=content)


def _provenance(run: Run) -> Section:
    """What it takes to reproduce these numbers."""
    results, made_with, settings = run.results, run.environment, run.command["settings"]
    packages = made_with.get("packages", {})
    device = [str(made_with[key]) for key in ("device", "device_name") if made_with.get(key)]
    rows = {
        "command" if _from_command_line(run) else "called from": _command_line(run),
        "folder": run.folder,
        "vitadel": made_with.get("vitadel") or run.command.get("version"),
        "python": made_with.get("python"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "seed": results.get("seed", settings.get("seed")),
        "model fingerprint": results.get("model", {}).get("fingerprint") or settings.get("model_fingerprint"),
        "data fingerprint": settings.get("data_fingerprint"),
        "preprocessing": results.get("data", {}).get("preprocessing"),
        "precision": results.get("precision"),
        "batch size": results.get("batch_size"),
        "platform": made_with.get("platform"),
        "device": ", ".join(dict.fromkeys(device)),
        **{name: made_with.get(name) for name in ("threads", "cores", "processes")},
    }
    kept = {name: value for name, value in rows.items() if value not in (None, "")}
    return Section("Provenance", block="provenance", content={"rows": kept})
