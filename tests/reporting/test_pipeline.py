"""Gates, summaries and files for other tools, from run folders with chosen verdicts."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from run_folders import write_run
from vitadel.errors import UserError
from vitadel.reporting.exports import export
from vitadel.reporting.pipeline import Gate, check_summary_file, markdown_summary
from vitadel.reporting.read_runs import read_run
from vitadel.statistics import wilson

DOUBT = {
    "check": "c",
    "title": "Gradients vanish",
    "verdict": "suspicious",
    "evidence": "x | y",
    "advice": "run square",
}


def audited(path: Path, **more) -> Path:
    """90 of 100 correct, 60 robust."""
    robust = [place < 60 for place in range(100)]
    correct = [place < 90 for place in range(100)]
    return write_run(path, correct=correct, attacks={"pgd-20": robust}, **more)


def test_the_lower_end_of_the_interval_decides(tmp_path):
    results = read_run(audited(tmp_path / "run")).results
    low = 100 * wilson(60, 100)[0]
    assert 50 < low < 51
    assert Gate(fail_under=low - 0.01).failures(results) == []
    (reason,) = Gate(fail_under=low + 0.01).failures(results)  # although 60 % is well above
    assert "60.0 % (50.2 to 69.1 %)" in reason


def test_without_an_attack_there_is_nothing_to_pass(tmp_path):
    run = read_run(write_run(tmp_path / "run", correct=[True] * 10, attacks={}))
    assert Gate(fail_under=1).failures(run.results) == [
        "no attack within the budget was run, so there is no robust accuracy"
    ]


@pytest.mark.parametrize(
    ("verdict", "fail_on", "passes"),
    [
        ("ok", "suspicious", True),
        ("suspicious", "suspicious", False),
        ("broken", "suspicious", False),
        ("suspicious", "broken", True),
        ("broken", "broken", False),
    ],
)
def test_a_worse_finding_fails_too(tmp_path, verdict, fail_on, passes):
    run = read_run(audited(tmp_path / "run", findings=[DOUBT | {"verdict": verdict}]))
    assert (Gate(fail_on=fail_on).failures(run.results) == []) is passes


@pytest.mark.parametrize("wrong", [{"fail_under": 0}, {"fail_under": 101}, {"fail_under": float("nan")}])
def test_impossible_percentages_are_refused(wrong):
    with pytest.raises(UserError, match="percentage above 0"):
        Gate(**wrong)


def test_unknown_verdicts_are_refused():
    with pytest.raises(UserError, match="did you mean suspicious"):
        Gate(fail_on="suspicous")


def test_a_summary_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        check_summary_file(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        check_summary_file(tmp_path / "none" / "audit.md")


def test_a_summary_has_verdict_numbers_and_findings(tmp_path):
    run = read_run(audited(tmp_path / "run", model="zoo:[x](http://evil)", findings=[DOUBT]))
    text = markdown_summary(run, Gate(fail_under=55, fail_on="suspicious"))
    assert text.startswith("### Robustness of zoo:\\[x\\](http://evil): not passed\n")
    assert text.count("- **") == 3  # two reasons and a finding
    assert "| worst case | 60.0 % | 50.2 to 69.1 % | 100 |" in text
    assert "x \\| y" in text
    assert markdown_summary(run, Gate(fail_under=50)).startswith("### Robustness of zoo:\\[x\\](http://evil): passed\n")
    assert "passed" not in markdown_summary(run, Gate())
    calm = read_run(audited(tmp_path / "calm"))
    assert "No check raised anything." in markdown_summary(calm, Gate())


@pytest.mark.slow
def test_files_for_other_tools(tmp_path):
    runs = [audited(tmp_path / "a", model="deit_tiny_patch16_224", data="folder:photos"), audited(tmp_path / "b")]
    export(runs, tmp_path / "out")
    index = yaml.safe_load((tmp_path / "out" / "model-index.yaml").read_text())["model-index"]
    assert [entry["name"] for entry in index] == ["deit_tiny_patch16_224", "zoo:shapes-robust"]
    (result,) = index[0]["results"]
    assert result["task"] == {"type": "image-classification"}
    assert result["dataset"] == {"name": "folder:photos", "type": "folder"}
    clean, robust = result["metrics"]
    assert (clean["type"], clean["value"]) == ("accuracy", 0.9)
    assert (robust["type"], robust["value"]) == ("robust_accuracy", 0.6)
    assert robust["name"] == "Robust accuracy (Linf 8/255, pgd-20)"
    assert robust["args"] == {"n": 100, "ci95": pytest.approx(list(wilson(60, 100)))}
    (row, _) = csv.DictReader((tmp_path / "out" / "timm.csv").read_text().splitlines())
    assert (row["model"], row["top1"], row["top1_err"]) == ("deit_tiny_patch16_224", "90.000", "10.000")
    assert (row["param_count"], row["img_size"], row["robust_top1"], row["eps"]) == ("5.50", "8", "60.000", "8/255")
    (record, _) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["worst_case"]["held"] == 60
    assert record["command"] == "vitadel audit deit_tiny_patch16_224 --data folder:photos"
    assert [entry["name"] for entry in record["attacks"]] == ["pgd-20"]


def test_unfinished_runs_are_no_results_for_others(tmp_path):
    export([audited(tmp_path / "a", pending=["apgd-t"])], tmp_path / "out")
    assert not (tmp_path / "out" / "timm.csv").exists()
