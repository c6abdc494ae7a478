"""Corruption benchmarks: errors by corruption and severity, mCE, and flip rates along sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitadel.quantities import percent
from vitadel.reporting.figures import COLORS, Picture, new_figure
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.kinds.audit import audit_sections
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table

_ROW, _LEFT, _CELL, _FOOT = 19.0, 150.0, 78.0, 26.0  # points
_DARK = 0.55  # errors above this are written in white


def _sentence(run: Run) -> str:
    clean = run.results["clean"]
    before = [f"Clean accuracy {percent(clean['accuracy'])} (n = {clean['n']:,})."] if clean else []
    return " ".join([*before, *_sentences(run.results)])


def _sentences(results: Mapping[str, Any]) -> list[str]:
    """One about corruptions and one about sequences, each where run."""
    static, moving = results.get("corruptions"), results.get("perturbations")
    return [*([_corruption_sentence(static)] if static else []), *([_perturbation_sentence(moving)] if moving else [])]


def _sections(run: Run) -> list[Section]:
    static, moving = run.results.get("corruptions"), run.results.get("perturbations")
    own = Section(
        "Corruptions",
        lambda: draw_corruptions(run),
        "Top-1 error in percent, the share of images classified incorrectly. Intervals are bootstrapped over images, "
        "which are the same in all corruptions.",
        [*([_corruption_table(static)] if static else []), *([_perturbation_table(moving)] if moving else [])],
        _remarks(run.results),
        _sentences(run.results),
    )
    return [own, *audit_sections(run)]


def _name(row: Mapping[str, Any], key: str, counted: bool) -> str:
    return str(row[key]).replace("_", " ") + ("" if counted else " (validation)")


def _errors(static: Mapping[str, Any]) -> dict[str, list[float]]:
    """Errors at every severity, by the name of the corruption."""
    errors = {(cell["corruption"], cell["severity"]): cell["error"] for cell in static["cells"]}
    return {
        _name(row, "corruption", row["part_of_mce"]): [
            errors[row["corruption"], level] for level in static["severities"]
        ]
        for row in static["rows"]
    }


def _corruption_table(static: Mapping[str, Any]) -> Table:
    levels = (Column(str(level), 1) for level in static["severities"])
    columns = (Column("corruption"), *levels, Column("mean error, %", 1), Column("CE", 1))
    rows = tuple(
        (name, *(100 * error for error in errors), 100 * row["error"], row.get("ce"))
        for (name, errors), row in zip(_errors(static).items(), static["rows"], strict=True)
    )
    ce = " CE: AlexNet has 100." if static.get("mean_ce") is not None else ""
    return Table(f"Errors in percent by severity; images are {static['made']}.{ce}", columns, rows, "corruptions")


def _perturbation_table(moving: Mapping[str, Any]) -> Table:
    """How often predictions flip, compared with AlexNet where that is known, and the top-5 distance."""
    flips = (Column("flip probability, %", 2), Column("flip probability, from", 2), Column("flip probability, to", 2))
    columns = (Column("sequence"), *flips, Column("of AlexNet's, %", 1), Column("top-5 distance", 2))
    rows = tuple(
        (
            _name(row, "perturbation", row.get("counted", True)),
            100 * row["flip_probability"],
            *(100 * end for end in row["flip_probability_ci95"]),
            row.get("flip_rate"),
            row["top5_distance"],
        )
        for row in moving["rows"]
    )
    caption = f"How often predictions flip along sequences; images are {moving['made']}."
    return Table(caption, columns, rows, "perturbations")


def _corruption_sentence(static: Mapping[str, Any]) -> str:
    """The summary numbers, each by its name: an error is a share, an mCE a percentage of AlexNet's."""
    over = len(static["mean_error_over"])
    parts = [
        f"Mean error over {over} corruptions {percent(static['mean_error'])} "
        f"({_interval(static['mean_error_ci95'], 100, 1)}), so mean accuracy {percent(1 - static['mean_error'])}"
    ]
    names = {"mce": "mCE", "relative_mce": "relative mCE", "mce_without_noise": "mCE without noise (12 corruptions)"}
    known = {name: title for name, title in names.items() if static.get(name) is not None}
    if not known and static.get("mean_ce") is not None:
        known = {
            "mean_ce": f"mean CE of {len(static['mean_ce_over'])} corruptions (no mCE, which takes 15 at 5 severities"
            " and 224 pixels)"
        }
    parts += [
        f"{title} {static[name]:.1f} ({_interval(static[f'{name}_ci95'], 1, 1)})" for name, title in known.items()
    ]
    return "; ".join(parts) + (", where AlexNet has 100." if known else ".")


