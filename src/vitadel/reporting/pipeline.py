"""Audits in a pipeline: gates that a model must pass, and a short Markdown summary for job pages and pull requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitadel.errors import UserError, check_known
from vitadel.findings import BROKEN, SUSPICIOUS, title_of
from vitadel.quantities import interval_text, percent
from vitadel.reporting.kind import kind_of
from vitadel.reporting.read_runs import Run, read_run, threat_text
from vitadel.reporting.tables import Column, Table, as_markdown, in_markdown
from vitadel.reporting.terminal import evidence_text
from vitadel.runtime.run_folder import write_atomically

_RAISED: Mapping[str, tuple[str, ...]] = {SUSPICIOUS: (SUSPICIOUS, BROKEN), BROKEN: (BROKEN,)}


@dataclass(frozen=True)
class Gate:
    """What a model must reach: the lower end of the robust accuracy's interval, in percent, and no such finding."""

    fail_under: float | None = None
    fail_on: str | None = None

    def __post_init__(self) -> None:
        if self.fail_under is not None and not 0 < self.fail_under <= 100:
            raise UserError(f"--fail-under takes a percentage above 0 and up to 100, e.g. 40; got {self.fail_under:g}")
        if self.fail_on is not None:
            check_known("verdict of --fail-on", self.fail_on, tuple(_RAISED))

    @property
    def is_set(self) -> bool:
        return self.fail_under is not None or self.fail_on is not None

    def failures(self, results: Mapping[str, Any]) -> list[str]:
        """Why these results do not pass; nothing if they do."""
        found, worst = [], results.get("worst_case") or {}
        if self.fail_under is not None and not worst:
            found.append("no attack within the budget was run, so there is no robust accuracy")
        elif self.fail_under is not None and 100 * worst["ci95"][0] < self.fail_under:
            found.append(
                f"the robust accuracy is {percent(worst['robust_accuracy'])} ({interval_text(worst['ci95'])}), and the "
                f"lower end must be at least {self.fail_under:g} %"
            )
        for finding in results.get("findings") or []:
            if self.fail_on is not None and finding["verdict"] in _RAISED[self.fail_on]:
                found.append(f"{finding['verdict']}: {title_of(finding)}")
        return found


def check_summary_file(path: Path) -> None:
    """Refuse a file that could not be written, before a long run."""
    if path.is_dir():
        raise UserError(f"--summary {path} is a folder; give the name of a Markdown file, e.g. {path / 'audit.md'}")
    if not path.parent.is_dir():
        raise UserError(f"--summary {path}: there is no folder {path.parent}; create it, or give another file")


def write_summary(folder: Path, path: Path, gate: Gate) -> None:
    """Write the summary of the run in `folder` to a file, which is replaced."""
    write_atomically(path, markdown_summary(read_run(folder), gate).encode("utf-8", errors="replace"))


def markdown_summary(run: Run, gate: Gate) -> str:
    """A heading with the verdict of the gate, the numbers in a table, and the findings that were raised."""
    failures = gate.failures(run.results)
    verdict = (": not passed" if failures else ": passed") if gate.is_set else ""
    lines = [f"### Robustness of {in_markdown(run.model)}{verdict}", ""]
    lines += [f"- **{in_markdown(reason)}**" for reason in failures] + ([""] if failures else [])
    lines += [in_markdown(kind_of(run).sentence(run)), "", as_markdown(_numbers(run)), *_findings(run), ""]
    return "\n".join(lines)


def _numbers(run: Run) -> Table:
    entries: list[tuple[str, Mapping[str, Any] | None, str]] = [("clean", run.results.get("clean"), "accuracy")]
    entries += [(entry["name"], entry, "robust_accuracy") for entry in run.attacks]
    entries.append(("worst case", run.results.get("worst_case"), "robust_accuracy"))
    rows = tuple(
        (name, percent(entry[key]), interval_text(entry["ci95"]), entry["n"]) for name, entry, key in entries if entry
    )
    data = run.results.get("data", {}).get("spec") or "unknown data"
    caption = ", ".join(filter(None, [str(data), threat_text(run), f"seed {run.results.get('seed')}"]))
    columns = (Column(""), Column("accuracy", 1), Column("95 % interval", 1), Column("n", 0))
    return Table(caption, columns, rows)


def _findings(run: Run) -> Sequence[str]:
    raised = [finding for finding in run.results.get("findings") or [] if finding["verdict"] in _RAISED[SUSPICIOUS]]
    if not raised:
        return ["No check raised anything."]
    return [
        f"- **{in_markdown(str(finding['verdict']))}** "
        + in_markdown(f"{title_of(finding)}: {evidence_text(finding['evidence'])}; {finding['advice']}")
        for finding in raised
    ]
