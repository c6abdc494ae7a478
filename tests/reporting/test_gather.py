"""What is read from run folders, and what is concluded from it, is known beforehand here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_folders import write_run
from vitadel.errors import Mistake
from vitadel.reporting.gather import (
    aspects,
    class_scores,
    differing_aspects,
    interval_text,
    percent,
    read_run,
    run_labels,
    threat_text,
)

YES, NO = True, False
EIGHT = [YES] * 8


def test_reads_what_was_written(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", correct=[YES, YES, NO, YES], attacks={"fgsm": [YES, NO, YES, YES]}))
    assert run.complete
    assert run.model == "zoo:shapes-robust"
    assert run.results["clean"]["correct"] == 3
    assert [entry["name"] for entry in run.attacks] == ["fgsm"]
    assert run.environment["threads"] == 4
    assert run.column("clean_correct").tolist() == [YES, YES, NO, YES]
    assert run.examples is not None
    assert run.examples["x"].shape == (2, 3, 8, 8)
    assert threat_text(run) == "Linf 8/255"


def test_held_means_correct_and_standing_after_every_attack(tmp_path: Path) -> None:
    attacks = {"fgsm": [YES, NO, YES, YES], "pgd-20": [YES, YES, YES, NO]}
    path = write_run(tmp_path / "run", correct=[YES, YES, NO, YES], attacks=attacks, independent=True)
    held = read_run(path).held()
    assert held is not None
    assert held.tolist() == [YES, NO, NO, NO]


def test_unfinished_run_keeps_what_is_there(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT}, pending=["pgd-20", "square"]))
    assert not run.complete
    assert run.pending == ["pgd-20", "square"]
    assert (run.samples, run.examples, run.environment, run.held()) == (None, None, {}, None)
    assert class_scores(run) == []


def test_run_that_has_only_begun(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={}, pending=["pgd-20"])
    (path / "results.json").unlink()
    run = read_run(path)
    assert not run.complete
    assert (run.results, run.model, run.pending) == ({}, "zoo:shapes-robust", ["pgd-20"])
    assert aspects(run) == {
        "data": "shapes",
        "selection": "shapes-0-8",
        "n": "",
        "norm": "Linf",
        "eps": "8/255",
        "attacks": "",
    }


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"command\.json is missing"):
        read_run(tmp_path)
    with pytest.raises(Mistake, match="there is no run folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistake, match="is a file"):
        read_run(tmp_path / "file")


def test_a_folder_of_runs_points_at_them(tmp_path: Path) -> None:
    write_run(tmp_path / "audit-b", correct=EIGHT, attacks={})
    write_run(tmp_path / "audit-a", correct=EIGHT, attacks={})
    with pytest.raises(Mistake, match="audit-a, audit-b"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("results.json", b"{", "results.json cannot be read"),
        ("results.json", b"[]", "should hold a JSON object, got list"),
        ("results.json", b'{"clean": {"n": 3}}', "it lacks correct, accuracy, ci95"),
        ("results.json", b'{"worst_case": 3}', "it lacks held, n, robust_accuracy, ci95"),
        ("results.json", b'{"attacks": {"fgsm": 1}}', "'attacks' should be a list, got dict"),
        ("results.json", b'{"attacks": [{"name": "fgsm"}]}', "it lacks held"),
        ("command.json", b"{}", "lacks 'verb' or 'settings'"),
        ("samples.parquet", b"nothing", "samples.parquet cannot be read"),
        ("examples.npz", b"nothing", "examples.npz cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    (path / file).write_bytes(content)
    with pytest.raises(Mistake, match=message):
        read_run(path)


def test_examples_are_never_unpickled(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    np.savez(path / "examples.npz", x=np.array([{}], dtype=object))
    with pytest.raises(Mistake, match=r"examples\.npz cannot be read"):
        read_run(path)


def test_examples_without_their_arrays_are_damaged(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    np.savez(path / "examples.npz", x=np.zeros((1, 3, 2, 2)), index=[0], label=[0])
    with pytest.raises(Mistake, match="it lacks z, prediction"):
        read_run(path)


def test_shares_are_not_rounded_to_none_or_all() -> None:
    shares = (0, 1, 0.978, 0.0004, 0.99996)
    assert [percent(value) for value in shares] == ["0.0 %", "100.0 %", "97.8 %", "0.04 %", "99.996 %"]
    assert interval_text([0.0, 0.00382]) == "0.0 to 0.4 %"


def test_class_scores_count_by_label(tmp_path: Path) -> None:
    correct = [YES, YES, NO, YES, YES, YES]
    holds = [YES, NO, YES, YES, YES, NO]  # labels are 0 1 2 0 1 2; the wrong one does not hold though its attack fails
    run = read_run(write_run(tmp_path / "r", correct=correct, attacks={"fgsm": holds}, class_names=("a", "b", "c")))
    scores = {score.name: (score.n, score.correct, score.held) for score in class_scores(run)}
    assert scores == {"a": (2, 2, 2), "b": (2, 2, 1), "c": (2, 1, 0)}


def test_classes_without_samples_or_names(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", correct=[YES, YES], attacks={}, class_names=("a", "b", "c"))
    results = json.loads((path / "results.json").read_text())
    results["data"]["class_names"] = ["a"]
    (path / "results.json").write_text(json.dumps(results))
    scores = class_scores(read_run(path))
    assert [(score.name, score.held) for score in scores] == [("a", None), ("class 1", None)]


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, correct=EIGHT, attacks={}, model=model))
        for name, model in [("one", "deit"), ("two", "deit"), ("three", "vit"), ("deeper/two", "deit")]
    ]
    assert run_labels(runs) == ["deit (one)", "deit (two) [2]", "vit", "deit (two) [4]"]


def test_differing_aspects_names_only_what_differs(tmp_path: Path) -> None:
    def differing_from_base(name: str, **settings: Any) -> list[str]:
        chosen = {"correct": EIGHT, "attacks": {"fgsm": EIGHT}, **settings}
        return differing_aspects([base, read_run(write_run(tmp_path / name, **chosen))])

    base = read_run(write_run(tmp_path / "base", correct=EIGHT, attacks={"fgsm": EIGHT}))
    assert differing_from_base("same", model="other", seed=3) == []
    assert differing_from_base("eps", eps="4/255") == ["eps"]
    assert differing_from_base("norm", norm="l2") == ["norm"]
    assert differing_from_base("data", data="cifar10") == ["data"]
    assert differing_from_base("n", correct=[YES] * 4, attacks={"fgsm": [YES] * 4}) == ["n"]
    assert differing_from_base("selection", first_index=4) == ["selection"]
    assert differing_from_base("attacks", attacks={"pgd-20": EIGHT}) == ["attacks"]
