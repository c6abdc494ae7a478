"""Results for other tools: a `model-index` block for Hugging Face model cards, rows in timm's style, and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from vitadel.reporting.kind import kind_of
from vitadel.reporting.read_runs import Run, aspects, faced, threat_text
from vitadel.reporting.tables import Column, Table, as_csv
from vitadel.runtime.opening import typed_words

TIMM_COLUMNS = ("model", "top1", "top1_err", "param_count", "img_size", "crop_pct", "interpolation")
"""The columns of timm's result files that an audit knows; it measures no top-5."""
_ROBUST_COLUMNS = ("robust_top1", "robust_top1_low", "robust_top1_high", "norm", "eps", "attacks", "n", "seed", "data")


def interchange_files(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, str]:
    """File names and contents for the runs that have an accuracy; empty if there is none."""
    shown = [(run, label) for run, label in zip(runs, labels, strict=True) if _has_accuracy(run)]
    if not shown:
        return {}
    index = {"model-index": [_index_entry(run, label) for run, label in shown]}
    return {
        "model-index.yaml": yaml.safe_dump(index, sort_keys=False, allow_unicode=True),
        "timm.csv": _timm_rows(shown),
        "results.json": json.dumps([_record(run, label) for run, label in shown], indent=2) + "\n",
    }


def _has_accuracy(run: Run) -> bool:
    return bool(run.complete and run.results.get("clean") and kind_of(run).one_budget)


def _index_entry(run: Run, label: str) -> dict[str, Any]:
    """An entry of `model-index` as the Hub reads it; values are shares, as in results.json."""
    data = aspects(run)["data"]
    metrics = [_metric("Accuracy", run.results["clean"], "accuracy")]
    worst = run.results.get("worst_case")
    if worst:
        attacks = ", ".join(_counted(run))
        metrics.append(_metric(f"Robust accuracy ({threat_text(run)}, {attacks})", worst, "robust_accuracy"))
    dataset = {"name": data, "type": data.partition(":")[0].partition("@")[0]}
    result = {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": metrics}
    return {"name": label, "results": [result]}


def _metric(name: str, entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    args = {"n": entry["n"], "ci95": [float(end) for end in entry["ci95"]]}
    return {"type": key, "name": name, "value": float(entry[key]), "args": args}


def _counted(run: Run) -> list[str]:
    """The attacks of the worst case, in their order."""
    return [entry["name"] for entry in run.attacks if entry["name"] in faced(run)]


def _timm_rows(shown: Sequence[tuple[Run, str]]) -> str:
    columns = tuple(map(Column, (*TIMM_COLUMNS, *_ROBUST_COLUMNS)))
    return as_csv(Table("", columns, tuple(_timm_row(run, label) for run, label in shown)))


def _timm_row(run: Run, label: str) -> tuple[str, ...]:
    results, known, opening = run.results, aspects(run), run.command.get("opening") or {}
    clean, worst = 100 * results["clean"]["accuracy"], results.get("worst_case")
    robust = [worst["robust_accuracy"], *worst["ci95"]] if worst else []
    pixels = results.get("data", {}).get("pixels") or [""]
    parameters = results.get("model", {}).get("parameters")
    return (
        label,
        f"{clean:.3f}",
        f"{100 - clean:.3f}",
        "" if parameters is None else f"{parameters / 1e6:.2f}",
        str(pixels[0]),
        str(opening.get("crop_pct") or ""),
        str(opening.get("interpolation") or ""),
        *([f"{100 * share:.3f}" for share in robust] or [""] * 3),
        known["norm"],
        known["eps"],
        " ".join(_counted(run)),
        str(results["clean"]["n"]),
        str(results.get("seed", "")),
        known["data"],
    )


def _record(run: Run, label: str) -> dict[str, Any]:
    """The fields of results.json that others compare, without those that only a report shows."""
    results = run.results
    kept = ("version", "seed", "model", "threat", "clean", "worst_case", "protocol", "findings")
    attacks = [
        {key: entry[key] for key in ("name", "settings", "held", "n", "robust_accuracy", "ci95") if key in entry}
        for entry in run.attacks
    ]
    data = {key: value for key, value in results.get("data", {}).items() if key in ("spec", "n", "classes", "pixels")}
    words = typed_words(run.command)
    return {
        "name": label,
        **{key: results.get(key) for key in kept},
        "data": data,
        "attacks": attacks,
        "command": shlex.join(["vitadel", *words]) if words else None,
        "folder": run.folder,
    }
