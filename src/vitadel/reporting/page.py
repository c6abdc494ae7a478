"""One self-contained HTML page from any number of run folders: no network, one script that sorts, all else escaped.

The page is a list of sections, which `sections.py` makes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitadel.errors import UserError
from vitadel.findings import PRECHECK, can_diagnose, title_of
from vitadel.reporting.figures import Picture, draw_accuracies, draw_classes, draw_examples
from vitadel.reporting.headline import headline
from vitadel.reporting.kinds.activations import activations_sentence, draw_activations
from vitadel.reporting.kinds.adapter_maps import draw_maps
from vitadel.reporting.kinds.corruptions import corruption_sentences, draw_corruptions
from vitadel.reporting.kinds.stability import draw_stability, stability_sentence
from vitadel.reporting.kinds.threat_levels import draw_ladder, ladder_sentence
from vitadel.reporting.kinds.trade_off import draw_trade_off, trade_off_sentence
from vitadel.reporting.kinds.training import draw_training
from vitadel.reporting.light_images import with_lighter_images
from vitadel.reporting.pairs import p_text
from vitadel.reporting.read_runs import (
    Run,
    aspects,
    faced,
    interval_text,
    listed,
    percent,
    plain,
    read_all,
    run_labels,
    shown_from,
    threat_text,
)
from vitadel.reporting.sections import OF_A_RUN, OVERVIEW, command_line, from_command_line
from vitadel.reporting.studies import draw_study, study_sentence
from vitadel.runtime.opening import next_command, recorded_opening
from vitadel.runtime.run_folder import write_atomically
from vitadel.version import __version__

__all__ = ["render", "trust", "verdict", "write_report"]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the page, and the figures as PNG into the run folder in which the page lies."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"the report is an HTML page and must be named like one, got {out}; take for example report.html"
        )
    gathered = read_all(runs)
    page = render(gathered)  # first: where anything cannot be shown, nothing is written
    for run in gathered:
        if out.resolve().is_relative_to(run.path.resolve()):
            alone = (
                draw_examples,
                draw_training,
                draw_activations,
                draw_ladder,
                draw_trade_off,
                draw_maps,
                draw_stability,
                draw_corruptions,
                draw_study,
            )
            drawn = (draw_accuracies([run]), draw_classes(run)) if run.one_budget else ()
            for picture in filter(None, (*drawn, *(draw(run) for draw in alone))):
                write_atomically(run.path / "figures" / f"{picture.name}.png", picture.png())
    write_atomically(out, page.encode("utf-8", errors="replace"))


MOST_BYTES = 10_000_000
"""Of a page: what can still be mailed."""


def render(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    labels = run_labels(runs)
    views = [_run_view(run, label) for run, label in zip(runs, labels, strict=True)]
    with shown_from(*runs):
        overview = [section for make in OVERVIEW if (section := make(runs))]
    page = functools.partial(
        _template().render,
        title=f"{labels[0]} on {aspects(runs[0])['data']}" if len(runs) == 1 else f"{len(runs)} runs compared",
        headline=headline(runs, next((part.content["pairs"] for part in overview if part.kind == "pairs"), ())),
        doubted=[view for view in views if view["trust"] and view["trust"]["verdict"] in ("broken", "suspicious")],
        overview=overview,
        runs=views,
        script=Markup(_script()),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()}",
        version=__version__,
    )
    pictures: list[Picture] = []

    def noted(picture: Picture) -> str:
        pictures.append(picture)
        return ""

    words: str = page(inline=noted)
    drawn = [picture.svg(f"figure{number}-") for number, picture in enumerate(pictures, start=1)]
    figures = iter(_fitting(drawn, MOST_BYTES - _bytes_of(words)))
    whole: str = page(inline=lambda picture: next(figures))
    return whole


def _fitting(drawn: Sequence[str], room: int) -> list[Markup]:
    """Figures as they are if there is room for all, else with lighter images, and without what still does not fit."""
    if sum(map(_bytes_of, drawn)) > room:
        drawn = [with_lighter_images(figure) for figure in drawn]
    fitting = []
    for figure in drawn:
        fits = _bytes_of(figure) <= room
        room -= _bytes_of(figure) if fits else 0
        # Safe to take as it is: an XML serialiser wrote it, so every text in it is escaped.
        fitting.append(Markup(figure) if fits else _LEFT_OUT)
    return fitting


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", errors="replace"))


_LEFT_OUT = Markup(
    '<p class="note">Left out, to keep the page below 10 MB: make a report of this run alone, or <code>--export</code> '
    "the figures.</p>"
)


@functools.cache
def _script() -> str:
    """What sorts tables; the page's policy names it by its hash, so that nothing else on the page can run."""
    return files("vitadel.reporting").joinpath("templates", "sort.js").read_text("utf-8")


