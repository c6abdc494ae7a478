"""Cells read from run folders are the numbers that the runs report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tora.tora_vit import find_tora
from vitadel.corruptions.apply import corrupt
from vitadel.errors import UserError
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.target import open_target
from vitadel.papers.paper_documents import Evaluation
from vitadel.reproduce.evaluations import Subject, evaluate
from vitadel.reproduce.measurements import read_cell
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.run_folder import RunFolder
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.run import run_threat_levels


def run(folder, model, **evaluation):
    subject = Subject(model, {}, "shapes@test", None)
    asked = Evaluation(**evaluation)
    evaluate(subject, asked, join_processes("cpu"), {"out": folder, "resume": True})
    return RunFolder(folder).results()


@pytest.mark.slow
def test_corruptions(tmp_path):
    settings = {"limit": 6, "corruptions": ["contrast", "pixelate"], "severities": [1, 5]}
    results = run(tmp_path / "c", "zoo:shapes-standard", run="corruptions", settings=settings)["corruptions"]
    error, right = (read_cell("corruptions", tmp_path / "c", name) for name in ("mean_error", "mean_accuracy"))
    assert error.value == pytest.approx(results["mean_error"])
    assert right.value == pytest.approx(1 - results["mean_error"])
    assert error.n == len(error.images) == 6


@pytest.mark.slow
def test_stability(tmp_path):
    settings = {"limit": 4, "masks": 3, "watched": 2, "learned": False, "attacks": ["fgsm"]}
    found = run(tmp_path / "s", "zoo:shapes-standard", run="stability", settings=settings)["stability"]["random"]
    assert read_cell("stability", tmp_path / "s", "cosine").value == pytest.approx(found["similarity"]["mean"])
    assert read_cell("stability", tmp_path / "s", "accuracy").n == 4


@pytest.mark.slow
def test_heads_of_a_trade_off(tmp_path):
    settings = {"limit": 6, "eps": ["1/255"], "attacks": ["pgd-2"], "aimed": []}
    results = run(tmp_path / "t", "zoo:shapes-tora", run="trade-off", settings=settings)["trade_off"]
    (found,) = results["contenders"]
    for head in ("acc", "rob", "joint"):
        clean = read_cell("trade-off", tmp_path / "t", f"{head}:clean")
        assert clean.value == pytest.approx(found["rvt"][head]["clean"]["accuracy"])
        for attack, entry in zip(("fgsm", "pgd-5(step=0.5/255)"), found["rvt"][head]["attacks"], strict=True):
            cell = read_cell("trade-off", tmp_path / "t", f"{head}:{attack}")
            assert cell.value == pytest.approx(entry["robust_accuracy"])


@pytest.mark.slow
def test_corruptions_and_clean_accuracy_of_each_head(tmp_path):
    """The heads' numbers are those of the trade-off, and of corruptions computed here from the heads' logits."""
    names = "acc", "rob", "joint"
    settings = {"limit": 6, "corruptions": ["contrast"], "severities": [5]}
    for head in names:
        run(tmp_path / f"c-{head}", "zoo:shapes-tora", run="corruptions", settings=settings, branch=head)
        audit = {"limit": 6, "attacks": ["fgsm"], "eps": "1/255"}
        run(tmp_path / f"a-{head}", "zoo:shapes-tora", run="audit", settings=audit, branch=head)
    settings = {"limit": 6, "eps": ["1/255"], "attacks": ["fgsm"], "aimed": []}
    run(tmp_path / "t", "zoo:shapes-tora", run="trade-off", settings=settings)
    cells = {head: read_cell("corruptions", tmp_path / f"c-{head}", "mean_error") for head in names}
    for head in names:
        clean, wanted = (
            read_cell(verb, tmp_path / folder, value)
            for verb, folder, value in (("audit", f"a-{head}", "clean"), ("trade-off", "t", f"{head}:clean"))
        )
        assert np.array_equal(clean.images, wanted.images)
        assert cells[head].n == 6
    target = open_target("zoo:shapes-tora", "shapes@test")
    indices = torch.tensor(cells["acc"].index.tolist())
    images = [target.source.read([int(index)])[0] for index in indices]
    x = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in images])
    with torch.no_grad():
        logits = dict(zip(("acc", "rob"), find_tora(target.model).branches(corrupt(x, "contrast", 5)), strict=True))
        logits["joint"] = (logits["acc"] + logits["rob"]) / 2
    for head in names:
        wrong = logits[head].argmax(1) != target.source.labels()[indices]
        assert cells[head].images.tolist() == wrong.double().tolist()


def test_a_head_that_a_model_does_not_have_is_refused():
    subject = Subject("zoo:shapes-standard", {}, "shapes@test", None)
    with pytest.raises(UserError, match="unknown head 'acc' of zoo:shapes-standard"):
        subject.target(Evaluation(run="audit", branch="acc"))


def test_options_of_an_evaluation_change_how_its_model_is_opened():
    subject = Subject("zoo:shapes-standard", {"crop_pct": 1.0}, "shapes@test", None)
    opened = subject.target(Evaluation(run="audit", options=RVT.model_options))
    assert (opened.preprocess.crop_pct, opened.preprocess.interpolation) == (0.875, "bicubic")


@pytest.mark.slow
def test_attacks_on_the_public_backbone(tmp_path):
    target = open_target("zoo:shapes-standard", "shapes@test")
    width = 96
    victim = TokenClassifier(target.model, fresh_tokens(width, 2, 0.01, 0))
    request = ThreatLevelsRequest(
        levels=("T2",), eps=(2 / 255,), steps=2, public=("pgd-3",), limit=8, surrogates=0, bank=0
    )
    processes = join_processes("cpu")
    results = run_threat_levels(replace(target, model=victim), request, processes, out=tmp_path / "p").results
    tokens, bare = (read_cell("threat-levels", tmp_path / "p", f"{whose}:pgd-3") for whose in ("tokens", "bare"))
    row = next(each for each in results["ladder"]["rows"] if each["attack"] == "pgd-3, public")
    assert row["level"] == "T2"
    assert tokens.value == pytest.approx(row["robust_accuracy"])
    # The same attack on the bare model itself, as an audit runs it to the last step, judges the bare model.
    assert 0 <= bare.value <= 1
    assert bare.n == tokens.n == 8


@pytest.mark.slow
def test_size(tmp_path):
    size = run(tmp_path / "m", "zoo:shapes-standard", run="model")["size"]
    assert read_cell("model", tmp_path / "m", "parameters").value == size["parameters"] == pytest.approx(0.46, abs=0.01)
    cell = read_cell("model", tmp_path / "m", "gmacs")
    # 65 tokens: six blocks of 4 * 96 * 96 + 2 * 2 * 96 * 96 weights, and twice 65 * 65 * 96 for attention.
    expected = 64 * 48 * 96 + 6 * (65 * (4 + 4) * 96 * 96 + 2 * 65 * 65 * 96) + 96 * 10
    assert cell.value == pytest.approx(expected / 1e9, rel=1e-6)
    assert cell.exact
    assert read_cell("model", tmp_path / "m", "trained").value == size["parameters"]
    tora = run(tmp_path / "t", "zoo:shapes-tora", run="model")["size"]
    assert tora["trained"] == pytest.approx(tora["parameters"] - size["parameters"], abs=0.002)


def test_steps_of_a_training(tmp_path):
    lines = ['{"step": 1, "loss": 1.5}', '{"step": 2, "loss": 1.0, "epoch": 1}', '{"step": 2, "loss": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_cell("training", tmp_path, "loss:last2").value == 1.0
    assert read_cell("training", tmp_path, "two_minus_loss:first").value == 0.5
    assert read_cell("training", tmp_path, "loss:sd2").value == pytest.approx(np.std([1.5, 0.5], ddof=1))
    assert read_cell("training", tmp_path, "hours").value is None  # trained by an earlier version
    (tmp_path / "time.json").write_text('{"device_hours": 1.5, "processes": 1}')
    assert read_cell("training", tmp_path, "hours").value == 1.5
    assert read_cell("audit", tmp_path / "evaluations" / "x", "page").page == "evaluations/x/report.html"
