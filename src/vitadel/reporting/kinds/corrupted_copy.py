"""Corrupted copies of a data set, as `vitadel corrupt` writes them."""

from __future__ import annotations

from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Run


def _sentence(run: Run) -> str:
    if (augmix := run.results.get("augmix")) is not None:
        how = f"{augmix['copies']} copies of each ({augmix['format']})"
        return f"{run.results['data']['n']} images, {how}: {augmix['note']}"
    copy, (height, width) = run.results["copy"], run.results["copy"]["size"]
    return (
        f"{run.results['data']['n']} images of {height} x {width} pixels, {len(copy['corruptions'])} corruptions at "
        f"{len(copy['severities'])} severities ({copy['format']})"
    )


def _sections(run: Run) -> list[Section]:
    missing = run.results.get("copy", {}).get("left_out", {})
    remarks = [f"Without {name}: {reason}" for name, reason in missing.items()]
    data = run.results["data"]
    if data["left_out"]:
        names = ", ".join(data["left_out_names"])
        remarks.insert(0, f"{data['left_out']} images left out, as they cannot be used: {names}")
    return [Section("Corrupted copy", remarks=remarks)] if remarks else []


KIND = Kind(_sentence, _sections)
