"""A whole diagnosis: what it costs, how it ends, what is written."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest
import torch
import typer
from typer.testing import CliRunner

from toys import TinyNet, trained_toy
from vitadel.diagnosis import run
from vitadel.diagnosis.checks import OK, Finding
from vitadel.diagnosis.examination import LEVELS, Examination
from vitadel.diagnosis.run import (
    CHECKS,
    Check,
    Diagnosis,
    DiagnosisRequest,
    cost_of,
    diagnose,
    recommended_command,
    run_checks,
    summarize,
)
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.opening import recorded_opening


def test_the_cost_is_stated_beforehand():
    model, x, y = trained_toy()
    right = model(x).argmax(1) == y
    x, y = x[right][:48], y[right][:48]
    e = Examination(model, x, y, eps=1e-5)  # nothing falls within this, so an attack costs the most it can
    with count_passes(model) as spent:
        diagnosis = run_checks(e)
    assert [finding for finding in diagnosis.findings if finding.verdict != OK] == []
    stated = cost_of(LEVELS["quick"])
    done = {check.identifier for check in CHECKS} - set(diagnosis.not_examined)
    assert len(done) == len(CHECKS) - 4  # no attention (2), nothing random, no images to train a student on
    left_out = [check for check in CHECKS if check.identifier in diagnosis.not_examined]
    spared = [sum(check.own_cost(LEVELS["quick"])[part] for check in left_out) for part in (0, 1)]
    assert 0.9 < spent.gradients / 48 / (stated["gradients"] - spared[0]) <= 1
    assert 0.9 < spent.forwards / 48 / (stated["forwards"] - spared[1]) <= 1.05


def test_after_a_vital_fault_nothing_else_is_examined():
    model, x, y = trained_toy()
    findings = diagnose(model, (x[:16] * 255, y[:16]))
    assert [finding.check for finding in findings] == ["pixel-range"]
    assert findings[0].verdict == "broken"
    assert "wrap" in findings[0].advice


def diagnosis_of(after):
    model, x, y = trained_toy()
    checks = [check for check in CHECKS if check.identifier in ("probability-outputs", "random-outputs")]
    changed = torch.nn.Sequential(model, after).eval()
    return run_checks(Examination(changed, x[:16], y[:16]), checks)


def test_one_sentence_and_the_next_command():
    honest, broken = diagnosis_of(torch.nn.Identity()), diagnosis_of(torch.nn.Softmax(1))
    assert summarize(honest, 16).startswith("No check speaks against")
    assert recommended_command(honest, "m", "d", "linf", 8 / 255).endswith("--eps 8/255 --attacks autoattack")
    because = "Outputs are probabilities, not logits (probability-outputs: broken)"
    assert summarize(broken, 16) == f"Do not trust robustness numbers of this model: {because}."
    assert recommended_command(broken, "m", "d", "linf", 8 / 255).startswith("vitadel diagnose m --data d")


def test_the_next_command_opens_model_and_images_in_the_same_way():
    honest = diagnosis_of(torch.nn.Identity())
    argv = ["diagnose", "my model", "--data=my set", "--weights", "my weights.pt", "--std=0.5", "--level", "thorough"]
    argv += ["--surrogate", "other", "--limit", "16", "--skip-bad", "--out", "run", "--resume", "--json"]
    opening = recorded_opening({"verb": "diagnose", "argv": argv})
    command = recommended_command(honest, "my model", "my set", "l2", 0.5, opening=opening)
    words = [
        "vitadel",
        "audit",
        "my model",
        "--data",
        "my set",
        "--weights",
        "my weights.pt",
        "--std",
        "0.5,0.5,0.5",
        "--skip-bad",
    ]
    assert shlex.split(command) == [*words, "--norm", "l2", "--eps", "0.5", "--attacks", "autoattack"]


def few_checks(**more) -> list[Check]:
    kept = [check for check in CHECKS if check.identifier in ("pixel-range", "probability-outputs", "zero-gradients")]
    return [dataclasses.replace(check, **more.get(check.identifier.split("-")[0], {})) for check in kept]


@pytest.mark.slow
def test_an_interrupted_diagnosis_resumes(tmp_path, monkeypatch):
    asked = []

    def interrupted(e: Examination):
        asked.append("outputs")
        if len(asked) == 2:
            raise KeyboardInterrupt
        return OK, {"turn": len(asked)}

    def counted(e: Examination):
        asked.append("pixels")
        return OK, {"turn": len(asked)}

    checks = few_checks(pixel={"run": counted}, probability={"run": interrupted})
    monkeypatch.setattr(run, "run_checks", lambda e, **how: run_checks(e, checks, **how))
    target, plan, cpu = open_target("zoo:shapes-standard", "shapes"), DiagnosisRequest(limit=16), join_processes("cpu")
    with pytest.raises(Interrupted):
        run.run_diagnosis(target, plan, cpu, out=tmp_path / "run")
    results = run.run_diagnosis(target, plan, cpu, out=tmp_path / "run", resume=True).results
    assert asked == ["pixels", "outputs", "outputs"]
    assert [finding["evidence"].get("turn") for finding in results["findings"]] == [1, 3, None]
    assert not (tmp_path / "run" / "findings.json").exists()


def test_a_diagnosis_interrupted_in_an_earlier_version_resumes():
    old = {"check": "gradients are there", "verdict": "ok", "evidence": {}, "advice": ""}
    new = Finding("zero-gradients", "ok", {}, "", "Gradients vanish")
    saved = {"findings": [old, new.as_dict()], "not_examined": {"no staircase": "why", "staircase": "because"}}
    diagnosis = Diagnosis.from_dict(saved)
    assert diagnosis == Diagnosis((new,), {"staircase": "because"})  # the others run again
    assert Diagnosis.from_dict(diagnosis.as_dict()) == diagnosis


def test_tensors_are_sampled_like_other_data(monkeypatch):
    model, x, y = trained_toy()
    seen = []
    monkeypatch.setattr(run, "run_checks", lambda e: seen.append(e) or run_checks(e, few_checks()))
    helper = TinyNet(4).train()
    model.train()
    diagnose(model, (x, y), limit=20, surrogate=helper)
    (e,) = seen
    assert torch.bincount(e.y).tolist() == [5, 5, 5, 5]
    rest = torch.cat([part for part, _ in e.other_images(1000)])
    assert len(rest) == len(x) - 20
    assert not (rest[:, None] == e.x[None]).flatten(2).all(2).any()
    assert model.training
    assert all(part.training for part in helper.modules())
    diagnose(model, (x, y))
    assert len(seen[1].x) == LEVELS["quick"].images


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(20, 3, 8, 8), torch.zeros(19, dtype=torch.long), "integer labels"),
        (torch.zeros(20, 3, 8, 8), torch.zeros(20), "integer labels"),
        (torch.zeros(15, 3, 8, 8), torch.zeros(15, dtype=torch.long), "at least 16 images"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long), "at least 16 images"),
        (torch.zeros(20, 3, 8, 8), torch.full((20,), -1), "0 or more"),
    ],
)
def test_wrong_tensors_are_refused(pixels, labels, message):
    with pytest.raises(UserError, match=message):
        diagnose(TinyNet(4), (pixels, labels))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"level": "deep"}, "unknown level"), ({"eps": 0.0}, "above 0"), ({"eps": 8.0}, "8/255"), ({"limit": 15}, "16")],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(wrong, message):
    with pytest.raises(UserError, match=message):
        DiagnosisRequest(**wrong)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    from vitadel.cli.diagnose import diagnose as verb

    few = few_checks()
    monkeypatch.setattr(run, "run_checks", lambda e, **how: run_checks(e, few, **how))
    app = typer.Typer()
    app.command()(verb)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["zoo:shapes-standard", "--limit", "16", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "No check speaks against" in done.output
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert [finding["check"] for finding in results["findings"]] == [check.identifier for check in few]
    assert {finding["verdict"] for finding in results["findings"]} == {"ok"}
    assert results["clean"]["n"] == results["data"]["n"] == 16
    assert results["diagnosis"]["cost"]["gradients"] > 100
    assert "Outputs are probabilities, not logits" in (out / "report.html").read_text()
    again = CliRunner().invoke(
        app, ["zoo:shapes-standard", "--limit", "16", "--device", "cpu", "--out", str(out), "--resume", "--json"]
    )
    assert json.loads(again.stdout) == results


def test_the_next_command_attacks_through_the_modules_that_a_finding_names():
    def diagnosis(**more) -> Diagnosis:
        wrong = Finding("wrong-gradients", "broken", {"relative error": 1.0, **more}, "", "")
        shaky = Finding("random-outputs", "suspicious", {}, "", "")
        return Diagnosis((wrong, shaky) if more.get("random") else (wrong,))

    def attacks(found: Diagnosis) -> str:
        return shlex.split(recommended_command(found, "m", "d", "linf", 8 / 255))[-1]

    assert attacks(diagnosis()) == "square"
    assert attacks(diagnosis(modules=["a.b", "c"])) == "bpda(modules=a.b;c)+pgd-100,square"
    assert attacks(diagnosis(modules=["a.b"], random=True)) == "eot:20+bpda(modules=a.b)+pgd-100,square"
    vague = Finding("uninformative-gradients", "suspicious", {"n": 40}, "", "")
    exact = Finding("gain-ratio", "suspicious", {"modules": ["input_transform"]}, "", "")
    assert attacks(Diagnosis((vague,))) == "square"
    assert attacks(Diagnosis((vague, exact))) == "bpda(modules=input_transform)+pgd-100,square"


def test_checks_are_announced_before_they_run():
    model, x, y = trained_toy()
    order = []
    checks = [
        dataclasses.replace(check, run=lambda e, check=check: order.append(check.identifier) or (OK, {}))
        for check in few_checks()
    ]
    run_checks(Examination(model, x[:16], y[:16]), checks, announce=lambda check: order.append(f"{check.identifier}?"))
    names = [check.identifier for check in checks]
    assert order == [word for name in names for word in (f"{name}?", name)]


def test_a_check_costs_what_has_not_run_yet():
    model, x, y = trained_toy()
    e = Examination(model, x[:16], y[:16], eps=1e-5)
    (restarts,) = [check for check in CHECKS if check.identifier == "restart-sensitivity"]
    times = run.PassTimes(gradient=1.0, forward=0.0)
    assert run._most_seconds(restarts, e, times) == 16 * (10 + 40)
    e.robust("pgd-10")
    assert run._most_seconds(restarts, e, times) == 16 * 40
