"""A leaderboard: many audits on one self-contained page, ranked where they took the same test.

A board holds the runs on the same data under the same threat. Ranks are ranges: two models share a rank as long as an
exact McNemar test on the same images, corrected by Holm over all pairs of their test, does not separate them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vitadel.errors import UserError
from vitadel.findings import title_of
from vitadel.quantities import listed
from vitadel.reporting.comparison import why_not_paired
from vitadel.reporting.kind import kind_of
from vitadel.reporting.page import load_template, script_fields
from vitadel.reporting.read_runs import Run, aspects, differing_aspects, faced, read_all, run_labels, threat_text
from vitadel.runtime.run_folder import write_atomically
from vitadel.statistics import holm, mcnemar

__all__ = ["Board", "Entry", "Test", "boards_of", "write_leaderboard"]

_SIGNIFICANT = 0.05
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FORWARDS_OF_A_GRADIENT = 3


@dataclass(frozen=True)
class Entry:
    """One run. `first` and `last` bound its rank within its test; `near` are the models it is not separable from."""

    run: Run
    label: str
    first: int = 1
    last: int = 1
    near: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return str(self.run.results.get("model", {}).get("family") or "unknown")

    @property
    def parameters(self) -> int | None:
        count = self.run.results.get("model", {}).get("parameters")
        return None if count is None else int(count)

    @property
    def macs(self) -> int | None:
        """Multiply-adds of one image; runs of earlier versions do not have them."""
        count = self.run.results.get("model", {}).get("macs")
        return None if count is None else int(count)

    @property
    def clean(self) -> Mapping[str, Any]:
        return dict(self.run.results["clean"])

    @property
    def worst(self) -> Mapping[str, Any]:
        return dict(self.run.results["worst_case"])

    @property
    def autoattack(self) -> Mapping[str, Any] | None:
        return next((entry for entry in self.run.attacks if entry["name"].startswith("autoattack")), None)

    @property
    def published(self) -> Mapping[str, Any]:
        return dict(self.run.results.get("published") or {})

    @property
    def protocol(self) -> str:
        return str((self.run.results.get("protocol") or {}).get("name") or "")

    @property
    def gradients(self) -> float:
        return self._per_image("gradient_calls")

    @property
    def forwards(self) -> float:
        return self._per_image("forward_calls")

    def _per_image(self, name: str) -> float:
        return float(sum(entry[name] for entry in self.run.attacks) / max(self.worst["n"], 1))

    @property
    def cost(self) -> float:
        """Passes per image in forward passes, to sort by."""
        return _FORWARDS_OF_A_GRADIENT * self.gradients + self.forwards

    @property
    def flags(self) -> list[dict[str, str]]:
        """The findings that cast doubt on the numbers."""
        found = self.run.results.get("findings") or []
        return [{"verdict": each["verdict"], "title": title_of(each)} for each in found if each["verdict"] != "ok"]

    @property
    def examined(self) -> bool:
        return bool(self.run.results.get("findings"))

    @property
    def rank(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


@dataclass(frozen=True)
class Test:
    """The runs that took one test, best first, and the test in words."""

    letter: str
    about: str
    entries: tuple[Entry, ...]

    @property
    def ranked(self) -> bool:
        return len(self.entries) > 1


@dataclass(frozen=True)
class Board:
    """The runs on the same data under the same threat."""

    data: str
    threat: str
    tests: tuple[Test, ...]

    @property
    def rows(self) -> list[tuple[Test, Entry]]:
        return [(test, entry) for test in self.tests for entry in test.entries]

    @property
    def shows_worst(self) -> bool:
        """Whether the worst case says more than AutoAttack's column."""
        return any(
            entry.autoattack is None or entry.autoattack["held"] != entry.worst["held"] for _, entry in self.rows
        )

    @property
    def shows_published(self) -> bool:
        return any(entry.published.get("robust") is not None for _, entry in self.rows)

    @property
    def headline(self) -> str:
        """Who leads, in one sentence; '' where nothing is ranked."""
        test = max(self.tests, key=lambda each: len(each.entries))
        if not test.ranked:
            return ""
        best, *others = test.entries
        if best.near:
            tied = len(best.near)
            return (
                f"{best.label} leads, but is not separable from {listed(best.near) if tied < 4 else f'{tied} others'}."
            )
        return f"{best.label} is more robust than {'all others' if len(others) > 1 else others[0].label}."


