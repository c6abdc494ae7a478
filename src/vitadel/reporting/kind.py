"""What a report shows of a run: sections, made by the kind of run it is.

Every file in `reporting/kinds` defines one kind as `KIND` and is named after it: after the study or the suite that
results.json names, else after the verb of the command. A page imports only the kinds of its runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vitadel.findings import title_of
from vitadel.quantities import listed
from vitadel.reporting.figures import Picture
from vitadel.reporting.read_runs import Array, Fields, Run, damaged, misfit, read_arrays
from vitadel.reporting.tables import Table


@dataclass(frozen=True)
class Section:
    """A part of the page: sentences, a figure with its caption, tables, and remarks below them."""

    title: str
    draw: Callable[[], Picture | None] = lambda: None
    caption: str = ""
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    sentences: Sequence[str] = ()
    warning: str | None = None
    file: str = ""  # exported tables are named after it; without one only tables with a name are exported
    exported: Sequence[Table] | None = None  # instead of `tables`, where files have another layout than the page
    block: str = "measured"  # of templates/report.html
    content: Mapping[str, Any] = field(default_factory=dict)  # what a block other than "measured" shows

    @cached_property
    def picture(self) -> Picture | None:
        return self.draw()

    def files(self, number: str) -> list[Table]:
        """Tables to export, each with the name of its file; `number` distinguishes several runs."""
        tables = [table for table in (self.tables if self.exported is None else self.exported) if table.rows]
        unnamed = [table for table in tables if not table.name]
        places = {id(table): f"-{place}" if len(unnamed) > 1 else "" for place, table in enumerate(unnamed, start=1)}
        return [
            replace(table, name=f"{table.name or self.file}{number}{places.get(id(table), '')}")
            for table in tables
            if table.name or self.file
        ]


@dataclass(frozen=True)
class Trust:
    """Whether to rely on a run's numbers, in one sentence, and the command to run next."""

    verdict: str
    sentence: str
    command: str = ""

    @property
    def sign(self) -> str:
        return {"broken": "✗", "suspicious": "!", "ok": "✓"}.get(self.verdict, "?")


def doubts(run: Run) -> Trust | None:
    """None if no finding casts doubt on the numbers."""
    findings = run.results.get("findings") or []
    for verdict in ("broken", "suspicious"):
        raised = [title_of(finding) for finding in findings if finding["verdict"] == verdict]
        if raised:
            sentence = f"Do not rely on these numbers yet. {verdict.capitalize()}: {listed(raised)}; see the findings."
            return Trust(verdict, sentence)
    return None


@dataclass(frozen=True)
class Kind:
    """How one kind of run is reported."""

    sentence: Callable[[Run], str]
    """The result in plain words; accuracy under attack never stands without what it was measured with."""

    sections: Callable[[Run], Sequence[Section]] = lambda run: ()
    compare: Callable[[Mapping[str, Run]], Section | None] = lambda runs: None
    """Several runs of this kind side by side, by their labels."""

    trust: Callable[[Run], Trust | None] = doubts
    show: Callable[[Run], None] | None = None
    """Print the run in the terminal; by default the sentence, and the tables and remarks of the sections."""

    partial: bool = False  # whether an unfinished run can be reported; if not, it is reported as an audit
    one_budget: bool = True  # whether all attacks share one budget, so that worst cases can be compared
    fields: Mapping[str, Fields] = field(default_factory=dict)  # of results.json, that only this kind has


# Where the name in a run folder is not that of the file.
_FILES = {
    "attack": "audit",
    "harden": "training",
    "diagnose": "diagnosis",
    "inspect": "activations",
    "corrupt": "corrupted_copy",
    "ladder": "threat_levels",
}


@cache
def _names() -> frozenset[str]:
    return frozenset(path.stem for path in Path(__file__).with_name("kinds").glob("[a-z]*.py"))


def _load(name: str) -> Kind:
    kind: Kind = importlib.import_module(f"vitadel.reporting.kinds.{name}").KIND
    return kind


def kind_of(run: Run) -> Kind:
    """The kind of a run; a run that is not finished, or of a kind that only a newer version knows, is an audit."""
    analysis = run.results.get("study")
    name = f"study-{analysis.get('name')}" if analysis else str(run.results.get("suite") or run.command.get("verb"))
    name = _FILES.get(name, name).replace("-", "_")
    if name not in _names():
        unknown = f"A study of a kind that is not known here: {analysis.get('name')}." if analysis else ""
        return replace(_load("audit"), sentence=lambda run: unknown) if analysis else _load("audit")
    kind = _load(name)
    if run.complete or kind.partial:
        return kind
    return _load("audit") if kind.one_budget else replace(_load("audit"), one_budget=False, sections=lambda run: ())


@contextmanager
def name_damage(*runs: Run) -> Iterator[None]:
    """Report what a kind fails to read in results.json as damage."""
    for run in runs:
        for name, expected in kind_of(run).fields.items():
            if fault := misfit(name, run.results[name], expected) if run.results.get(name) is not None else "":
                raise damaged(run.path / "results.json", fault)
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        odd = [run.path / "results.json" for run in runs if run.results and kind_of(run) is not _load("audit")]
        if not odd:
            raise
        what = f"what the suite or study should have written is not as expected, {type(error).__name__} {error}"
        raise damaged(" or ".join(map(str, odd)), what) from error


Results = Mapping[str, Any]
"""The field `study` of the results."""


def study(
    title: str,
    caption: str,
    sentence: Callable[[Results], str],
    draw: Callable[[Run], Picture | None],
    tables: Callable[[Results], Sequence[Table]],
    remarks: Callable[[Results], Sequence[str]] = lambda results: (),
) -> Kind:
    """The kind of a study, whose functions get the field `study` of the results."""

    def section(run: Run) -> list[Section]:
        found = run.results["study"]
        return [Section(title, lambda: draw(run), caption, tables(found), remarks(found), file="study")]

    return Kind(lambda run: sentence(run.results["study"]), section)


def read_study_arrays(run: Run) -> dict[str, Array]:
    """The arrays in the folder's `study.npz`; none if the study left no such file."""
    path = run.path / "study.npz"
    return read_arrays(path) if path.exists() else {}
