"""The doctor as a whole: what a visit costs, how it ends, what is written down."""

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
from vitadel.diagnosis.examination import LEVELS, Examination
from vitadel.diagnosis.finding import OK
from vitadel.diagnosis.run import DiagnosisRequest, diagnose
from vitadel.diagnosis.runner import CHECKS, Check, cost_of, examine, recommended_command, sentence
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.pass_counter import metered
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.opening import recorded_opening


def test_the_cost_is_stated_beforehand():
    model, x, y = trained_toy()
    right = model(x).argmax(1) == y
    x, y = x[right][:48], y[right][:48]
    e = Examination(model, x, y, eps=1e-5)  # nothing falls within this, so an attack costs the most it can
    with metered(model) as spent:
        examined = examine(e)
    assert [finding for finding in examined.findings if finding.verdict != OK] == []
    stated = cost_of(LEVELS["quick"])
    done = {check.name for check in CHECKS} - set(examined.not_examined)
    assert len(done) == len(CHECKS) - 4  # no attention (2), nothing random, no images to teach a student with
    left_out = [check for check in CHECKS if check.name in examined.not_examined]
    spared = [sum(check.own(LEVELS["quick"])[part] for check in left_out) for part in (0, 1)]
    assert 0.9 < spent.gradients / 48 / (stated["gradients"] - spared[0]) <= 1
    assert 0.9 < spent.forwards / 48 / (stated["forwards"] - spared[1]) <= 1.05


def test_after_a_vital_fault_nothing_else_is_examined():
    model, x, y = trained_toy()
    findings = diagnose(model, (x[:16] * 255, y[:16]))
    assert [finding.check for finding in findings] == ["pixel range"]
    assert findings[0].verdict == "broken"
    assert "wrap" in findings[0].advice


def examined(after):
    model, x, y = trained_toy()
    checks = [check for check in CHECKS if check.name in ("outputs are logits", "same answer twice")]
    patient = torch.nn.Sequential(model, after).eval()
    return examine(Examination(patient, x[:16], y[:16]), checks)


def test_one_sentence_and_the_next_command():
    healthy, sick = examined(torch.nn.Identity()), examined(torch.nn.Softmax(1))
    assert sentence(healthy, 16).startswith("Nothing speaks against")
    assert recommended_command(healthy, "m", "d", "linf", 8 / 255).endswith("--eps 8/255 --attacks autoattack")
    assert sentence(sick, 16).startswith("Do not trust robustness numbers of this model: 'outputs are logits'")
    assert recommended_command(sick, "m", "d", "linf", 8 / 255).startswith("vitadel diagnose m --data d")


def test_the_next_command_opens_model_and_images_in_the_same_way():
    healthy = examined(torch.nn.Identity())
    argv = ["diagnose", "my model", "--data=my set", "--weights", "my weights.pt", "--std=0.5", "--level", "thorough"]
    argv += ["--surrogate", "other", "--limit", "16", "--skip-bad", "--out", "run", "--resume", "--json"]
    opening = recorded_opening({"verb": "diagnose", "argv": argv})
    told = recommended_command(healthy, "my model", "my set", "l2", 0.5, opening=opening)
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
    assert shlex.split(told) == [*words, "--norm", "l2", "--eps", "0.5", "--attacks", "autoattack"]


def few_checks(**more) -> list[Check]:
    kept = [check for check in CHECKS if check.name in ("pixel range", "outputs are logits", "gradients are there")]
    return [dataclasses.replace(check, **more.get(check.name.split()[0], {})) for check in kept]


def test_an_interrupted_visit_goes_on_where_it_was(tmp_path, monkeypatch):
    asked = []

    def interrupted(e: Examination):
        asked.append("outputs")
        if len(asked) == 2:
            raise KeyboardInterrupt
        return OK, {"turn": len(asked)}

    def counted(e: Examination):
        asked.append("pixels")
        return OK, {"turn": len(asked)}

    checks = few_checks(pixel={"run": counted}, outputs={"run": interrupted})
    monkeypatch.setattr(run, "examine", lambda e, **how: examine(e, checks, **how))
    target, plan, cpu = open_target("zoo:shapes-standard", "shapes"), DiagnosisRequest(limit=16), join_processes("cpu")
    with pytest.raises(Interrupted):
        run.run(target, plan, cpu, out=tmp_path / "run")
    results, _ = run.run(target, plan, cpu, out=tmp_path / "run", resume=True)
    assert asked == ["pixels", "outputs", "outputs"]
    assert [finding["evidence"].get("turn") for finding in results["findings"]] == [1, 3, None]
    assert not (tmp_path / "run" / "findings.json").exists()


def test_tensors_are_treated_as_other_data_are(monkeypatch):
    model, x, y = trained_toy()
    seen = []
    monkeypatch.setattr(run, "examine", lambda e: seen.append(e) or examine(e, few_checks()))
    helper = TinyNet(4).train()
    model.train()
    diagnose(model, (x, y), limit=20, surrogate=helper)
    (e,) = seen
    assert torch.bincount(e.y).tolist() == [5, 5, 5, 5]
    rest = torch.cat([part for part, _ in e.others(1000)])
    assert len(rest) == len(x) - 20
    assert not (rest[:, None] == e.x[None]).flatten(2).all(2).any()
    assert model.training
    assert all(part.training for part in helper.modules())
    diagnose(model, (x, y))
    assert len(seen[1].x) == LEVELS["quick"].images


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(20, 3, 8, 8), torch.zeros(19, dtype=torch.long), "as many"),
        (torch.zeros(20, 3, 8, 8), torch.zeros(20), "whole-numbered"),
        (torch.zeros(15, 3, 8, 8), torch.zeros(15, dtype=torch.long), "at least 16 images"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long), "at least 16 images"),
        (torch.zeros(20, 3, 8, 8), torch.full((20,), -1), "0 or more"),
    ],
)
def test_wrong_tensors_are_told(pixels, labels, message):
    with pytest.raises(UserError, match=message):
        diagnose(TinyNet(4), (pixels, labels))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"level": "deep"}, "unknown level"), ({"eps": 0.0}, "above 0"), ({"eps": 8.0}, "8/255"), ({"limit": 15}, "16")],
)
def test_mistakes_are_told_before_anything_is_loaded(wrong, message):
    with pytest.raises(UserError, match=message):
        DiagnosisRequest(**wrong)


def test_the_verb(tmp_path, monkeypatch):
    from vitadel.cli.diagnose import diagnose as verb

    few = few_checks()
    monkeypatch.setattr(run, "examine", lambda e, **how: examine(e, few, **how))
    app = typer.Typer()
    app.command()(verb)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["zoo:shapes-standard", "--limit", "16", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Nothing speaks against" in done.output
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert [finding["check"] for finding in results["findings"]] == [check.name for check in few]
    assert {finding["verdict"] for finding in results["findings"]} == {"ok"}
    assert results["clean"]["n"] == results["data"]["n"] == 16
    assert results["diagnosis"]["cost"]["gradients"] > 100
    assert "outputs are logits" in (out / "report.html").read_text()
    again = CliRunner().invoke(
        app, ["zoo:shapes-standard", "--limit", "16", "--device", "cpu", "--out", str(out), "--resume", "--json"]
    )
    assert json.loads(again.stdout) == results
