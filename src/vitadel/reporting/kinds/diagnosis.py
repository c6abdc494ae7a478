"""Diagnoses: checks for gradient masking, their evidence, and whether to trust the model's numbers."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.findings import title_of
from vitadel.quantities import percent
from vitadel.reporting.kind import Kind, Section, Trust, doubts
from vitadel.reporting.read_runs import Run
from vitadel.reporting.terminal import VERDICT_COLORS, evidence_text


def _sentence(run: Run) -> str:
    clean = run.results["clean"]
    return f"{percent(clean['accuracy'])} of {clean['n']:,} images are classified correctly; these were examined."


def _trust(run: Run) -> Trust:
    """The diagnosis's own conclusion; its verdict also counts checks that failed to run."""
    found, doubt = run.results["diagnosis"], doubts(run)
    verdict = doubt.verdict if doubt else found.get("verdict", "ok")
    return Trust(verdict, found["sentence"], found["next"] or "")


def _sections(run: Run) -> list[Section]:
    found = run.results["diagnosis"]
    remarks = [f"Not examined: {name}, {reason}." for name, reason in found.get("not_examined", {}).items()]
    if cost := found.get("cost"):
        took = f"; it took {cost['seconds']:,.1f} s" if "seconds" in cost else ""
        most = f"at most {cost['gradients']:,.0f} gradients and {cost['forwards']:,.0f} forwards each"
        remarks.insert(0, f"Cost: {cost['images']:,} images, {most}{took}.")
    return [Section("Extent of the diagnosis", remarks=remarks)] if remarks else []


def show_diagnosis(run: Run) -> None:
    """All checks with their numbers, then the advice of those that were raised, then the conclusion."""
    console, results = Console(), run.results
    found, threat = results["diagnosis"], results["threat"]
    table = Table(
        *("check", "verdict", "evidence"),
        title=f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}, n = {results['data']['n']}; "
        f"{threat['norm']}, eps {threat['eps_text']}; {found['level']}",
        title_justify="left",
    )
    for finding in results["findings"]:
        verdict = finding["verdict"]
        colored = f"[{VERDICT_COLORS.get(verdict, 'yellow')}]{escape(verdict)}[/]"
        table.add_row(escape(title_of(finding)), colored, escape(evidence_text(finding["evidence"])))
    for name, reason in found["not_examined"].items():
        table.add_row(escape(name), "[dim]left out[/]", f"[dim]{escape(reason)}[/]")
    console.print(table)
    for finding in results["findings"]:
        if finding["advice"]:
            console.print(f"[yellow]{escape(title_of(finding))}:[/] {escape(finding['advice'])}")
    console.print(f"[bold]{escape(found['sentence'])}[/]")
    if found["next"]:
        console.print(f"Next: {escape(found['next'])}")


_FIELDS = {
    "sentence": "text",
    "next": "text or null",
    "verdict?": "text",
    "not_examined?": "an object",
    "cost?": "an object",
}
KIND = Kind(_sentence, _sections, trust=_trust, show=show_diagnosis, fields={"diagnosis": _FIELDS})
