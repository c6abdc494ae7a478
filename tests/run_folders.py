"""Run folders with chosen verdicts, written the way an audit writes them, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitadel.evaluation.engine.stages import MemberResult
from vitadel.evaluation.engine.verdicts import Verdicts, samples_table
from vitadel.quantities import read_quantity
from vitadel.runtime.run_folder import SCHEMA
from vitadel.version import __version__

__all__ = ["write_run"]

Array = np.ndarray[Any, np.dtype[Any]]

_SETTINGS = {"restarts": 1, "stepper": "Steepest", "stepper.length": "2/255", "steps": 20, "random_start": True}


def write_run(
    path: Path,
    *,
    correct: Sequence[bool] | Array,
    attacks: Mapping[str, Sequence[bool] | Array],
    model: str = "zoo:shapes-robust",
    data: str = "shapes",
    class_names: Sequence[str] = ("disc", "square", "triangle", "star"),
    norm: str = "linf",
    eps: str = "8/255",
    seed: int = 0,
    first_index: int = 0,
    pending: Sequence[str] = (),
    size: int = 8,
    pictures: int = 2,
    findings: Sequence[Mapping[str, Any]] = (),
    left_out: Sequence[str] = (),
    not_opened: Sequence[str] = (),
    argv: Sequence[str] | None = None,
    independent: bool = False,
    precision: str = "fp32",
    older: bool = False,
    verb: str = "audit",
) -> Path:
    """`attacks` says for every sample whether it is robust against that attack. With `pending` attacks the run is
    unfinished and, as in an audit, has neither samples.parquet nor environment.json nor examples.npz. An `older` run
    records neither the size of its images nor the attack of its examples, which is the first one here."""
    verdicts = _judge(np.asarray(correct, bool), attacks, len(class_names), first_index, independent)
    verdicts.bad.extend({"name": name} for name in left_out)
    settings = {
        "model": model,
        "model_fingerprint": "0123456789abcdef",
        "data": data,
        "data_fingerprint": f"{data}-{first_index}-{len(verdicts.index)}",
        "attacks": [*attacks, *pending],
        "norm": norm,
        "eps": eps,
        "seed": seed,
    }
    words = [verb, model, "--data", data] if argv is None else list(argv)
    results = {
        "schema": SCHEMA,
        "version": __version__,
        "complete": not pending,
        "seed": seed,
        "model": {
            "spec": model,
            "parameters": 5_500_000,
            "family": "vit",
            "fingerprint": "0123456789abcdef",
            **({} if older else {"macs": 1_260_000_000}),
        },
        "data": {
            "spec": data,
            "n": len(verdicts.index),
            "classes": len(class_names),
            "class_names": list(class_names),
            "left_out": len(left_out),
            "left_out_names": list(left_out[:20]),
            "not_opened": list(not_opened),
            **({} if older else {"pixels": [size, size]}),
        },
        "threat": {"norm": norm, "eps": read_quantity(eps), "eps_text": eps},
        "batch_size": 64,
        "precision": precision,
        **verdicts.summary(),
        "findings": list(findings),
    }
    path.mkdir(parents=True)
    _write_json(path / "command.json", {"verb": verb, "argv": words, "settings": settings, "version": __version__})
    _write_json(path / "results.json", results)
    if not pending:
        _write_json(path / "environment.json", _environment())
        (path / "samples.parquet").write_bytes(samples_table(verdicts))
        if attacks:
            examples = _examples(verdicts, pictures, size, len(class_names), read_quantity(eps))
            about = {"attack": np.asarray(next(iter(attacks))), "own_rules": np.asarray(False)}
            np.savez_compressed(path / "examples.npz", **examples | ({} if older else about))
    return path


def _judge(
    correct: Array, attacks: Mapping[str, Sequence[bool] | Array], classes: int, first: int, independent: bool
) -> Verdicts:
    index = np.arange(first, first + len(correct))
    label = index % classes
    prediction = np.where(correct, label, (label + 1) % classes)
    verdicts = Verdicts.of_clean([{"index": index, "label": label, "prediction": prediction, "bad": np.asarray("[]")}])
    for name, holds in attacks.items():
        seen = (verdicts.correct if independent else verdicts.robust).numpy()
        piece = {
            "index": index[seen],
            "held": np.asarray(holds, bool)[seen],
            "void": np.zeros(seen.sum(), bool),
            "gradients": np.asarray(20 * seen.sum()),
            "forwards": np.asarray(22 * seen.sum()),
            "seconds": np.asarray(3.25),
        }
        verdicts.add(name, dict(_SETTINGS), [MemberResult("", [piece])], alone=independent, own_rules=False)
    return verdicts


def _examples(verdicts: Verdicts, pictures: int, size: int, classes: int, eps: float) -> dict[str, Array]:
    rows = np.flatnonzero(verdicts.correct.numpy())[:pictures]
    rng = np.random.default_rng(0)
    across, down = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size))
    x = np.stack([np.stack([across, down, np.full_like(across, row / 8)]) for row in range(len(rows))])
    x = (0.1 + 0.8 * x).astype(np.float32)
    z = x + eps * rng.choice([-1, 1], x.shape).astype(np.float32)
    label = verdicts.label.numpy()[rows]
    fooled = np.arange(len(rows)) % 2 == 0
    prediction = np.where(fooled, (label + 1) % classes, label)
    return {"index": verdicts.index.numpy()[rows], "x": x, "z": z, "label": label, "prediction": prediction}


def _environment() -> dict[str, Any]:
    return {
        "vitadel": __version__,
        "python": "3.11.9",
        "platform": "Linux x86_64",
        "packages": {"torch": "2.15.0", "timm": "1.0.30"},
        "device": "cpu",
        "device_name": "cpu",
        "cores": 8,
        "threads": 4,
        "processes": 1,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
