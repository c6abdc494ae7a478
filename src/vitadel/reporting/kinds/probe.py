"""Heads on frozen features: which was chosen, and how it did; the audit of a linear probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import hsv_to_rgb
from rich.console import Console
from rich.markup import escape

from vitadel.quantities import percent
from vitadel.reporting.figures import Picture, Strip, strip_figure
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.kinds.audit import audit_sections, audit_sentence, show_audit
from vitadel.reporting.read_runs import Array, Run, read_arrays
from vitadel.reporting.tables import Cell, Column, Table, share_cells, share_columns
from vitadel.reporting.terminal import show_heading, show_section

_BEST = 5  # heads that are shown
_PICTURES_FILE = "segmented.npz"
_ROWS = {
    "images": "image",
    "truth": "truth",
    "clean": "prediction",
    "attacked images": "attacked image",
    "attacked": "prediction",
}
_VOID = 255  # pixels that do not count
_GOLDEN = 0.618034  # hues of neighboring classes lie far apart


def show_probe_plan(text: str) -> None:
    """What is to be done, on standard error."""
    Console(stderr=True).print(f"[dim]to do: {escape(text)}[/]", soft_wrap=True)


def _sentence(run: Run) -> str:
    segmentation = run.results.get("segmentation")
    if not segmentation:
        return audit_sentence(run)
    clean, (height, width) = segmentation["clean"], segmentation["size"]
    parts = [f"{entry['name']} {percent(entry['mean_iou'])}" for entry in segmentation["attacks"]]
    under = f"; under attack: {', '.join(parts)}" if parts else ""
    return f"mIoU {percent(clean['mean_iou'])} on {clean['images']:,} images of {height} x {width} pixels{under}."


def _sections(run: Run) -> list[Section]:
    if segmentation := run.results.get("segmentation"):
        pictures = run.path / _PICTURES_FILE
        drawn = [_segmented(pictures, segmentation)] if pictures.exists() else []
        return [_segmentation(run.results, segmentation), *drawn]
    probe = run.results["probe"]
    heads = sorted(probe["heads"], key=lambda head: (-head["correct"], _loss(head)))
    columns = (
        *(Column("class tokens", 0), Column("mean patch"), Column("learning rate")),
        *(Column("held-out accuracy, %", 1), Column("loss", 3)),
    )
    rows = tuple(
        (
            head["blocks"],
            "yes" if head["average"] else "no",
            f"{head['rate']:g}",
            100 * head["correct"] / head["n"],
            "diverged" if head["loss"] is None else head["loss"],
        )
        for head in heads[:_BEST]
    )
    remarks = []
    if len(heads) > _BEST:
        remarks.append(
            f"The best {_BEST} heads; the first was chosen by its held-out accuracy, which is thus optimistic."
        )
    missing = run.results["data"]["classes"] - probe["classes_trained"]
    if missing:
        remarks.append(f"{missing} classes have no training image and cannot be learned.")
    table = Table(f"{probe['recipe']}: {len(heads)} heads, {_extent(probe)}.", columns, rows)
    return [Section("Linear probe", tables=[table], remarks=remarks), *audit_sections(run)]


def _loss(head: Mapping[str, Any]) -> float:
    return float("inf") if head["loss"] is None else float(head["loss"])


def _segmentation(results: Mapping[str, Any], segmentation: Mapping[str, Any]) -> Section:
    threat = results["threat"]
    budget = f"; {threat['norm']}, eps {threat['eps_text']}" if segmentation["attacks"] else ""
    rows = [("clean", *_scores(segmentation["clean"]))]
    for entry in segmentation["attacks"]:
        made_on = "" if entry["made_on"] == entry["judged_on"] else f" on the {entry['made_on']}"
        rows.append((f"{entry['name']}{made_on}", *_scores(entry)))
    columns = (
        *(Column("images"), *share_columns("mIoU"), *share_columns("per image (legacy)")),
        Column("pixels, %", 1),
    )
    chosen = f"learning rate {segmentation['chosen']['rate']:g}, {_extent(segmentation)}"
    remarks = [
        "mIoU of the whole set; 95 % intervals bootstrapped over images. The mean of each image's own mIoU is what "
        "some papers report under attack, and is not comparable. Pixels: the share that got their class."
    ]
    if void := sum(entry["void"] for entry in segmentation["attacks"]):
        remarks.append(f"{void} proposals broke box or budget; the clean image counts in their place.")
    table = Table(f"{segmentation['recipe']}: {chosen}{budget}.", columns, tuple(rows))
    return Section("Segmentation", tables=[table], remarks=remarks, file="segmentation")


def _segmented(path: Path, segmentation: Mapping[str, Any]) -> Section:
    """Predictions as pictures, as in figure 3 of the Robustness Tokens paper."""
    attacks = segmentation["attacks"]
    by = f" Attacked by {attacks[0]['name']}" if attacks else ""
    names = [entry["made_on"] for entry in attacks if entry["name"] == attacks[0]["name"]]
    by += f", made on the {names[-1]}." if names else ""
    caption = f"The first test images: truth, and what the deployed segmenter sees. A color is a class.{by}"
    return Section("Segmented images", lambda: draw_segmented(path), caption)


def draw_segmented(path: Path) -> Picture:
    """Strips of images, true masks and predictions, clean and attacked."""
    arrays = read_arrays(path)
    shown = {name: title for name, title in _ROWS.items() if name in arrays}
    strips = [
        Strip(title, [each / 255 if each.ndim == 3 else class_colors(each) for each in arrays[name]])
        for name, title in shown.items()
    ]
    with strip_figure(strips) as figure:
        pass
    agree = [
        f"{title} {percent(float((arrays[name] == arrays['truth'])[arrays['truth'] != _VOID].mean()))}"
        for name, title in (("clean", "clean"), ("attacked", "attacked"))
        if name in arrays
    ]
    return Picture("segmented", figure, f"Segmented images; pixels that get their class: {', '.join(agree)}.")


def class_colors(mask: Array) -> Array:
    """Colors in [0, 1] of class numbers; pixels that do not count are white."""
    numbers = mask.astype(float)
    hues = np.stack([numbers * _GOLDEN % 1, np.full(mask.shape, 0.65), 0.45 + 0.5 * (numbers * 7 % 4) / 3], axis=-1)
    colors = hsv_to_rgb(hues)
    colors[mask == _VOID] = 1.0
    return colors


def _extent(section: Mapping[str, Any]) -> str:
    tokens = f", tokens {section['tokens']}" if section["tokens"] else ""
    return (
        f"{section['steps']} steps of {section['batch_size']}, trained on {section['trained_on']} images, chosen on "
        f"{section['held_out']} held-out ones{tokens}"
    )


def _scores(entry: Mapping[str, Any]) -> tuple[Cell, ...]:
    means = [share_cells({name: entry[name], "ci95": entry[f"{name}_ci95"]}, name) for name in _MEANS]
    return (*(cell for mean in means for cell in mean), 100 * entry["pixel_accuracy"])


_MEANS = ("mean_iou", "mean_iou_per_image")


def show_heads(run: Run) -> None:
    """The tables of the heads, and the audit of a linear probe."""
    show_heading(run)
    for section in _sections(run):
        show_section(section)
    if "segmentation" not in run.results:
        show_audit(run)


KIND = Kind(_sentence, _sections, show=show_heads)
