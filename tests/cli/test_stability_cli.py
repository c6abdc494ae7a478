"""`vitadel audit --suite stability`, as a person would call it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from vitadel.attacks.patches.corruption_model import CorruptionModel, save_corruption_model
from vitadel.cli.main import app
from vitadel.cli.stability import StabilityFlags
from vitadel.errors import UserError
from vitadel.evaluation.stability.run import StabilityRequest

SHORT = ["--limit", 10, "--batch-size", 5, "--masks", 3, "--no-learned", "--patch-attacks", "fgsm", "--device", "cpu"]


def called(*words):
    return CliRunner().invoke(app, ["audit", "zoo:shapes-standard", "--suite", "stability", *map(str, words)])


def test_a_short_run_ends_with_tables_report_and_folder(tmp_path):
    out = tmp_path / "run"
    done = called(*SHORT, "--share", 0.25, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    assert "worst of 3" in done.output
    results = json.loads((out / "results.json").read_text())
    told = results["stability"]
    assert results["suite"] == "stability"
    assert (told["n"], told["masks"], told["watched"]) == (10, 3, 3)
    assert told["corrupted"] == told["patches"] / 4
    assert "learned" not in told
    assert [each["name"] for each in results["attacks"]] == ["fgsm"]
    assert "Stability under noisy patches" in (out / "report.html").read_text()
    assert (out / "environment.json").exists()
    again = called(*SHORT, "--share", 0.25, "--out", out, "--resume", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout) == results


def test_what_does_not_fit_is_told_before_anything_is_written(tmp_path):
    save_corruption_model(CorruptionModel(2, 2, 5), tmp_path / "c.safetensors")
    done = called(*SHORT, "--selector", tmp_path / "c.safetensors", "--out", tmp_path / "run")
    assert isinstance(done.exception, UserError)
    assert "2 x 2 patches of side 5" in str(done.exception)
    done = called(*SHORT, "--eps", "2/255", "--out", tmp_path / "run")
    assert "--eps do not go with --suite stability" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_attacks_by_default_are_the_orders_own():
    assert StabilityFlags().patch_attacks == ",".join(StabilityRequest().attacks)
