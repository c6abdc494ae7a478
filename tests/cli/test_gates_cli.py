"""`audit --fail-under`, `--fail-on` and `--summary`: exit code 3 after everything is written."""

from __future__ import annotations

import json

import pytest

from command_line import vitadel

QUICK = ("audit", "zoo:shapes-standard", "--limit=10", "--attacks=fgsm", "--no-precheck")


@pytest.mark.slow
def test_a_gate_that_is_not_passed_ends_with_3_and_everything_written(tmp_path):
    run, summary = tmp_path / "run", tmp_path / "audit.md"
    words = [*QUICK, f"--out={run}", "--fail-under=99", f"--summary={summary}"]
    said = vitadel(*words, code=3)
    assert "the gate is not passed; the results are written" in said.stderr
    assert "the lower end must be at least 99 %" in said.stderr
    assert said.stdout.splitlines()[-1] == str(run)  # as without the gate
    assert json.loads((run / "results.json").read_text())["complete"]
    assert (run / "report.html").exists()
    assert "not passed" in summary.read_text()
    # A finished run is judged again without work, by whatever gate is given now.
    summary.unlink()
    again = vitadel(*words, "--resume", "--json", code=3)
    assert json.loads(again.stdout)["complete"]
    assert "not passed" in again.stderr
    assert "not passed" in summary.read_text()
    assert "fgsm" not in vitadel(*QUICK, f"--out={run}", "--resume", "--fail-on=broken", "--json").stderr


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--fail-under=140", "takes a percentage above 0 and up to 100"),
        ("--fail-on=bad", "unknown verdict of --fail-on 'bad'"),
        ("--summary=/nowhere/audit.md", "there is no folder /nowhere"),
    ],
)
def test_a_wrong_gate_is_refused_before_anything_runs(tmp_path, flag, message):
    said = vitadel(*QUICK, f"--out={tmp_path / 'run'}", flag, code=2)
    assert message in said.stderr
    assert not (tmp_path / "run").exists()
