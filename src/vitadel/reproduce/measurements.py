"""Read the cells of a table from the run folders of its evaluations; no model is opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vitadel.errors import UserError
from vitadel.papers.paper_documents import Verb
from vitadel.quantities import quantity_text
from vitadel.runtime.run_folder import RunFolder
from vitadel.statistics import bootstrap_mean, wilson

Images = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cell:
    """A measured value. `images` has one number per image where there is one, so that cells can be compared in pairs.

    `exact` marks numbers without chance, such as a count of parameters; `page` a result that its own page shows.
    """

    value: float | None
    ci95: tuple[float, float] | None = None
    n: int | None = None
    images: Images | None = None
    index: NDArray[np.int64] | None = None
    exact: bool = False
    page: str | None = None


def read_cell(verb: Verb | str, folder: Path, value: str) -> Cell:
    """What a column reads from the run folder of its evaluation."""
    if value == "page":
        return Cell(None, page=f"{folder.parent.name}/{folder.name}/report.html")
    if verb == "training":
        return _from_training(folder, value)
    return _READERS[verb](folder, RunFolder(folder).results(), value)


def _share(images: Images, index: NDArray[np.int64]) -> Cell:
    hits, n = int(images.sum()), len(images)
    return Cell(hits / n if n else None, wilson(hits, n), n, images, index)


def _mean(images: Images, index: NDArray[np.int64]) -> Cell:
    return Cell(float(images.mean()), bootstrap_mean(images), len(images), images, index)


def _columns(path: Path) -> dict[str, Any]:
    table = pq.read_table(path)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _from_audit(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    kind, _, attack = value.partition(":") if value.startswith(("paper:", "clean_scaled:")) else ("", "", value)
    samples = _columns(folder / "samples.parquet")
    if value == "clean":
        return _share(samples["clean_correct"].astype(float), samples["index"])
    if value.startswith("balance:"):  # the mean of clean and robust accuracy
        held = samples[f"held:{value.removeprefix('balance:')}"]
        return _mean((samples["clean_correct"].astype(float) + held) / 2, samples["index"])
    if not kind:
        return _share(samples[f"held:{attack}"].astype(float), samples["index"])
    entry = next(each for each in results["attacks"] if each["name"] == attack)
    style = entry["paper_style"] or {}
    if kind == "clean_scaled":
        scaled = style.get("clean_scaled")
        scaled = scaled.get("accuracy") if isinstance(scaled, Mapping) else scaled
        return Cell(scaled, None if scaled is None else wilson(round(scaled * style["n"]), style["n"]), style.get("n"))
    if "accuracy" not in style:
        raise UserError(f"{folder} does not hold the scaled model's own verdicts on {attack}; run the audit again")
    return Cell(style["accuracy"], wilson(style["held"], style["n"]), style["n"])


def _from_corruptions(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    samples = _columns(folder / "samples.parquet")
    index, label = samples["index"], samples["label"]
    if value == "clean":
        return _share(samples["clean_correct"].astype(float), index)
    found = results["perturbations" if value == "mfr" else "corruptions"]
    if value == "mfr":
        return Cell(found["mfr"], found["mfr_ci95"], len(index))
    if value in ("mean_error", "mean_accuracy"):
        names = [f"prediction:{name}/" for name in found["mean_error_over"]]
        wrong = [samples[name] != label for name in samples if any(name.startswith(prefix) for prefix in names)]
        error = np.mean(wrong, axis=0)
        return _mean(error if value == "mean_error" else 1 - error, index)
    # A score against AlexNet's is a weighted mean of errors: pairs are compared by the mean error of each image.
    cell = _from_corruptions(folder, results, "mean_error")
    return Cell(found[value], found[f"{value}_ci95"], cell.n, cell.images, cell.index)


def _from_stability(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    """'cosine' of attention and 'accuracy' under random masks; 'learned', accuracy under patches learned against it."""
    table = _columns(folder / "stability.parquet")
    if value == "cosine":
        return _mean(table["random:cosine"].astype(float), table["index"])
    if value == "learned":
        return _share(table["learned:right"].astype(float), table["index"])
    return _mean(table["random:right"] / results["stability"]["masks"], table["index"])


def _from_trade_off(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    head, _, what = value.partition(":")
    samples = _columns(folder / "samples.parquet")
    (candidate,) = results["trade_off"]["contenders"]
    where = candidate["name"] if head == "joint" else f"{candidate['name']} {head}"
    if what == "clean":
        return _share(samples[f"correct:{where}"].astype(float), samples["index"])
    name = next(each["name"] for each in candidate["rvt"][head]["attacks"] if each["attack"] == f"RVT {what}")
    return _share(samples[f"held:{where}: {name}"].astype(float), samples["index"])


def _from_threat_levels(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    """'tokens:ATTACK', the victim under an attack on the public backbone; 'bare:ATTACK', that backbone itself;
    'cosine:NAME', the victim's features under the released attack on the public backbone; 'features:NAME', under the
    attack on features of T2 in pixels. At the largest budget: 'level:LEVEL', correct under all attacks of a level;
    'attack:LEVEL NAME', under one; 'control:NAME', a model that is no defense under all attacks of T2; 'clean', and
    'correct:NAME' of such a model."""
    whose, _, what = value.partition(":")
    if whose in ("cosine", "features"):
        return _cosine(folder, results, whose == "features", what)
    samples = _columns(folder / "samples.parquet")
    if value == "clean":
        return _share(samples["clean_correct"].astype(float), samples["index"])
    largest = results["threat"]["eps"]
    attacks = [each for each in results["attacks"] if each["in_pixels"] and each["eps"] == largest]
    if whose == "level":
        columns = [f"held:{each['name']}" for each in attacks if each["level"] == what]
    elif whose == "correct":
        columns = [f"correct:{what}"]
    elif whose == "attack":
        columns = [f"held:{each['name']}" for each in attacks if f"{each['level']} {each['attack']}" == what]
    elif whose == "control":
        judge = "bare:" if what == "no tokens" else f"control:{what}:"
        columns = [f"{judge}{each['name']}" for each in attacks if each["level"] == "T2"]
    else:
        public = ("T2", f"{what}, public")
        name = next(each["name"] for each in results["attacks"] if (each["level"], each["attack"]) == public)
        columns = [f"held:{name}" if whose == "tokens" else f"bare:{name}"]
    if not columns:
        raise UserError(f"{folder} has no {value}: {', '.join(each['name'] for each in results['attacks'])}")
    return _share(np.logical_and.reduce([samples[name] for name in columns]).astype(float), samples["index"])


def _cosine(folder: Path, results: Mapping[str, Any], in_pixels: bool, name: str) -> Cell:
    """Cosines under the attack of T2 on features: the released one, or that within the largest budget in pixels."""
    rows = results["ladder"]["rows"] if "ladder" in results else results["feature_levels"]["rows"]
    row = next(
        each
        for each in reversed(rows)
        if each["level"] == "T2" and each["in_pixels"] == in_pixels and each["attack"].startswith("features")
    )
    cosines = _columns(folder / "cosines.parquet")
    prefix = f"T2 {row['attack']} at {quantity_text(row['eps'])}"
    column = next(each for each in cosines if each.startswith(prefix) and each.endswith(name))
    return _mean(cosines[column].astype(float), cosines["index"])


def _from_study(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    """'top5:NUMBER', what another model sees in perturbations, as in the paper."""
    _, _, number = value.partition(":")
    found = results["study"]["models"][int(number)]["paper_style"]
    return Cell(found["accuracy"], tuple(found["ci95"]), found["n"])


def _from_probe(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    """'miou' of clean images; 'public:ATTACK', the mean of images' own mIoU under an attacker without tokens and head,
    which of a model without tokens is the model itself; else what an audit has."""
    if value == "miou":
        clean = results["segmentation"]["clean"]
        return Cell(clean["mean_iou"], tuple(clean["mean_iou_ci95"]), clean["images"])
    whose, _, attack = value.partition(":")
    if whose == "public":
        found = [each for each in results["segmentation"]["attacks"] if each["name"] == attack][-1]
        return Cell(found["mean_iou_per_image"], tuple(found["mean_iou_per_image_ci95"]), found["images"])
    return _from_audit(folder, results, value)


def _from_model(folder: Path, results: Mapping[str, Any], value: str) -> Cell:
    return Cell(results["size"][value], exact=True)


def _from_training(folder: Path, value: str) -> Cell:
    """'hours'; 'passes' of images, in millions; of logged steps 'FIELD:last20', a mean over the last; 'FIELD:sd100',
    their deviation; 'FIELD:first'."""
    if value in ("hours", "passes"):
        file = folder / "time.json"  # not there if an earlier version trained it
        spent = json.loads(file.read_text("utf-8")) if file.exists() else {}
        passes = spent.get("image_passes")
        return Cell(spent.get("device_hours") if value == "hours" else None if passes is None else passes / 1e6)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    name, _, which = value.partition(":")
    steps = [row for row in rows if "epoch" not in row]
    logged = np.array([2 - row["loss"] if name == "two_minus_loss" else row[name] for row in steps])
    if which == "first":
        return Cell(float(logged[0]))
    last = logged[-int("".join(filter(str.isdigit, which))) :]
    return Cell(float(last.std(ddof=1) if which.startswith("sd") else last.mean()))


_READERS: dict[str, Callable[[Path, Mapping[str, Any], str], Cell]] = {
    "audit": _from_audit,
    "corruptions": _from_corruptions,
    "stability": _from_stability,
    "trade-off": _from_trade_off,
    "threat-levels": _from_threat_levels,
    "study": _from_study,
    "probe": _from_probe,
    "model": _from_model,
}