def _perturbation_sentence(moving: Mapping[str, Any]) -> str:
    over = len(moving.get("mean_flip_probability_over", moving["rows"]))
    mean = f"Mean flip probability over {over} sequences {percent(moving['mean_flip_probability'])}"
    mean += f" ({_interval(moving['mean_flip_probability_ci95'], 100, 2)}), difficulty {moving['difficulty']}"
    if moving.get("mfr") is None:
        return f"{mean}."
    return f"{mean}; mFR {moving['mfr']:.1f} ({_interval(moving['mfr_ci95'], 1, 1)}), where AlexNet has 100."


def _interval(ends: Sequence[float], factor: float, digits: int) -> str:
    low, high = ends
    return f"{factor * low:.{digits}f} to {factor * high:.{digits}f}"


def _remarks(results: Mapping[str, Any]) -> list[str]:
    """What keeps the numbers from being compared, and what is missing in them."""
    static, moving = results.get("corruptions") or {}, results.get("perturbations") or {}
    remarks = list(dict.fromkeys([*static.get("remarks", ()), *moving.get("remarks", ())]))  # the size is in both
    for name, reason in {**static.get("left_out", {}), **moving.get("left_out", {})}.items():
        remarks.append(f"Without {name.replace('_', ' ')}: {reason}")
    if static.get("relative_mce") is not None:
        error = static["constants"]["alexnet_clean_error"]
        remarks.append(f"Relative mCE takes AlexNet's clean error as {percent(error)}, recalled from the literature.")
    if "constants" in moving:
        remarks.append("Flip probabilities of AlexNet are recalled from a later paper, not from the benchmark's code.")
    return remarks


def draw_corruptions(run: Run) -> Picture | None:
    """Errors as a heat map, corruption by severity; None for a run with sequences only."""
    static = run.results.get("corruptions")
    if not static:
        return None
    errors, levels = _errors(static), static["severities"]
    texts = {name: [f"{100 * error:.1f}" for error in row] for name, row in errors.items()}
    height = _ROW * len(errors) + _FOOT + 18
    with new_figure(height) as figure:
        width = figure.get_figwidth() * 72
        box = (_LEFT / width, _FOOT / height, _CELL * len(levels) / width, _ROW * len(errors) / height)
        axes = figure.add_axes(box)
        axes.imshow(list(errors.values()), vmin=0, vmax=1, cmap="Reds", aspect="auto", interpolation="nearest")
        for down, (name, row) in enumerate(errors.items()):
            for across, (text, error) in enumerate(zip(texts[name], row, strict=True)):
                color = "white" if error > _DARK else "#222222"
                axes.text(across, down, text, ha="center", va="center", fontsize=9, color=color)
        axes.set_yticks(range(len(errors)), list(errors))
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        axes.tick_params(length=0, labelcolor=COLORS["ink"], labelsize=9)
        axes.set_xlabel("severity", color=COLORS["muted"], fontsize=9, labelpad=2)
        axes.set_title("error, %", color=COLORS["muted"], fontsize=9, loc="left", pad=4)
        for spine in axes.spines.values():
            spine.set_visible(False)
    spoken = "; ".join(f"{name} {', '.join(row)}" for name, row in texts.items())
    alt = f"Heat map of errors in percent by corruption and severity. {_corruption_sentence(static)} {spoken}."
    return Picture("corruptions", figure, alt)


KIND = Kind(_sentence, _sections)
