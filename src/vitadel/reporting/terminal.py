"""What a person sees in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.findings import title_of
from vitadel.reporting.kinds.activations import where_rows
from vitadel.reporting.kinds.diagnosis import COLOURS, evidence_text
from vitadel.reporting.read_runs import comparability

__all__ = [
    "show_activations",
    "show_findings",
    "show_kept",
    "show_names",
    "show_plan",
    "show_results",
    "show_training",
    "show_training_plan",
    "tell_notes",
]

_BAR = 12


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _bar(value: float, console: Console) -> str:
    filled = round(_BAR * value)
    full, empty = "█·" if console.encoding.lower().startswith("utf") else "#."
    color = "green" if value >= 0.5 else "yellow" if value >= 0.2 else "red"
    return f"[{color}]{full * filled}[/][dim]{empty * (_BAR - filled)}[/]"


def _cost_texts(entry: Mapping[str, Any]) -> tuple[str, str]:
    seen = max(entry["attacked"], 1)
    return f"{entry['gradient_calls'] / seen:.1f}", f"{entry['forward_calls'] / seen:.1f}"


def show_results(results: dict[str, Any]) -> None:
    """The table of an audit, and one sentence that says what it means."""
    console = Console()
    threat, data, model = results["threat"], results["data"], results["model"]
    table = Table(
        title=f"{escape(model['spec'])} on {escape(data['spec'])}: {threat['norm']}, eps {threat['eps_text']}, "
        f"n = {data['n']}, seed {results['seed']}",
        title_justify="left",
    )
    for heading in ("", "accuracy", "95 % interval", "", "grads", "fwds"):
        table.add_column(heading, justify="left" if heading in ("", "95 % interval") else "right")

    def add(name: str, value: float, interval: Sequence[float], cost: tuple[str, str] = ("", "")) -> None:
        low, high = interval
        bounds = f"{100 * low:.1f} to {100 * high:.1f}"
        table.add_row(escape(name), _percent(value), bounds, _bar(value, console), *cost)

    clean, worst = results["clean"], results["worst_case"]
    add("clean", clean["accuracy"], clean["ci95"])
    for entry in results["attacks"]:
        add(entry["name"], entry["robust_accuracy"], entry["ci95"], _cost_texts(entry))
        for member in entry.get("members", ()):
            broke = f"broke {member['broken']} of {member['attacked']}"
            table.add_row(f"[dim]  {escape(member['name'])}[/]", "", f"[dim]{broke}[/]", "", *_cost_texts(member))
    if worst is not None:
        table.add_section()
        add("worst case", worst["robust_accuracy"], worst["ci95"])
    console.print(table)
    beside = results.get("clean_among_all")
    if beside:
        told = f"Clean, among all {beside['classes']} classes: {_percent(beside['accuracy'])}"
        console.print(f"[dim]{told}, {escape(beside['remark'])}.[/]")
    if results["attacks"]:
        counts = dict.fromkeys(entry["counts"] for entry in results["attacks"])
        console.print(f"[dim]Robust accuracy counts {' or '.join(counts)}; passes are per attacked sample.[/]")
    for entry in results["attacks"]:
        if entry["paper_style"]:
            style = entry["paper_style"]
            told = f"{escape(entry['name'])}, counted as in its paper: {_percent(style['robust_accuracy'])}"
            console.print(f"[dim]{told}, {escape(style['remark'])}.[/]")
        _tell_effective_eps(entry["name"], entry["settings"], console)
    void = sum(entry["void"] for entry in results["attacks"])
    if void:
        console.print(f"[yellow]{void} proposals broke box or budget and were not counted as successes.[/]")
    if results.get("compile"):
        console.print(f"[dim]{escape(results['compile'])}[/]")
    if data["left_out"]:
        names = ", ".join(map(escape, data["left_out_names"][:3]))
        console.print(f"[yellow]{data['left_out']} samples could not be read and were left out: {names}[/]")
    if results.get("protocol"):
        console.print(f"[dim]{escape(comparability(results['protocol']))}[/]")
    show_findings(results["findings"])


def show_findings(findings: Sequence[Mapping[str, Any]]) -> None:
    """What makes a number less trustworthy than it looks."""
    console = Console()
    for finding in findings:
        text = f"{title_of(finding)}: {evidence_text(finding['evidence'])}; {finding['advice']}"
        color = COLOURS.get(finding["verdict"], "yellow")
        console.print(f"[{color}]{escape(finding['verdict'])}[/] {escape(text)}")


def _tell_effective_eps(name: str, settings: Mapping[str, Any], console: Console) -> None:
    """Budgets in other units than pixels look larger than they are."""
    if settings.get("effective_eps"):
        console.print(f"[yellow]{escape(name)}: eps {escape(settings['effective_eps'])}[/]")


def show_training(results: dict[str, Any]) -> None:
    """What became of a training: where it ended, and the audit of its best epoch."""
    console = Console()
    training = results["training"]
    if training["stopped"]:
        console.print(f"[yellow]stopped early:[/] {escape(training['stopped'])}")
    held_out = training["held_out"]
    if held_out is not None:
        of = _percent if held_out["measure"] == "accuracy" else "{:.3f}".format
        robust = "" if held_out["robust"] is None else f", robust {of(held_out['robust'])}"
        console.print(
            f"{escape(training['recipe'])}: {training['steps']} steps of {training['images_per_step']} images; "
            f"best was epoch {training['best_epoch'] + 1} of {training['epochs']} "
            f"({held_out['measure']} of held-out images, n = {held_out['n']}: clean {of(held_out['clean'])}{robust})"
        )
    _tell_effective_eps("attack in training", training.get("attack") or {}, console)
    if "clean" in results:
        show_results(results)
    else:
        console.print("[dim]The recipe names no test data, so nothing was audited.[/]")


def show_activations(results: dict[str, Any]) -> None:
    """The largest activations of every layer, and where they are."""
    console = Console()
    told = results["activations"]
    table = Table(
        "layer",
        title=f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}: largest |activation|, median "
        f"(quartiles), n = {told['n']}; {escape(told['attack']['name'])}, {results['threat']['norm']}, eps "
        f"{results['threat']['eps_text']}",
        title_justify="left",
    )
    for entry in told["conditions"]:
        table.add_column(escape(entry["name"]))
    places = Table("layer", "where most maxima of clean images sit (share of images)")
    for row in where_rows(told):
        table.add_row(escape(row["layer"]), *(cell["size"] for cell in row["cells"]))
        places.add_row(escape(row["layer"]), row["cells"][0]["place"])
    console.print(table, places, sep="\n")
    _tell_effective_eps(told["attack"]["name"], told["attack"]["settings"], console)
    if told["warning"]:
        console.print(f"[yellow]{escape(told['warning'])}[/]")


def show_kept(kept: Mapping[str, Any]) -> None:
    """Where adversarial images are, and what became of their pictures."""
    console = Console()
    console.print(f"{kept['images']} adversarial images saved in {kept['folder']}/ (safetensors, floats in [0, 1])")
    if kept["pictures"]:
        still = kept["images"] - kept["undone_by_8_bits"]
        console.print(f"and as 8-bit pictures in {kept['pictures']}/: {still} of them still fool the model")


def tell_notes(notes: Mapping[str, str]) -> None:
    """What loading the model found worth saying; on standard error, where it does not mix with results."""
    console = Console(stderr=True)
    for what, note in notes.items():
        if what != "about":
            console.print(f"[yellow]{escape(what)}:[/] {escape(note)}")


def show_plan(cost: dict[str, Any]) -> None:
    """The most an audit can cost."""
    console = Console()
    title = f"{cost['samples']} samples, batches of {cost['batch_size']}, {cost['device']}, {cost['threads']} threads"
    table = Table("", title=title, title_justify="left")
    for heading in ("gradients per sample", "forwards per sample", "at most"):
        table.add_column(heading, justify="right")
    for row in cost["rows"]:
        table.add_row(escape(row["name"]), str(row["gradients"]), str(row["forwards"]), _time(row["seconds"]))
    table.add_section()
    table.add_row("all", "", "", _time(cost["seconds_at_most"]))
    console.print(table)
    console.print(
        f"Measured here: {cost['forward_ms']:.2f} ms a forward, {cost['gradient_ms']:.2f} ms a gradient per sample; "
        f"peak memory {cost['memory_mb']:.0f} MB. Samples that fall early cost less."
    )
    adaptive = [row["name"] for row in cost["rows"] if row.get("adaptive")]
    if adaptive:
        console.print(f"{escape(', '.join(adaptive))}: told for the hardest samples; the others get fewer restarts.")
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
    for heading in ("images", "about"):
        table.add_column(heading, justify="right")
    for row in cost["rows"]:
        table.add_row(escape(row["name"]), f"{row['images']:,.0f}", _time(row["seconds"]))
    table.add_section()
    table.add_row("all", "", _time(cost["seconds"]))
    console.print(table)
    if cost["plugins_not_timed"]:
        console.print(f"[dim]What plug-ins add is not counted: {escape(', '.join(cost['plugins_not_timed']))}.[/]")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def show_names(rows: Sequence[tuple[str, str]]) -> None:
    """A list of names with one line each."""
    console = Console()
    table = Table.grid(padding=(0, 2))
    for name, about in rows:
        table.add_row(escape(name), f"[dim]{escape(about)}[/]")
    console.print(table)
