"""`vitadel threat-levels`, the same as `vitadel audit --suite threat-levels`, and `--tokens`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import save_tokens
from vitadel.backbones.load import load_model
from vitadel.cli.main import app
from vitadel.errors import UserError
from vitadel.heads.linear_probe import Probe, linear_layer, save_head

SHORT = ["--limit", "10", "--eps", "1/255,4/255", "--steps", "2", "--white-box", "", "--device", "cpu"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "tokens.safetensors"
    save_tokens(TokenClassifier(load_model("zoo:shapes-standard"), fresh_tokens(96, 3, seed=4)), file, {})
    return file


def called(*words):
    return CliRunner().invoke(app, ["audit", "zoo:shapes-standard", *map(str, words)])


@pytest.mark.slow
def test_a_short_run_ends_with_table_report_and_folder(tokens, tmp_path):
    out = tmp_path / "run"
    done = called("--tokens", tokens, "--suite", "ladder", "--levels", "T0,T6", *SHORT, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    for words in ("T6 white box", "worst case", "at most", "per image"):
        assert words in done.output
    results = json.loads((out / "results.json").read_text())
    assert done.stderr.count("ladder is now called threat-levels") == 1
    assert [entry["eps_text"] for entry in results["ladder"]["worst_case"]] == ["1/255", "4/255"]
    page = (out / "report.html").read_text()
    assert "Threat levels" in page
    assert "everything, the secret tokens too" in page
    assert (out / "figures" / "ladder.png").stat().st_size > 1000
    words = ["threat-levels", "zoo:shapes-standard", "--tokens", tokens, "--levels", "T0,T6", *SHORT, "--out", out]
    assert CliRunner().invoke(app, [*map(str, words), "--resume"]).exit_code == 0  # the same run by its own verb


@pytest.mark.slow
def test_heads_of_both_sides_come_from_files(tokens, tmp_path, monkeypatch):
    """As for a backbone without a classifier: the victim's own, and the attacker's."""
    model, files = load_model("zoo:shapes-standard"), [tmp_path / "victim.safetensors", tmp_path / "own.safetensors"]
    for number, file in enumerate(files):
        weight = torch.zeros(10, 96)
        weight[number] = 1.0
        save_head(Probe(model, linear_layer(weight, 100 * torch.eye(10)[number]), 1, False, list("abcdefghij")), file)
    words = ["--tokens", tokens, "--suite", "ladder", "--levels", "T2", *SHORT, "--out", tmp_path / "run"]
    folder = tmp_path / "probe"  # a run of `vitadel probe` stands for its head
    (folder / "weights").mkdir(parents=True)
    files[0].rename(folder / "weights" / "head.safetensors")
    words += ["--head", folder, "--attacker-head", files[1]]
    monkeypatch.setattr(sys, "argv", ["vitadel", "audit", "zoo:shapes-standard", *map(str, words)])
    done = called(*words)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["clean"]["correct"] == 1  # of ten images, one per class, the head says "the first" to all
    assert "pgd-2, own head" in {row["attack"] for row in results["ladder"]["rows"]}
    assert results["ladder"]["left_out"] == ["trained controls (--recipe)"]
    look = ["inspect", tmp_path / "run", "--attack", "features-1", "--limit", "4", "--out", tmp_path / "look"]
    looked = CliRunner().invoke(app, [*map(str, look), "--device", "cpu"])  # at the model below the head
    assert looked.exit_code == 0, looked.output


def test_a_backbone_without_a_head_needs_one(tmp_path):
    words = ["audit", "vit_small_patch14_dinov2.lvd142m", "--suite", "ladder", "--levels", "T6", "--tokens", "x"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert "train a head by `vitadel probe`" in str(done.exception or done.output)


@pytest.mark.slow
def test_an_audit_through_the_tokens_names_them_by_fingerprint(tokens, tmp_path):
    out = tmp_path / "run"
    done = called("--tokens", tokens, "--attacks", "pgd-2", "--limit", "10", "--out", out, "--device", "cpu")
    assert done.exit_code == 0, done.output
    notes = json.loads((out / "results.json").read_text())["model"]["notes"]
    assert notes["tokens"].startswith("3 robustness tokens (prefix), fingerprint ")


@pytest.fixture(scope="module")
def bank(tokens):
    other = tokens.parent / "other.safetensors"
    save_tokens(TokenClassifier(load_model("zoo:shapes-standard"), fresh_tokens(96, 3, scale=0.5, seed=5)), other, {})
    return f"{tokens},{other}"


@pytest.mark.slow
def test_a_bank_of_token_files_is_audited_as_what_answers_at_random(bank, tmp_path):
    out = tmp_path / "run"
    words = ("--tokens", bank, "--attacks", "fgsm", "--limit", "10", "--out", out, "--device", "cpu")
    done = called(*words)
    assert done.exit_code == 0, done.output
    results = json.loads((out / "results.json").read_text())
    assert results["model"]["notes"]["tokens"].startswith(
        "bank of 2 sets of 3 robustness tokens (prefix), fingerprint "
    )
    (random,) = [finding for finding in results["findings"] if finding["check"] == "random-outputs"]
    assert "eot:20+" in random["advice"]
    assert called(*words, "--resume").exit_code == 0  # the same bank has the same fingerprint


def test_a_bank_is_refused(bank, tmp_path):
    done = called("--tokens", bank, "--suite", "ladder", "--levels", "T6", *SHORT, "--out", tmp_path / "run")
    assert "give one file with --tokens, and the others with --bank" in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "lader"], "unknown suite 'lader'; did you mean ladder?"),
        (["--suite", "treat-levels"], "did you mean threat-levels? Known: corruptions, stability, threat-levels."),
        (["--suite", "ladder"], "Give the recipe of the tokens with --recipe"),
        (
            ["--suite", "ladder", "--levels", "T6"],
            "threat levels judge secret tokens, and 'zoo:shapes-standard' has none",
        ),
        (
            ["--suite", "ladder", "--norm", "l2", "--compile"],
            "'vitadel threat-levels' has no --norm, --compile; 'vitadel audit' has.",
        ),
        (["--levels", "T6"], "'vitadel audit' has no --levels; 'vitadel threat-levels' has."),
        (["--suite", "ladder", "--levels", "T2", "--white-box", "pgd-5"], "--white-box pgd-5 is for T6"),
        (["--suite", "ladder", "--levels", "T7", "--guess", "some"], "--guess takes numbers of tokens"),
        (["--suite", "ladder", "--levels", "T2,T9"], "unknown threat level 'T9'"),
        (["--suite", "ladder", "--levels", "T6", "--eps", "8"], "Did you mean 8/255?"),
        (["--suite", "ladder", "--levels", "T3", "--surrogates", "-1"], "--surrogates is a number of token sets"),
        (["--suite", "ladder", "--levels", "T8", "--bank", ""], "--bank is a number of token sets"),
        (["--suite", "ladder", "--levels", "T1", "--other-weights", "w"], "name it with --other MODEL"),
        (["--tokens", "nowhere.safetensors"], "secret file 'nowhere.safetensors' does not exist"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_flags(words, message, tmp_path):
    done = called(*words, "--limit", "10", "--out", tmp_path / "run")
    assert isinstance(done.exception, UserError | SystemExit)
    assert message in (str(done.exception) if isinstance(done.exception, UserError) else done.output)


def test_a_run_folder_that_is_not_there(tmp_path):
    done = CliRunner().invoke(app, ["audit", str(tmp_path / "nowhere"), "--suite", "ladder"])
    assert "nowhere' does not exist" in str(done.exception)


@pytest.mark.slow
def test_token_files_that_others_can_read(tokens, tmp_path):
    file = tmp_path / "open.safetensors"
    file.write_bytes(Path(tokens).read_bytes())
    file.chmod(0o644)
    words = ("--tokens", file, "--attacks", "fgsm", "--limit", "10", "--out", tmp_path / "run", "--device", "cpu")
    refused = called(*words)
    assert "--allow-readable" in str(refused.exception)
    assert called(*words, "--allow-readable").exit_code == 0
