"""Threat levels without a classifier: cosines of attacked features, by what the attacker knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table

_WHOSE = {
    "to own": "with the tokens, to their own clean features",
    "to bare": "with the tokens, to clean features without them",
    "no tokens": "without tokens",
}


def _sentence(run: Run) -> str:
    found = run.results["feature_levels"]
    tokens = f"{found['tokens']} tokens ({found['fingerprint']})" if found["tokens"] else "no tokens"
    lowest = min(found["rows"], key=lambda row: _cosines(row, found)["to own"]["mean"])
    cosine = _cosines(lowest, found)["to own"]
    return (
        f"{run.results['model']['spec']} with {tokens} on {run.results['data']['n']} images of "
        f"{run.results['data']['spec']}: attacked features keep a cosine of at least {cosine['mean']:.2f} with the "
        f"clean ones ({lowest['level']} {lowest['attack']}, eps {lowest['eps_text']}). Nothing was classified."
    )


def _cosines(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The cosines per token, or of embeddings where the defense compares these."""
    axis = "pooled" if found["features"] == "pooled" else "token"
    return {whose: row["cosines"][f"{whose}, {axis}"] for whose in _WHOSE}


def _sections(run: Run) -> list[Section]:
    found = run.results["feature_levels"]
    names = dict.fromkeys(name for row in found["rows"] for name in row["cosines"])
    kept = [name for name in names if found["tokens"] or name.startswith("no tokens")]
    columns = (
        *map(Column, ("attacker", "attack", "eps", "cosine")),
        *(Column("mean", 3), Column("deviation", 3), Column("low", 3), Column("high", 3)),
    )
    rows = tuple(
        (
            f"{row['level']} {row['title']}",
            row["attack"],
            row["eps_text"],
            name,
            row["cosines"][name]["mean"],
            row["cosines"][name]["sd"],
            *row["cosines"][name]["ci95"],
        )
        for row in found["rows"]
        for name in kept
    )
    table = Table(
        "Cosines of attacked features: mean over images, deviation, 95 % interval of the mean.", columns, rows
    )
    said = "; ".join(f"'{short}' is {text}" for short, text in _WHOSE.items())
    remarks = [
        f"{said}. 'token' compares token by token over channels, 'channel' each channel over tokens as the released "
        "code of Robustness Tokens does, 'pooled' one embedding per image. The axes are not comparable with each other."
    ]
    return [Section("Features under attack", tables=[table], remarks=remarks, file="features")]


KIND = Kind(_sentence, _sections)