def write_leaderboard(runs: Sequence[Path], out: Path) -> int:
    """Write the page; returns the number of runs on it."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"the leaderboard is an HTML page and its name must end in .html, got {out}")
    found = read_all(runs)
    boards = boards_of(found)
    entries = [entry for board in boards for _, entry in board.rows]
    page = load_template("leaderboard.html").render(
        title="Leaderboard",
        boards=boards,
        count=len(entries),
        links={id(entry): _link(entry.run, out) for entry in entries},
        families=sorted({entry.family for entry in entries}),
        threats=sorted({board.threat for board in boards}),
        **script_fields("sort.js", "filter.js"),
    )
    write_atomically(out, page.encode("utf-8", errors="replace"))
    return len(entries)


def boards_of(runs: Sequence[Run]) -> list[Board]:
    """All boards, those with most runs first; a `UserError` for a run that has nothing to rank."""
    entries = [Entry(run, label) for run, label in zip(runs, run_labels(runs), strict=True)]
    for run in runs:
        _check(run)
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((aspects(entry.run)["data"], threat_text(entry.run)), []).append(entry)
    boards = [Board(data, threat, tuple(_tests(group))) for (data, threat), group in groups.items()]
    return sorted(boards, key=lambda board: (-len(board.rows), board.data, board.threat))


def _check(run: Run) -> None:
    what = ""
    if not run.complete:
        what = "is not finished; continue it with --resume first"
    elif not run.results.get("worst_case") or not run.results.get("clean") or not run.attacks:
        what = "has no accuracy under attack"
    elif run.results.get("suite") or not kind_of(run).one_budget:
        what = "is not an audit under one threat model"
    if what:
        raise UserError(f"{run.path} {what}. A leaderboard takes finished runs of `vitadel audit`; leave this one out.")


def _tests(entries: Sequence[Entry]) -> list[Test]:
    groups: list[list[Entry]] = []
    for entry in entries:
        same = (group for group in groups if all(_same_test(entry.run, other.run) for other in group))
        place = next(same, None)
        if place is None:
            groups.append([entry])
        else:
            place.append(entry)
    groups.sort(key=len, reverse=True)
    letters = itertools.chain(_LETTERS, (f"Z{number}" for number in itertools.count(1)))
    return [Test(letter, _about(group[0].run), _ranked(group)) for letter, group in zip(letters, groups, strict=False)]


def _same_test(one: Run, other: Run) -> bool:
    return not differing_aspects([one, other]) and not why_not_paired(one, other)


def _about(run: Run) -> str:
    known = aspects(run)
    attacks = [entry["name"] for entry in run.attacks if entry["name"] in faced(run)]
    parts = [listed(attacks), f"n = {known['n']}", known["size"] and f"{known['size']} pixels", known["precision"]]
    return ", ".join(part for part in parts if part)


def _ranked(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Best first, with the range of ranks that the images allow."""
    order = sorted(entries, key=lambda entry: -entry.worst["held"])
    pairs = list(itertools.combinations(range(len(order)), 2))
    adjusted = holm([_p_value(order[one].run, order[other].run) for one, other in pairs])
    apart = {pair for pair, p in zip(pairs, adjusted, strict=True) if p < _SIGNIFICANT}
    ranked = []
    for place, entry in enumerate(order):
        better = sum((other, place) in apart for other in range(place))
        worse = sum((place, other) in apart for other in range(place + 1, len(order)))
        near = [o for o in range(len(order)) if o != place and tuple(sorted((o, place))) not in apart]
        names = tuple(order[other].label for other in near)
        ranked.append(Entry(entry.run, entry.label, 1 + better, len(order) - worse, names))
    return tuple(ranked)


def _p_value(one: Run, other: Run) -> float:
    first, second = one.held(), other.held()
    if first is None or second is None:
        return 1.0
    return mcnemar(int((first & ~second).sum()), int((second & ~first).sum()))


def _link(run: Run, out: Path) -> str:
    """The run's report, relative to the page so that both can be moved together; '' if there is none."""
    report = run.path.resolve() / "report.html"
    if not report.is_file():
        return ""
    try:
        return quote(Path(os.path.relpath(report, out.resolve().parent)).as_posix())
    except ValueError:  # on another drive
        return report.as_uri()
