"""Corruption benchmarks for people: errors by corruption and severity as a heat map and a table, mCE, flip rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.read_runs import Run, percent

__all__ = ["corruption_content", "corruption_sentences", "draw_corruptions", "show_corruptions"]

_ROW, _LEFT, _CELL, _FOOT = 19.0, 150.0, 78.0, 26.0  # points
_DARK = 0.55  # errors above this are written in white


def show_corruptions(results: Mapping[str, Any]) -> None:
    """The tables in the terminal, and what they come to."""
    console = Console()
    about = f"{escape(results['model']['spec'])} on {escape(results['data']['spec'])}"
    about += f", n = {results['data']['n']}, seed {results['seed']}"
    told = results.get("corruptions")
    if told:
        table = Table("corruption", title=f"{about}: error in %, {escape(told['made'])}", title_justify="left")
        for heading in (*(str(level) for level in told["severities"]), "mean", *(["CE"] if "mean_ce" in told else [])):
            table.add_column(heading, justify="right")
        for row in _corruption_rows(told):
            table.add_row(escape(row["name"]), *row["cells"], row["error"], *([row["ce"]] if "mean_ce" in told else []))
        console.print(table)
    moving = results.get("perturbations")
    if moving:
        table = Table("sequence", title=f"{about}: flips in %, {escape(moving['made'])}", title_justify="left")
        for heading in ("flip probability", "95 % interval", "of AlexNet's", "top-5 distance"):
            table.add_column(heading, justify="right")
        for row in _perturbation_rows(moving):
            table.add_row(escape(row["name"]), row["flips"], row["interval"], row["rate"], row["distance"])
        console.print(table)
    if results["clean"]:
        console.print(f"Clean accuracy on the same images: {percent(results['clean']['accuracy'])}.")
    for sentence in corruption_sentences(results):
        console.print(escape(sentence))
    for remark in _remarks(results):
        console.print(f"[dim]{escape(remark)}[/]")


def corruption_content(run: Run) -> dict[str, Any] | None:
    """What the report shows; None for a run without corruptions or sequences."""
    told, moving = run.results.get("corruptions") or {}, run.results.get("perturbations") or {}
    if not told and not moving:
        return None
    return {
        "picture": draw_corruptions(run),
        "severities": told.get("severities", []),
        "rows": _corruption_rows(told) if told else [],
        "has_ce": "mean_ce" in told,
        "sequences": _perturbation_rows(moving) if moving else [],
        "sentences": corruption_sentences(run.results),
        "remarks": _remarks(run.results),
    }


def corruption_sentences(results: Mapping[str, Any]) -> list[str]:
    """One about corruptions and one about sequences, each where run."""
    told, moving = results.get("corruptions"), results.get("perturbations")
    return [*([_corruption_sentence(told)] if told else []), *([_perturbation_sentence(moving)] if moving else [])]


def _corruption_rows(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per corruption: errors in percent at each severity, their mean, and the CE where there is one."""
    errors = {(cell["corruption"], cell["severity"]): cell["error"] for cell in told["cells"]}
    return [
        {
            "name": row["corruption"].replace("_", " ") + ("" if row["part_of_mce"] else " (validation)"),
            "cells": [f"{100 * errors[row['corruption'], level]:.1f}" for level in told["severities"]],
            "error": f"{100 * row['error']:.1f}",
            "ce": f"{row['ce']:.1f}" if "ce" in row else "",
        }
        for row in told["rows"]
    ]