@functools.cache
def _template() -> Any:
    loader = PackageLoader("vitadel.reporting", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        percent=percent,
        interval=interval_text,
        duration=_duration,
        p_value=p_text,
        points=lambda share: f"{100 * share:+.1f}",
        listed=listed,
        plain=plain,
        numeric=_numeric,
        unbroken=lambda text: text.replace(" %", "\u00a0%"),  # no line begins with a percent sign
    )
    return environment.get_template("report.html")


def _numeric(table: Mapping[str, Any]) -> list[bool]:
    """Which columns hold numbers, with or without what stands behind them; these are set flush right."""
    columns = [[row[place] for row in table["rows"]] for place in range(len(table["headings"]))]
    return [all(_NUMBER.match(cell) for cell in column if cell) and any(column) for column in columns]


_NUMBER = re.compile(r"[-+<>−]?\s*\d")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def verdict(run: Run) -> str:
    """One sentence in plain words; a number under attack never stands without what it was measured with."""
    clean, worst = run.results.get("clean"), run.results.get("worst_case")
    if run.complete and run.results.get("study"):
        return study_sentence(run.results["study"])
    if not clean and run.results.get("activations"):
        return activations_sentence(run.results["activations"])
    if run.complete and run.results.get("suite") == "trade-off":
        return trade_off_sentence(run.results)
    if run.complete and run.results.get("suite") == "stability":
        return stability_sentence(run.results)
    if run.complete and run.results.get("suite") == "corruptions":
        before = f"Clean accuracy {percent(clean['accuracy'])} (n = {clean['n']:,}). " if clean else ""
        return before + " ".join(corruption_sentences(run.results))
    if not clean:
        return "There are no results yet."
    if run.results.get("diagnosis"):
        return f"{percent(clean['accuracy'])} of {clean['n']:,} images are classified correctly; they were examined."
    if run.results.get("suite") == "ladder":
        return ladder_sentence(run.results)
    sentence = "" if run.complete else "So far: "
    sentence += f"{percent(clean['accuracy'])} of {clean['n']:,} images are classified correctly "
    sentence += f"(95 % interval {interval_text(clean['ci95'])}); "
    within = [entry for entry in run.attacks if not entry.get("own_rules")]
    if not worst or not within:
        what = "was run" if run.complete else "is finished"
        kind = "attack" if within == run.attacks else "attack within the budget"
        unknown = f"{sentence}no {kind} {what}, so nothing is known about how they fare under "
        return f"{unknown}{'attack' if within == run.attacks else 'one'}.{_by_own_rules(run)}"
    names = listed([entry["name"] for entry in within])
    share = "none of them survives" if worst["held"] == 0 else f"{percent(worst['robust_accuracy'])} still are"
    return (
        f"{sentence}under {names} with {threat_text(run)}, seed {run.results.get('seed')}, "
        f"{share} (95 % interval {interval_text(worst['ci95'])}).{_by_own_rules(run)}"
    )


def _by_own_rules(run: Run) -> str:
    """Attacks with a budget of another kind are no part of the worst case, and are told beside it."""
    told = [
        f"{entry['name']} {percent(entry['robust_accuracy'])} ({interval_text(entry['ci95'])})"
        for entry in run.attacks
        if entry.get("own_rules")
    ]
    return f" By rules of their own, so each alone: {listed(told)}." if told else ""


