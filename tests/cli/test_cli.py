"""The command line as a person meets it: answers, exit codes, one clear message per mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from PIL import Image

from command_line import vitadel
from vitadel.cli.main import app
from vitadel.evaluation.audit.audit import AuditRequest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def from_a_shell(*words: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    """In a process of its own: slow, so only for what depends on it."""
    done = subprocess.run(
        [sys.executable, "-m", "vitadel", *words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_help_answers_within_0_6_seconds_of_processor_time():
    spent = []
    for _ in range(3):
        before = os.times()
        assert "audit" in from_a_shell("--help").stdout
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < 0.6


@pytest.mark.parametrize(("words", "most"), [([], 45), (["audit"], 70), (["threat-levels"], 70)])
def test_help_is_short_and_cuts_no_sentence(words, most):
    lines = vitadel(*words, "--help", columns=100).stdout.splitlines()
    assert len(lines) <= most
    assert not [line for line in lines if "…" in line or "..." in line.replace("DIR, ...", "").replace("[ARGS]...", "")]


def test_every_verb_has_one_line_of_help():
    lines = vitadel("--help", columns=80).stdout.splitlines()
    for verb in typer.main.get_command(app).commands:
        (line,) = [line for line in lines if line.startswith(f"│ {verb} ")]
        assert line.rstrip("│ ").endswith(".")


@pytest.mark.slow
def test_a_renamed_flag_works_and_says_its_new_name_once(tmp_path):
    words = ["audit", "--limit=4", "--attacks=fgsm", "--no-doctor", f"--out={tmp_path / 'run'}", "--json"]
    done = vitadel(*words)
    assert done.stderr.count("--no-doctor is now called --no-precheck") == 1
    assert json.loads(done.stdout)["complete"]
    assert "is now called" not in vitadel(*words[:3], "--no-precheck", *words[4:], "--resume").stderr


@pytest.mark.slow
def test_a_bare_audit_runs_and_ends_with_its_folder(tmp_path):
    done = from_a_shell("audit", "--limit", "20", "--attacks", "fgsm", cwd=tmp_path)
    folder = tmp_path / done.stdout.strip().splitlines()[-1]
    assert folder.parent == tmp_path / "runs"
    names = {path.name for path in folder.iterdir()}
    assert {"command.json", "environment.json", "results.json", "samples.parquet", "report.html"} <= names
    results = json.loads((folder / "results.json").read_text())
    assert results["complete"]
    assert results["model"]["spec"] == "zoo:shapes-robust"
    assert "95 % interval" in done.stdout
    own = (folder / "report.html").read_bytes()
    several = vitadel("report", str(folder), str(folder), cwd=tmp_path)
    assert several.stdout.splitlines()[-1] == str(folder / "comparison.html")
    assert (folder / "report.html").read_bytes() == own
    report = vitadel("report", str(folder), "--out", str(tmp_path / "page.html"), cwd=tmp_path)
    assert report.stdout.strip() == str(tmp_path / "page.html")
    assert "fgsm" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_from_a_timm_name_and_a_folder_of_images_to_a_robust_accuracy(tmp_path):
    for number in range(6):
        place = tmp_path / "photos" / "test" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (40 * number, 90, 200)).save(place / f"{number}.png")
    done = vitadel(
        "audit", "vit_tiny_patch16_224", "--weights=random", "--num-classes=3", f"--data=folder:{tmp_path}/photos@test",
        "--attacks=pgd-2", "--eps=1/255", "--small-images", "--json", f"--out={tmp_path / 'run'}",
    )  # fmt: skip
    results = json.loads(done.stdout)
    assert results["data"]["n"] == 6
    assert results["model"]["family"] == "vit"
    assert results["threat"]["eps_text"] == "1/255"


@pytest.mark.slow
def test_a_finished_run_is_printed_again_without_work(tmp_path):
    words = ["audit", "--limit=10", "--attacks=fgsm", f"--out={tmp_path / 'run'}", "--json"]
    first = vitadel(*words)
    assert vitadel(*words, "--resume").stdout == first.stdout
    assert "already holds a finished run" in vitadel(*words, code=2).stderr


@pytest.mark.slow
def test_plan_bounds_what_an_audit_takes():
    cost = json.loads(vitadel("plan", "--limit=40", "--attacks=fgsm,pgd-7(restarts=2)", "--json").stdout)
    checks, *rows = cost["rows"]
    assert checks["name"] == "first checks"
    assert [(row["gradients"], row["forwards"]) for row in rows] == [(0, 1), (1, 1), (14, 2)]
    assert cost["samples"] == 40
    assert cost["gradient_ms"] > cost["forward_ms"] > 0
    expected = 40 * sum(r["gradients"] * cost["gradient_ms"] + r["forwards"] * cost["forward_ms"] for r in rows)
    assert cost["seconds_at_most"] - checks["seconds"] == pytest.approx(expected / 1e3)
    assert cost["tried_on"] == 0  # nothing to try before a run of seconds
    assert cost["seconds_likely"] == cost["seconds_at_most"]


def test_lists():
    assert "pgd[-K]" in vitadel("list", "attacks").stdout
    assert "parquet:" in vitadel("list", "data").stdout
    models = vitadel("list", "models").stdout
    assert "zoo:shapes-robust" in models
    assert "zoo:shapes-standard" in models
    assert "deit_tiny_patch16_224" in vitadel("list", "models", "deit_tiny").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", "deit_tny_patch16_224"], ["unknown model", "deit_tiny_patch16_224"]),
        (["audit", "zoo:shapes-robst"], ["unknown zoo model", "zoo:shapes-robust"]),
        (["audit", "deit_tiny_patch16_224"], ["--weights"]),
        (["audit", "--attacks", "pdg-20"], ["unknown attack 'pdg-20'", "did you mean pgd"]),
        (["audit", "--eps", "8"], ["whole pixel range", "8/255"]),
        (["audit", "--eps", "lots"], ["'lots' is not a number"]),
        (["audit", "--data", "shaps"], ["unknown data", "shapes"]),
        (["audit", "--data", "folder:/nowhere/at/all"], ["/nowhere/at/all", "does not exist"]),
        (["audit", "--weights", "missing.safetensors", "deit_tiny_patch16_224"], ["missing.safetensors"]),
        (["audit", "--device", "tpu9"], ["tpu9"]),
        (["audit", "--device", "meta"], ["cannot be used here"]),
        (["audit", "--limit", "0"], ["limit must be at least 1"]),
        (["audit", "--seed", "-1"], ["--seed must be a whole number from 0 to 2**62, got -1"]),
        (["audit", "--seed", str(2**62 + 1)], ["from 0 to 2**62"]),
        (["audit", "--mean", "0.5,0.5", "--std", "0.5"], ["--mean takes one number or three"]),
        (["audit", "--nonsense"], ["--nonsense"]),
        (["list", "cats"], ["cats"]),
        (["list", "recipes", "nosuch"], ["no name among the recipes contains 'nosuch'", "vitadel list recipes"]),
        (["list", "recipes", "pgdat"], ["contains 'pgdat'; did you mean", "shapes/pgd-at"]),
        (["list", "attacks", "pdg"], ["no name among the attacks contains 'pdg'; did you mean pgd"]),
        (["list", "data", "foldr"], ["no name among the data contains 'foldr'; did you mean folder"]),
        (["list", "protocols", "Robust-Bench"], ["did you mean robustbench-"]),
        (["list", "models", "zoo:shapes-robst"], ["did you mean zoo:shapes-robust"]),
        (["plan", "shapes/pgdat"], ["'shapes/pgdat' is no recipe", "did you mean shapes/pgd-at"]),
        (["plan", "shapes/pgdat", "train.epochs=3"], ["did you mean shapes/pgd-at"]),
        (["plan", "trades-awp"], ["did you mean", "shapes/trades-awp"]),
        (["plan", "nowhere/at-all.safetensors"], ["weight file 'nowhere/at-all.safetensors' does not exist"]),
        (["report", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)  # fmt: skip
def test_user_errors_get_one_message_and_exit_code_two(words, said, tmp_path):
    done = vitadel(*words, cwd=tmp_path, code=2)
    for part in said:
        assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_user_error_shows_no_traceback_in_a_shell(tmp_path):
    done = from_a_shell("report", "nowhere", cwd=tmp_path, code=2)  # which needs no torch
    assert done.stderr.startswith("vitadel: there is no run folder nowhere")
    assert list(tmp_path.iterdir()) == []


def test_quick_is_the_pair_of_fast_attacks_and_says_so(tmp_path):
    words = ["audit", "zoo:shapes-standard", "--limit=6", "--no-precheck", f"--out={tmp_path / 'run'}"]
    said = vitadel(*words, "--attacks=quick")
    assert "A smoke test: FGSM and PGD-20 measure no robustness." in said.stdout
    assert json.loads((tmp_path / "run" / "command.json").read_text())["settings"]["attacks"] == ["fgsm", "pgd-20"]


@pytest.mark.slow
def test_a_bare_audit_runs_autoattack_fast(tmp_path):
    words = ["audit", "zoo:shapes-standard", "--limit=6", "--no-precheck", f"--out={tmp_path / 'run'}"]
    assert "smoke test" not in vitadel(*words).stdout
    assert json.loads((tmp_path / "run" / "command.json").read_text())["settings"]["attacks"] == ["autoattack-fast"]
    assert AuditRequest().attacks == ("autoattack-fast",)