def _perturbation_rows(told: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per sequence: how often predictions flip, against AlexNet where that is known, and the top-5 distance."""
    return [
        {
            "name": row["perturbation"].replace("_", " ") + ("" if row.get("counted", True) else " (validation)"),
            "flips": f"{100 * row['flip_probability']:.2f}",
            "interval": _interval(row["flip_probability_ci95"], 100, 2),
            "rate": f"{row['flip_rate']:.1f}" if "flip_rate" in row else "",
            "distance": f"{row['top5_distance']:.2f}",
        }
        for row in told["rows"]
    ]


def _corruption_sentence(told: Mapping[str, Any]) -> str:
    """The numbers that stand for the whole, each by its name: an error is a share, an mCE a percentage of AlexNet's."""
    over = len(told["mean_error_over"])
    parts = [
        f"Mean error over {over} corruptions {percent(told['mean_error'])} "
        f"({_interval(told['mean_error_ci95'], 100, 1)}), so mean accuracy {percent(1 - told['mean_error'])}"
    ]
    names = {"mce": "mCE", "relative_mce": "relative mCE", "mce_without_noise": "mCE without noise (12 corruptions)"}
    known = {name: title for name, title in names.items() if told.get(name) is not None}
    if not known and told.get("mean_ce") is not None:
        known = {
            "mean_ce": f"mean CE of {len(told['mean_ce_over'])} corruptions (no mCE, which takes 15 at 5 severities"
            " and 224 pixels)"
        }
    parts += [f"{title} {told[name]:.1f} ({_interval(told[f'{name}_ci95'], 1, 1)})" for name, title in known.items()]
    return "; ".join(parts) + (", where AlexNet has 100." if known else ".")


def _perturbation_sentence(told: Mapping[str, Any]) -> str:
    over = len(told.get("mean_flip_probability_over", told["rows"]))
    mean = f"Mean flip probability over {over} sequences {percent(told['mean_flip_probability'])}"
    mean += f" ({_interval(told['mean_flip_probability_ci95'], 100, 2)}), difficulty {told['difficulty']}"
    if told.get("mfr") is None:
        return f"{mean}."
    return f"{mean}; mFR {told['mfr']:.1f} ({_interval(told['mfr_ci95'], 1, 1)}), where AlexNet has 100."


def _remarks(results: Mapping[str, Any]) -> list[str]:
    """What keeps the numbers from being compared, and what is missing in them."""
    told, moving = results.get("corruptions") or {}, results.get("perturbations") or {}
    remarks = list(dict.fromkeys([*told.get("remarks", ()), *moving.get("remarks", ())]))  # the size is in both
    for name, reason in {**told.get("left_out", {}), **moving.get("left_out", {})}.items():
        remarks.append(f"Without {name.replace('_', ' ')}: {reason}")
    if told.get("relative_mce") is not None:
        error = told["constants"]["alexnet_clean_error"]
        remarks.append(f"Relative mCE takes AlexNet's clean error as {percent(error)}, recalled from the literature.")
    if "constants" in moving:
        remarks.append("Flip probabilities of AlexNet are recalled from a later paper, not from the benchmark's code.")
    return remarks


def draw_corruptions(run: Run) -> Picture | None:
    """Errors as a heat map, corruption by severity; None for a run without any."""
    told = run.results.get("corruptions")
    if not isinstance(told, Mapping) or not told.get("cells"):
        return None
    rows = _corruption_rows(told)
    errors = {(cell["corruption"], cell["severity"]): cell["error"] for cell in told["cells"]}
    levels: Sequence[int] = told["severities"]
    grid = [[errors[row["corruption"], level] for level in levels] for row in told["rows"]]
    with our_style():
        height = _ROW * len(rows) + _FOOT + 18
        figure = blank(height)
        width = figure.get_figwidth() * 72
        box = (_LEFT / width, _FOOT / height, _CELL * len(levels) / width, _ROW * len(rows) / height)
        axes = figure.add_axes(box)
        axes.imshow(grid, vmin=0, vmax=1, cmap="Reds", aspect="auto", interpolation="nearest")
        for down, row in enumerate(rows):
            for across, text in enumerate(row["cells"]):
                color = "white" if grid[down][across] > _DARK else "#222222"
                axes.text(across, down, text, ha="center", va="center", fontsize=9, color=color)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        axes.tick_params(length=0, labelcolor=COLOURS["ink"], labelsize=9)
        axes.set_xlabel("severity", color=COLOURS["muted"], fontsize=9, labelpad=2)
        axes.set_title("error, %", color=COLOURS["muted"], fontsize=9, loc="left", pad=4)
        for spine in axes.spines.values():
            spine.set_visible(False)
    spoken = "; ".join(f"{row['name']} {', '.join(row['cells'])}" for row in rows)
    alt = f"Heat map of errors in percent by corruption and severity. {_corruption_sentence(told)} {spoken}."
    return Picture("corruptions", figure, alt)


def _interval(ends: Sequence[float], factor: float, digits: int) -> str:
    low, high = ends
    return f"{factor * low:.{digits}f} to {factor * high:.{digits}f}"