def trust(run: Run) -> dict[str, str] | None:
    """Whether to rely on the numbers, in one sentence from the findings, and what to run next."""
    told = run.results.get("diagnosis")
    found = run.results.get("findings") or []
    seen = {each["verdict"] for each in found} | {(told or {}).get("verdict")}  # the whole's, if checks failed
    kind = next((kind for kind in ("broken", "suspicious") if kind in seen), "ok")
    sign = {"broken": "✗", "suspicious": "!", "ok": "✓"}[kind]
    if told:
        return {"verdict": kind, "sign": sign, "sentence": str(told["sentence"]), "command": str(told["next"] or "")}
    if kind != "ok":
        raised = listed([title_of(each) for each in found if each["verdict"] == kind])
        sentence = f"Do not rely on these numbers yet. {kind.capitalize()}: {raised}; see the findings."
        return {"verdict": kind, "sign": sign, "sentence": sentence, "command": ""}
    if not run.complete or not run.attacks or run.command["verb"] != "audit" or run.results.get("suite"):
        return None
    settings, known = run.command["settings"], aspects(run)
    threat = run.results.get("threat", {})
    norm = str(threat.get("norm") or settings.get("norm") or "")
    opening = recorded_opening(run.command)
    command = next_command(opening, "diagnose", run.model, known["data"], norm, known["eps"])
    if not norm or not known["eps"] or not can_diagnose(norm, threat.get("eps", 0)):
        command = ""
    if any(each["check"] in _LOOKED for each in found):
        sentence = "Nothing suspicious came up in the audit; look closer before anything is published."
        return {"verdict": "ok", "sign": "✓", "sentence": sentence, "command": command}
    sentence = "Not examined: the doctor did not look at this model, so nothing tells whether to rely on these numbers."
    return {"verdict": "unexamined", "sign": "?", "sentence": sentence, "command": command}


_LOOKED = (PRECHECK.identifier, "the doctor's glance")  # identifier of the finding, and its name in earlier versions


def _run_view(run: Run, label: str) -> dict[str, Any]:
    model = run.results.get("model", {})
    parameters = f"{model['parameters']:,} parameters" if "parameters" in model else ""
    family = f"family {model['family']}" if model.get("family") else ""
    with shown_from(run):
        return {
            "label": label,
            "facts": [fact for fact in (f"data {aspects(run)['data']}", family, parameters) if fact],
            "verdict": verdict(run),
            "trust": trust(run),
            "unfinished": None if run.complete else _unfinished(run),
            "gauges": _gauges(run),
            "sections": [section for make in OF_A_RUN if (section := make(run))],
        }


def _unfinished(run: Run) -> dict[str, Any]:
    done = len(run.attacks)
    text = "nothing that could be shown was finished yet"
    if run.results.get("clean"):
        text = f"{done} of {done + len(run.pending)} attacks are done, and only these are counted"
    command = command_line(run)
    can_resume = from_command_line(run) and "--resume" not in run.command["argv"]
    return {"text": text, "pending": run.pending, "command": f"{command} --resume" if can_resume else command}


def _gauges(run: Run) -> list[dict[str, Any]]:
    clean, worst = run.results.get("clean"), run.results.get("worst_case")
    if not clean:
        return []
    base = f"n = {clean['n']:,}, seed {run.results.get('seed')}"
    gauges = [_gauge("clean", "clean images", clean["accuracy"], clean["ci95"], base)]
    if worst and run.attacks:
        every = "every attack" if len(faced(run)) == len(run.attacks) else "every attack within the budget"
        note = f"{threat_text(run)}, {base}; a sample counts only if it holds against {every}"
        gauges.append(_gauge("worst", "worst case under attack", worst["robust_accuracy"], worst["ci95"], note))
    return gauges


def _gauge(kind: str, name: str, value: float, ci95: Sequence[float], note: str) -> dict[str, Any]:
    return {"kind": kind, "name": name, "value": value, "ci95": ci95, "note": note}
