"""What is read from run folders, and what is concluded from it, is known beforehand here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from run_folders import write_run
from vitadel.errors import UserError
from vitadel.quantities import interval_text, percent
from vitadel.reporting.audit_figures import class_scores
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import aspects, differing_aspects, read_run, run_labels, threat_text
from vitadel.runtime.run_folder import SCHEMA, RunFolder

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


def test_run_that_has_only_started(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={}, pending=["pgd-20"])
    (path / "results.json").unlink()
    run = read_run(path)
    assert not run.complete
    assert (run.results, run.model, run.pending) == ({}, "zoo:shapes-robust", ["pgd-20"])
    assert aspects(run) == {
        "data": "shapes",
        "selection": "shapes-0-8",
        "n": "",
        "size": "",
        "precision": "",
        "norm": "Linf",
        "eps": "8/255",
        "attacks": "",
        "outputs": "",
    }


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"command\.json is missing"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="there is no run folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        read_run(tmp_path / "file")


def test_a_folder_of_runs_points_at_them(tmp_path: Path) -> None:
    write_run(tmp_path / "audit-b", correct=EIGHT, attacks={})
    write_run(tmp_path / "audit-a", correct=EIGHT, attacks={})
    with pytest.raises(UserError, match="audit-a, audit-b"):
        read_run(tmp_path)


def clean(**fields: Any) -> bytes:
    reported = {"correct": 3, "n": 4, "accuracy": 0.75, "ci95": [0.3, 0.95], **fields}
    return json.dumps({"clean": reported}).encode()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("results.json", b"{", "results.json cannot be read"),
        ("results.json", b"[]", "should hold a JSON object, got list"),
        ("results.json", b'{"clean": {"n": 3}}', "it lacks correct, accuracy, ci95"),
        ("results.json", b'{"worst_case": 3}', "'worst_case' should be an object or null, got int"),
        ("results.json", b'{"attacks": {"fgsm": 1}}', "'attacks' should be a list or null, got dict"),
        ("results.json", b'{"attacks": [{"name": "fgsm"}]}', "it lacks held"),
        ("results.json", b'{"attacks": [null]}', "it lacks name, held"),
        *(
            ("results.json", content.encode(), f"'{content.split(chr(34))[1]}' should be")
            for content in (
                '{"model": null}',
                '{"data": null}',
                '{"threat": null}',
                '{"threat": "linf"}',
                '{"findings": {}}',
                '{"protocol": "rvt"}',
                '{"study": 3}',
                '{"suite": 1}',
            )
        ),
        (
            "results.json",
            b'{"model": {"parameters": "5M"}}',
            "'parameters' in 'model' should be a whole number, got str",
        ),
        ("results.json", b'{"data": {"n": null}}', "'n' in 'data' should be a whole number, got null"),
        ("results.json", b'{"data": {"class_names": null}}', "'class_names' in 'data' should be a list, got null"),
        ("results.json", b'{"data": {"pixels": 32}}', "'pixels' in 'data' should be two whole numbers, got int"),
        ("results.json", clean(ci95=None), "'ci95' in 'clean' should be two numbers from 0 to 1, got null"),
        ("results.json", clean(ci95=[0.5]), "'ci95' in 'clean' should be two numbers from 0 to 1, got list"),
        ("results.json", clean(accuracy="all"), "'accuracy' in 'clean' should be a number from 0 to 1, got str"),
        ("results.json", b'{"findings": ["odd"]}', "it lacks check, verdict, evidence, advice"),
        ("results.json", b'{"findings": [{"check": "a", "verdict": "ok"}]}', "it lacks evidence, advice"),
        ("results.json", b'{"protocol": {"name": null}}', "it lacks nearest, differences, remark"),
        (
            "results.json",
            b'{"protocol": {"name": "rvt", "nearest": null, "differences": {}, "remark": ""}}',
            "it lacks comparable_with",
        ),
        ("command.json", b"{}", "lacks 'verb' or 'settings'"),
        ("command.json", b'{"verb": "audit", "settings": []}', "'settings' should be an object, got list"),
        ("command.json", b'{"verb": "audit", "settings": {}, "argv": "x"}', "'argv' should be a list or null, got str"),
        (
            "command.json",
            b'{"verb": "audit", "settings": {"attacks": "fgsm"}}',
            "'attacks' in 'settings' should be a list of texts, got str",
        ),
        ("environment.json", b'{"packages": "torch"}', "'packages' should be an object, got str"),
        ("samples.parquet", b"nothing", "samples.parquet cannot be read"),
        ("examples.npz", b"nothing", "examples.npz cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    (path / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as reported:
        read_run(path)
    assert str(path / file) in str(reported.value)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"complete": True}, "it lacks seed, model, data, clean, attacks, worst_case, findings"),
        ({"schema": SCHEMA, "complete": True}, "it lacks seed, model"),
        ({"schema": SCHEMA + 1, "complete": True, "clean": 3}, rf"reads schema {SCHEMA}. Update vitadel"),
        ({"schema": "1", "complete": True}, "has schema '1'"),
        ({"schema": True}, "has schema True"),
        ({"schema": 0}, "has schema 0"),
    ],
)
def test_results_of_another_version_or_of_none_are_refused(tmp_path: Path, results: object, message: str) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    (path / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match=message):
        read_run(path)
    with pytest.raises(UserError, match="has no results" if "lacks" in message else message):
        RunFolder(path).results()


def test_samples_that_the_results_do_not_count_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT}) / "samples.parquet"
    table = pq.read_table(path)
    assert len(table) == 8
    pq.write_table(table.slice(0, 7), path)
    with pytest.raises(UserError, match="it has 7 rows, and the results count 8 samples"):
        read_run(path.parent)


@pytest.mark.parametrize(
    ("column", "values"),
    [("clean_correct", ["yes"] * 8), ("held:fgsm", [YES] * 7 + [None]), ("label", [0.5] * 8)],
)
def test_samples_of_another_kind_are_damaged(tmp_path: Path, column: str, values: list[object]) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT}) / "samples.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), path)
    with pytest.raises(UserError, match=f"samples.parquet cannot be read: column '{column}' holds"):
        read_run(path.parent)


def test_examples_are_never_unpickled(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    np.savez(path / "examples.npz", x=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"examples\.npz cannot be read"):
        read_run(path)


def test_examples_without_their_arrays_are_damaged(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    np.savez(path / "examples.npz", x=np.zeros((1, 3, 2, 2)), index=[0], label=[0])
    with pytest.raises(UserError, match="it lacks z, prediction"):
        read_run(path)


def test_examples_report_one_attack(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", correct=EIGHT, attacks={"fgsm": EIGHT})
    with np.load(path / "examples.npz") as file:
        arrays = dict(file)
    np.savez(path / "examples.npz", **{**arrays, "attack": np.asarray(["fgsm", "pgd-20"])})
    with pytest.raises(UserError, match="attack should be a single value, got 2"):
        read_run(path)
    for name, value in (("label", arrays["label"][:-1]), ("prediction", arrays["prediction"] * 0.5)):
        np.savez(path / "examples.npz", **{**arrays, name: value})
        with pytest.raises(UserError, match=f"{name} should be {len(arrays['x'])} whole numbers, got"):
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


def test_a_thousand_classes_are_counted_in_about_the_time_of_ten(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 200_000
    correct, holds, took = rng.random(n) < 0.8, rng.random(n) < 0.4, {}
    for classes in (10, 1_000):
        names = [f"class {number}" for number in range(classes)]
        path = write_run(tmp_path / str(classes), correct=correct, attacks={"fgsm": holds}, class_names=names)
        run, start = read_run(path), time.process_time()
        scores = class_scores(run)
        took[classes] = time.process_time() - start
        label = run.column("label")
        for score in scores[:: classes // 10]:
            of_class = label == names.index(score.name)
            expected = (of_class.sum(), (of_class & correct).sum(), (of_class & correct & holds).sum())
            assert (score.n, score.correct, score.held) == expected
    assert took[1_000] < 4 * took[10] + 0.2, took


def test_classes_without_samples_or_names(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", correct=[YES, YES], attacks={}, class_names=("a", "b", "c"))
    results = json.loads((path / "results.json").read_text())
    results["data"]["class_names"] = ["a"]
    (path / "results.json").write_text(json.dumps(results))
    scores = class_scores(read_run(path))
    assert [(score.name, score.held) for score in scores] == [("a", None), ("class 1", None)]


def test_labels_report_runs_apart(tmp_path: Path) -> None:
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
    assert differing_from_base("size", size=32) == ["size"]
    assert differing_from_base("precision", precision="fp16") == ["precision"]


def test_the_order_of_attacks_and_those_outside_the_worst_case_make_no_difference(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": EIGHT, "pgd-20": EIGHT}))
    second = read_run(write_run(tmp_path / "b", correct=EIGHT, attacks={"pgd-20": EIGHT, "fgsm": EIGHT}))
    assert differing_aspects([first, second]) == []
    second.results["attacks"].append({**second.attacks[0], "name": "uap", "own_rules": True})
    assert differing_aspects([first, second]) == []
    second.results["attacks"][-1]["own_rules"] = False
    assert differing_aspects([first, second]) == ["attacks"]


def test_an_older_run_reports_its_size_by_its_examples(tmp_path: Path) -> None:
    new = read_run(write_run(tmp_path / "new", correct=EIGHT, attacks={"fgsm": EIGHT}, size=32))
    old = read_run(write_run(tmp_path / "old", correct=EIGHT, attacks={"fgsm": EIGHT}, older=True))
    assert (aspects(new)["size"], aspects(old)["size"]) == ("32 x 32", "8 x 8")
    assert differing_aspects([new, old]) == ["size"]
    (tmp_path / "old" / "examples.npz").unlink()
    unrecorded = read_run(tmp_path / "old")
    assert aspects(unrecorded)["size"] == ""
    assert differing_aspects([new, unrecorded]) == differing_aspects([unrecorded, new]) == []


def test_fields_of_a_kind_are_checked_for_that_kind_only(tmp_path: Path) -> None:
    for verb in ("audit", "diagnose"):
        path = write_run(tmp_path / verb, correct=EIGHT, attacks={}, verb=verb)
        results = json.loads((path / "results.json").read_text())
        (path / "results.json").write_text(json.dumps(results | {"diagnosis": {"sentence": "fine"}}))
    render([read_run(tmp_path / "audit")])
    with pytest.raises(UserError, match="it lacks next in 'diagnosis'"):
        render([read_run(tmp_path / "diagnose")])
