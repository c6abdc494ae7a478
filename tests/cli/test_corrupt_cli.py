"""`vitadel corrupt` and the suite `corruptions`, as a person would call them, with the report that comes of it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from vitadel.cli import options
from vitadel.cli.bundles import bundled
from vitadel.cli.corrupt import corrupt
from vitadel.cli.corruptions import CorruptionFlags, run_corruptions
from vitadel.errors import Mistake

SAMPLING, CHOICE, RUNNING, FLAGS = options.Sampling("shapes"), options.Choice(), options.Running(), CorruptionFlags()


@bundled
def audit(
    model: options.Model = "zoo:shapes-standard",
    sampling: options.Sampling = SAMPLING,
    choice: options.Choice = CHOICE,
    run: options.Running = RUNNING,
    flags: CorruptionFlags = FLAGS,
) -> None:
    run_corruptions(model, choice, sampling, run, flags)


app = typer.Typer()
app.command("corrupt")(corrupt)
app.command("audit")(audit)


def called(*words):
    return CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])


def test_a_short_benchmark_ends_with_tables_report_and_folder(tmp_path):
    out = tmp_path / "run"
    words = ["audit", "--limit", "10", "--corruptions", "fog,contrast,spatter", "--severities", "1,5"]
    words += ["--perturbations", "gaussian-noise,translate", "--out", out]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    for text in ("fog", "spatter (validation)", "Mean error over 2 corruptions", "Mean flip probability"):
        assert text in done.output
    results = json.loads((out / "results.json").read_text())
    errors = [cell["error"] for cell in results["corruptions"]["cells"] if cell["corruption"] != "spatter"]
    assert results["corruptions"]["mean_error"] == pytest.approx(sum(errors) / 4)
    page = (out / "report.html").read_text()
    for text in ("Heat map of errors in percent", "spatter (validation)", "Top-5 distance", "never beside an mCE"):
        assert text in page
    shown = results["corruptions"]["cells"][1]["error"]
    assert f">{100 * shown:.1f}</td>" in page
    assert (out / "figures" / "corruptions.png").stat().st_size > 1000
    assert called(*words, "--resume").exit_code == 0


def test_a_copy_is_written_and_told(tmp_path):
    words = ["corrupt", "--limit", "10", "--corruptions", "contrast", "--severities", "3", "--out", tmp_path / "c"]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert "10 images of 32 x 32 pixels, 1 corruptions at 1 severities (png)" in done.output
    assert len(list((tmp_path / "c" / "contrast" / "3").rglob("*.png"))) == 10
    assert json.loads(called(*words, "--resume", "--json").stdout)["copy"]["corruptions"] == ["contrast"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["audit", "--corruptions", "fgo"], "unknown corruption 'fgo'; did you mean fog"),
        (["audit", "--severities", "0"], "got 0"),
        (["audit", "--severities", "hard"], "--severities takes some of 1, 2, 3, 4, 5, separated by commas"),
        (["audit", "--corruptions", "none"], "no corruption and no perturbation"),
        (["corrupt", "--severities", "6"], "got 6"),
        (["corrupt", "--format", "gif"], "unknown format 'gif'"),
    ],
    ids=" ".join,
)
def test_mistakes_are_told(words, told, tmp_path):
    done = called(*words, "--out", tmp_path / "run")
    assert isinstance(done.exception, Mistake)
    assert told in str(done.exception)
    assert not (tmp_path / "run").exists()
