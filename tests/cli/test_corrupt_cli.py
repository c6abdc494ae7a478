"""`vitadel corrupt` and the suite `corruptions`, as a person would call them, with the report that comes of it."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from vitadel.cli.main import app
from vitadel.errors import UserError

AUDIT = ("audit", "zoo:shapes-standard", "--suite", "corruptions", "--data", "shapes")


def called(*words):
    return CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])


@pytest.mark.slow
def test_a_short_benchmark_ends_with_tables_report_and_folder(tmp_path):
    out = tmp_path / "run"
    words = [*AUDIT, "--limit", "10", "--corruptions", "fog,contrast,spatter", "--severities", "1,5"]
    words += ["--perturbations", "gaussian-noise,translate,shear", "--out", out]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    for text in ("fog", "spatter (validation)", "Mean error over 2 corruptions"):
        assert text in done.output
    assert "Mean flip probability over 2 sequences" in done.output
    results = json.loads((out / "results.json").read_text())
    errors = [cell["error"] for cell in results["corruptions"]["cells"] if cell["corruption"] != "spatter"]
    assert results["corruptions"]["mean_error"] == pytest.approx(sum(errors) / 4)
    page = (out / "report.html").read_text()
    for text in ("Heat map of errors in percent", "spatter (validation)", "shear (validation)", "never beside an mCE"):
        assert text in page
    assert "top-5 distance" in page
    shown = results["corruptions"]["cells"][1]["error"]
    assert f">{100 * shown:.1f}</td>" in page
    assert (out / "figures" / "corruptions.png").stat().st_size > 1000
    assert called(*words, "--resume").exit_code == 0


def test_a_copy_is_written_and_reported(tmp_path):
    words = ["corrupt", "--limit", "10", "--corruptions", "contrast", "--severities", "3", "--out", tmp_path / "c"]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert "10 images of 32 x 32 pixels, 1 corruptions at 1 severities (png)" in done.output
    assert len(list((tmp_path / "c" / "contrast" / "3").rglob("*.png"))) == 10
    assert json.loads(called(*words, "--resume", "--json").stdout)["copy"]["corruptions"] == ["contrast"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*AUDIT, "--corruptions", "fgo"], "unknown corruption 'fgo'; did you mean fog"),
        ([*AUDIT, "--severities", "0"], "got 0"),
        ([*AUDIT, "--severities", "hard"], "--severities takes some of 1, 2, 3, 4, 5, separated by commas"),
        ([*AUDIT, "--corruptions", "none"], "no corruption and no perturbation"),
        ([*AUDIT, "--attacks", "fgsm"], "'vitadel corruptions' has no --attacks; 'vitadel audit' has."),
        ([*AUDIT[:2], "--severities", "1"], "'vitadel audit' has no --severities; 'vitadel corruptions' has."),
        (["corrupt", "--corruptions", "none"], "no corruption is requested"),
        (["corrupt", "--severities", "6"], "got 6"),
        (["corrupt", "--format", "gif"], "unknown format 'gif'"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_flags(words, message, tmp_path):
    done = called(*words, "--out", tmp_path / "run")
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_benchmark_in_files_gives_the_numbers_of_the_fly(tmp_path):
    common = ["--corruptions", "contrast", "--batch-size", "8"]
    copy = [
        "corrupt",
        "--data",
        "shapes",
        *common,
        "--limit",
        "20",
        "--format",
        "npy",
        "--out",
        tmp_path / "CIFAR-10-C",
    ]
    assert called(*copy).exit_code == 0
    files = [*AUDIT[:-1], "cifar10-c", "--data-root", tmp_path, *common, "--out", tmp_path / "read"]
    for words in ([*AUDIT, *common, "--limit", "20", "--out", tmp_path / "made"], files):
        done = called(*words)
        assert done.exit_code == 0, done.output
    made, read = (json.loads((tmp_path / each / "results.json").read_text()) for each in ("made", "read"))
    assert made["corruptions"]["cells"] == read["corruptions"]["cells"]
    assert (made["corruptions"]["made"], read["corruptions"]["made"]) == ("made on the fly", "the benchmark's files")
    assert (made["clean"]["n"], read["clean"]) == (20, None)


def test_a_copy_says_what_it_leaves_out(tmp_path):
    (tmp_path / "in" / "cat").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (16, 16), (60 * number, 90, 90)).save(tmp_path / "in" / "cat" / f"{number}.png")
    (tmp_path / "in" / "cat" / "1.png").write_bytes(b"no picture")
    words = ["corrupt", "--data", f"folder:{tmp_path}/in", "--corruptions", "contrast", "--severities", "1"]
    done = called(*words, "--skip-bad", "--out", tmp_path / "c")
    assert done.exit_code == 0, done.output
    assert "2 images of 16 x 16 pixels" in done.output
    assert "1 images left out, as they cannot be used: cat/1.png" in done.output
