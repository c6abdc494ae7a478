"""`vitadel stability`, and the same as `vitadel audit --suite stability`."""

from __future__ import annotations

import inspect
import json

import pytest
from typer.testing import CliRunner

from vitadel.attacks.patches.corruption_model import CorruptionModel, save_corruption_model
from vitadel.cli.main import app
from vitadel.cli.stability import stability
from vitadel.errors import UserError
from vitadel.evaluation.stability.run import StabilityRequest

SHORT = ["--limit", 10, "--batch-size", 5, "--masks", 3, "--no-learned", "--patch-attacks", "fgsm", "--device", "cpu"]


def called(*words, verb=("stability",)):
    return CliRunner().invoke(app, [*verb, "zoo:shapes-standard", *map(str, words)])


@pytest.mark.slow
def test_a_short_run_ends_with_tables_report_and_folder(tmp_path):
    out = tmp_path / "run"
    done = called(*SHORT, "--share", 0.25, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    assert "worst of 3" in done.output
    results = json.loads((out / "results.json").read_text())
    measured = results["stability"]
    assert results["suite"] == "stability"
    assert (measured["n"], measured["masks"], measured["watched"]) == (10, 3, 3)
    assert measured["corrupted"] == measured["patches"] / 4
    assert "learned" not in measured
    assert [each["name"] for each in results["attacks"]] == ["fgsm"]
    assert "Stability under noisy patches" in (out / "report.html").read_text()
    assert (out / "environment.json").exists()
    alias = ("audit", "--suite=stability")
    again = called(*SHORT, "--share", 0.25, "--out", out, "--resume", "--json", verb=alias)
    assert again.exit_code == 0
    assert json.loads(again.stdout) == results
    assert again.stderr.count("audit --suite stability is now called stability") == 1


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path):
    save_corruption_model(CorruptionModel(2, 2, 5), tmp_path / "c.safetensors")
    done = called(*SHORT, "--selector", tmp_path / "c.safetensors", "--out", tmp_path / "run")
    assert isinstance(done.exception, UserError)
    assert "2 x 2 patches of side 5" in str(done.exception)
    done = called(*SHORT, "--eps", "2/255", "--out", tmp_path / "run")
    assert "'vitadel stability' has no --eps" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_default_attacks_are_those_of_the_request():
    assert inspect.signature(stability).parameters["patch_attacks"].default == ",".join(StabilityRequest().attacks)
