"""What a person sees of heads on frozen features: which was chosen, and how it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.terminal import show_results

__all__ = ["show_heads", "tell_plan"]

_BEST = 5  # heads that are shown beside each other


def tell_plan(text: str) -> None:
    """What is to come, on standard error."""
    Console(stderr=True).print(f"[dim]to do: {escape(text)}[/]", soft_wrap=True)


def show_heads(results: Mapping[str, Any]) -> None:
    """The tables of a linear probe or of a segmentation head."""
    if "segmentation" in results:
        _show_segmentation(results)
    else:
        _show_probe(results)


def _show_probe(results: Mapping[str, Any]) -> None:
    console, probe = Console(), results["probe"]
    best = sorted(probe["heads"], key=lambda head: (-head["correct"], _loss(head)))
    table = Table(title=f"{escape(probe['recipe'])}: {len(best)} heads, {_told(probe)}", title_justify="left")
    for heading in ("class tokens", "mean patch", "rate", "held-out accuracy", "loss"):
        table.add_column(heading, justify="right")
    for head in best[:_BEST]:
        loss = "diverged" if head["loss"] is None else f"{head['loss']:.3f}"
        accuracy = f"{100 * head['correct'] / head['n']:.1f} %"
        table.add_row(str(head["blocks"]), "yes" if head["average"] else "no", f"{head['rate']:g}", accuracy, loss)
    console.print(table)
    if len(best) > _BEST:
        console.print(f"[dim]The best {_BEST}; the first was chosen, so its held-out accuracy is a little rosy.[/]")
    missing = results["data"]["classes"] - probe["classes_trained"]
    if missing:
        console.print(f"[yellow]{missing} classes have no image to train on, and cannot be learnt.[/]")
    show_results(dict(results))


def _loss(head: Mapping[str, Any]) -> float:
    return float("inf") if head["loss"] is None else float(head["loss"])


def _show_segmentation(results: Mapping[str, Any]) -> None:
    console, told = Console(), results["segmentation"]
    threat, (height, width) = results["threat"], told["size"]
    budget = f", {threat['norm']}, eps {threat['eps_text']}" if told["attacks"] else ""
    table = Table(
        title=f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}: {height} x {width} px, "
        f"n = {told['clean']['images']}{budget}, seed {results['seed']}",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("mIoU", "per image (legacy)", "pixels"):
        table.add_column(heading, justify="right")
    table.add_row("clean", *_scores(told["clean"]))
    for entry in told["attacks"]:
        made_on = "" if entry["made_on"] == entry["judged_on"] else f" on the {entry['made_on']}"
        table.add_row(escape(f"{entry['name']}{made_on}"), *_scores(entry))
    console.print(f"{escape(told['recipe'])}: rate {told['chosen']['rate']:g}, {_told(told)}")
    console.print(table)
    console.print(
        "[dim]mIoU of the whole set; 95 % intervals bootstrapped over images. The mean of each image's own mIoU is "
        "what some papers report under attack, and not comparable. Pixels: the share that got their class.[/]"
    )
    void = sum(entry["void"] for entry in told["attacks"])
    if void:
        console.print(f"[yellow]{void} proposals broke box or budget; the clean image counts in their place.[/]")


def _told(section: Mapping[str, Any]) -> str:
    tokens = f", tokens {section['tokens']}" if section["tokens"] else ""
    return (
        f"{section['steps']} steps of {section['batch_size']}, trained on {section['trained_on']} images, chosen on "
        f"{section['held_out']} held-out ones{tokens}"
    )


def _scores(entry: Mapping[str, Any]) -> Sequence[str]:
    def mean(name: str) -> str:
        low, high = entry[f"{name}_ci95"]
        return f"{100 * entry[name]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    return mean("mean_iou"), mean("mean_iou_per_image"), f"{100 * entry['pixel_accuracy']:.1f} %"
