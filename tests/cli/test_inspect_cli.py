"""`vitadel inspect` as a person meets it: a table, a run folder with a report, and one message per mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import command_line
import vitadel as vitadel_package
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import save_tokens
from vitadel.backbones.load import load_model
from vitadel.cli import main
from vitadel.errors import UserError


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.safetensors"
    classifier = load_model("zoo:shapes-standard")
    width = int(classifier.backbone.get_parameter("cls_token").shape[-1])
    save_tokens(TokenClassifier(classifier, fresh_tokens(width, 3)), path, {})
    return path


def vitadel(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vitadel", *words])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def test_a_folder_with_a_figure_and_a_report(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["inspect", "zoo:shapes-standard", "--tokens", str(tokens), "--limit=4", f"--out={out}", "--device=cpu"]
    assert vitadel(monkeypatch, *words, "--attack=features-2(paper=true)") == 0
    said = capsys.readouterr().out
    assert said.strip().splitlines()[-1] == str(out)
    assert "attacked through the tokens" in said
    assert "n = 4 is too few" in said
    assert "8/255 in normalised units = 1.83, 1.79, 1.80 /255 in pixels" in said
    assert json.loads((out / "command.json").read_text())["verb"] == "inspect"
    activations = json.loads((out / "results.json").read_text())["activations"]
    assert len(activations["conditions"]) == 5
    assert all(len(entry["median"]) == len(activations["layers"]) for entry in activations["conditions"])
    assert (out / "figures" / "activations.png").read_bytes()[:4] == b"\x89PNG"
    page = (out / "report.html").read_text()
    assert "Massive activations" in page
    assert "Over 4 images the largest activations are in" in page
    assert "attacked through the tokens" in page


def test_a_backbone_without_a_head_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", "vit_small_patch14_dinov2.lvd142m", "--weights=random", "--input-size=28", "--limit=2"]
    words += ["--attack=features-1", "--json", f"--out={tmp_path / 'run'}", "--device=cpu"]
    assert vitadel(monkeypatch, *words) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["data"]["n"] == 2
    assert len(results["activations"]["layers"]) == 13


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens=/nowhere/at/all"], "/nowhere/at/all"),
        (["--attack=featres-3"], "did you mean features"),
        (["--attack=aas+pgd-3"], "is calibrated on other images first"),
        (["--limit=0"], "limit must be at least 1"),
    ],
)
def test_user_errors_end_with_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vitadel(monkeypatch, "inspect", "--device=cpu", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_token_file_that_others_can_read(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "open.safetensors"
    path.write_bytes(tokens.read_bytes())
    path.chmod(0o644)
    words = ["inspect", "zoo:shapes-standard", f"--tokens={path}", "--limit=2", "--attack=features-1", "--device=cpu"]
    words.append(f"--out={tmp_path / 'run'}")
    assert vitadel(monkeypatch, *words) == 2
    assert "chmod 600" in capsys.readouterr().err
    assert vitadel(monkeypatch, *words, "--allow-readable") == 0


def test_a_bank_is_not_taken_for_a_bare_model(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.safetensors"
    save_tokens(TokenClassifier(load_model("zoo:shapes-standard"), fresh_tokens(96, 3, seed=8)), other, {})
    words = ["inspect", "zoo:shapes-standard", f"--tokens={tokens},{other}", "--limit=2", "--device=cpu"]
    assert vitadel(monkeypatch, *words, f"--out={tmp_path / 'run'}") == 2
    assert "one set of tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_folder_of_an_audit_says_model_images_and_budget(tmp_path: Path) -> None:
    audit = ["audit", "zoo:shapes-standard", "--limit=6", "--seed=3", "--eps=3/255", "--attacks=fgsm", "--no-doctor"]
    command_line.vitadel(*audit, "--device=cpu", f"--out={tmp_path / 'audit'}")
    again = ["--attack=features-1", "--device=cpu", "--json"]
    asked = []
    for words in (
        [str(tmp_path / "audit")],
        ["zoo:shapes-standard", "--limit=6", "--seed=3", "--eps=3/255"],
    ):
        out = tmp_path / str(len(asked))
        said = command_line.vitadel("inspect", *words, *again, f"--out={out}").stdout
        results = json.loads(said)
        asked.append((results["model"]["spec"], results["data"]["n"], results["seed"], results["activations"]))
    assert asked[0] == asked[1]


def test_the_folder_of_an_audit_from_python(tmp_path: Path) -> None:
    audited = tmp_path / "audit"
    vitadel_package.audit("zoo:shapes-standard", attacks="fgsm", eps="2/255", limit=5, seed=3, out=audited)
    results = vitadel_package.massive_activations(audited, attack="features-2", out=tmp_path / "run")
    assert (results["model"]["spec"], results["data"]["n"], results["seed"]) == ("zoo:shapes-standard", 5, 3)
    assert json.loads((tmp_path / "run" / "command.json").read_text())["settings"]["eps"] == "2/255"
    assert [entry["name"] for entry in results["activations"]["conditions"]] == ["clean", "attacked"]
    with pytest.raises(UserError, match="no setting 'limt'; did you mean limit"):
        vitadel_package.massive_activations(audited, limt=5)
