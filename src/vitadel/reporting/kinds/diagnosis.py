"""A visit to the doctor on a terminal: the plan before, the findings and the one sentence after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.findings import title_of

__all__ = ["COLOURS", "evidence_text", "show_diagnosis", "tell_cost"]

COLOURS = {"ok": "green", "suspicious": "yellow", "broken": "red"}


def tell_cost(cost: Mapping[str, Any]) -> None:
    """What a visit takes at most; on standard error, where it does not mix with results."""
    Console(stderr=True).print(
        f"[dim]{cost['images']} images, at most {cost['gradients']:.0f} gradients and {cost['forwards']:.0f} forwards "
        f"each: {cost['seconds_at_most']:.0f} s on this machine; images that fall early cost less.[/]"
    )


def evidence_text(evidence: str | Mapping[str, Any]) -> str:
    """An audit's findings say it in words, the doctor's in numbers."""
    if isinstance(evidence, str):
        return evidence
    return ", ".join(f"{key} {_short(value)}" for key, value in evidence.items())


def _short(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_diagnosis(results: Mapping[str, Any]) -> None:
    """All checks with their numbers, then the advice of those that were raised, then the sentence."""
    console, told, threat = Console(), results["diagnosis"], results["threat"]
    table = Table(
        *("check", "verdict", "evidence"),
        title=f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}, n = {results['data']['n']}; "
        f"{threat['norm']}, eps {threat['eps_text']}; {told['level']}",
        title_justify="left",
    )
    for finding in results["findings"]:
        verdict = finding["verdict"]
        coloured = f"[{COLOURS.get(verdict, 'yellow')}]{escape(verdict)}[/]"
        table.add_row(escape(title_of(finding)), coloured, escape(evidence_text(finding["evidence"])))
    for name, reason in told["not_examined"].items():
        table.add_row(escape(name), "[dim]left out[/]", f"[dim]{escape(reason)}[/]")
    console.print(table)
    for finding in results["findings"]:
        if finding["advice"]:
            console.print(f"[yellow]{escape(title_of(finding))}:[/] {escape(finding['advice'])}")
    console.print(f"[bold]{escape(told['sentence'])}[/]")
    console.print(f"Next: {escape(told['next'])}")
