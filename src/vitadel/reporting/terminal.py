"""What commands print in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.findings import title_of
from vitadel.quantities import duration
from vitadel.reporting.kind import Section, kind_of, name_damage
from vitadel.reporting.read_runs import Run, aspects, read_run, run_labels
from vitadel.reporting.tables import fold_intervals, row_texts

VERDICT_COLORS = {"ok": "green", "suspicious": "yellow", "broken": "red"}


def show_run(folder: Path) -> None:
    """Print the results of a finished run in the way of its kind."""
    run = read_run(folder)
    show = kind_of(run).show or show_sections
    with name_damage(run):
        show(run)


def show_sections(run: Run) -> None:
    """Print the sentence of a run, the tables and remarks of its sections, and its findings."""
    kind = kind_of(run)
    show_heading(run)
    Console().print(escape(kind.sentence(run)))
    for section in kind.sections(run):
        show_section(section)
    show_findings(run.results.get("findings") or [])


def show_heading(run: Run) -> None:
    """Print which model was run on which data."""
    if "model" in run.results:
        known = aspects(run)
        (label,) = run_labels([run])
        heading = f"{label} on {known['data']}: n = {known['n']}, seed {run.results.get('seed')}"
        Console().print(f"[bold]{escape(heading)}[/]")


def show_section(section: Section) -> None:
    """Print the tables and remarks of a section."""
    console = Console()
    for table in map(fold_intervals, section.tables):
        shown = Table(title=escape(table.caption), title_justify="left")
        for column in table.columns:
            shown.add_column(
                escape(column.heading), justify="left" if column.digits is None else "right", overflow="fold"
            )
        for row in table.rows:
            shown.add_row(*map(escape, row_texts(row, table)))
        console.print(shown)
    for remark in section.remarks:
        console.print(f"[dim]{escape(remark)}[/]")


def evidence_text(evidence: str | Mapping[str, Any]) -> str:
    """Findings of an audit have evidence in words, those of a diagnosis in numbers."""
    if isinstance(evidence, str):
        return evidence
    return ", ".join(f"{key} {_short(value)}" for key, value in evidence.items())


def _short(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_findings(findings: Sequence[Mapping[str, Any]]) -> None:
    """Print what casts doubt on the numbers."""
    console = Console()
    for finding in findings:
        text = f"{title_of(finding)}: {evidence_text(finding['evidence'])}; {finding['advice']}"
        color = VERDICT_COLORS.get(finding["verdict"], "yellow")
        console.print(f"[{color}]{escape(finding['verdict'])}[/] {escape(text)}")


def show_effective_eps(name: str, settings: Mapping[str, Any], console: Console) -> None:
    """Print a budget in other units than pixels, which seems larger than it is."""
    if settings.get("effective_eps"):
        console.print(f"[yellow]{escape(name)}: eps {escape(settings['effective_eps'])}[/]")


def show_plan(cost: dict[str, Any]) -> None:
    """What an audit will likely take, and the most it can take."""
    console = Console()
    title = f"{cost['samples']} samples, batches of {cost['batch_size']}, {cost['device']}, {cost['threads']} threads"
    table = Table("", title=title, title_justify="left")
    for heading in ("gradients per sample", "forwards per sample", "likely", "at most"):
        table.add_column(heading, justify="right")
    for row in cost["rows"]:
        times = (duration(row[name]) for name in ("likely_seconds", "seconds"))
        table.add_row(escape(row["name"]), f"{row['gradients']:g}", f"{row['forwards']:g}", *times)
    table.add_section()
    table.add_row("all", "", "", duration(cost["seconds_likely"]), duration(cost["seconds_at_most"]))
    console.print(table)
    console.print(
        f"Measured here: {cost['forward_ms']:.2f} ms a forward, {cost['gradient_ms']:.2f} ms a gradient per sample; "
        f"peak memory {cost['memory_mb']:.0f} MB. Passes and 'at most' are those of samples that withstand everything."
    )
    console.print(
        f"'Likely' comes from a trial of the attacks on {cost['tried_on']} samples."
        if cost["tried_on"]
        else "The most is so short that 'likely' was not tried."
    )
    if any(row["name"].endswith("if it escalates") for row in cost["rows"]):
        console.print("It escalates to AutoAttack only if gradients look masked; with --no-escalate it only warns.")
    if cost["compile"]:
        console.print(escape(cost["compile"]))


def show_training_plan(title: str, cost: dict[str, Any]) -> None:
    """What a training will take, part by part."""
    console = Console()
    table = Table(
        "",
        title=f"{escape(title)}: {cost['epochs']} epochs, {cost['steps']} steps of {cost['batch_size']} images, "
        f"{cost['parameters']:,} parameters; {cost['processes']} x {cost['device']}, {cost['threads']} threads",
        title_justify="left",
    )
    for heading in ("images", "likely", "at most"):
        table.add_column(heading, justify="right")
    for row in cost["rows"]:
        times = (duration(row[name]) for name in ("likely_seconds", "seconds"))
        table.add_row(escape(row["name"].removesuffix(", at most")), f"{row['images']:,.0f}", *times)
    table.add_section()
    table.add_row("all", "", duration(cost["seconds_likely"]), duration(cost["seconds"]))
    console.print(table)
    console.print("[dim]'Likely': half of the images withstand the attacks of validation and audit.[/]")
    if "memory" in cost:
        _show_memory(console, cost["memory"])
    if cost["plugins_not_timed"]:
        console.print(f"[dim]The cost of plug-ins is not counted: {escape(', '.join(cost['plugins_not_timed']))}.[/]")


def _show_memory(console: Console, memory: Mapping[str, Any]) -> None:
    """The memory of a step on each device, and the largest micro-batch that fits."""
    ways = {"as set": memory["as_set"], "checkpointing": memory["checkpointing"]}
    known = {name: way for name, way in ways.items() if way is not None}
    title = f"memory per device: weights {_gb(memory['weights_bytes'])}, "
    title += f"optimizer state {_gb(memory['optimizer_bytes'])}"
    table = Table("", title=title, title_justify="left")
    for name in known:
        table.add_column(name, justify="right")
    table.add_row(f"{memory['as_set']['images']} images", *(_gb(way["peak_bytes"]) for way in known.values()))
    table.add_row("each image", *(_gb(way["bytes_per_image"]) for way in known.values()))
    here = f"most images, {_gb(memory['device_bytes'])} (here)"
    table.add_row(here, *(f"{way['largest_batch']:,}" for way in known.values()))
    for size in memory["as_set"]["largest_batch_by_gb"]:
        table.add_row(f"most images, {size} GB", *(f"{way['largest_batch_by_gb'][size]:,}" for way in known.values()))
    console.print(table)
    console.print("[dim]Images of a micro-batch, in 90 % of the memory. Of plug-ins only averaged weights count.[/]")


def _gb(size: float) -> str:
    return f"{size / 2**30:.2f} GB" if size >= 2**30 else f"{size / 2**20:.1f} MB"


def show_names(rows: Sequence[tuple[str, str]]) -> None:
    """A list of names with one line each."""
    console = Console()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="fold")
    for name, about in rows:
        table.add_row(escape(name), f"[dim]{escape(about)}[/]")
    console.print(table)
