"""Checks before an audit."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from vitadel.backbones.load import load_model
from vitadel.cli.main import app
from vitadel.diagnosis.gallery import BROKEN_DEFENSES
from vitadel.diagnosis.precheck import IMAGES, run_precheck
from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes

DEFENSES = {defense.name: defense for defense in BROKEN_DEFENSES}
CPU = join_processes("cpu")


def findings_about(model, eps=8 / 255):
    return run_precheck(open_target(model, "shapes"), AuditRequest(("fgsm",), eps=eps), CPU)


@pytest.mark.slow
def test_an_honest_model_gets_one_line():
    (finding,) = findings_about(load_model("zoo:shapes-robust"))
    assert finding["verdict"] == "ok"
    assert f"on {IMAGES} images raised nothing" in finding["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stop-gradient", "bit depth"])
def test_a_broken_defense_raises_its_checks(name):
    defense = DEFENSES[name]
    raised = {finding["check"] for finding in findings_about(defense.make())}
    assert raised & set(defense.raises)
    assert "precheck" not in raised


@pytest.mark.parametrize("eps", [0.0, 0.6])
def test_budgets_that_diagnose_refuses_have_no_findings(eps):
    assert findings_about(load_model("zoo:shapes-standard"), eps) == []


@pytest.mark.slow
def test_it_respects_the_batch_size_and_ignores_accuracy():
    model = load_model("zoo:shapes-standard")
    largest = []
    model.register_forward_pre_hook(lambda _module, args: largest.append(len(args[0]) * torch.is_grad_enabled()))
    source = open_target(model, "shapes").source
    (finding,) = run_precheck(open_target(model, source), AuditRequest(("fgsm",), batch_size=4), CPU)
    assert finding["verdict"] == "ok"
    assert max(largest) == 4
    always_wrong = torch.nn.Sequential(model, Rolled())
    assert "clean-accuracy" not in {finding["check"] for finding in findings_about(always_wrong)}


class Rolled(torch.nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(1, 1)


@pytest.mark.slow
def test_an_audit_begins_with_it_unless_switched_off(tmp_path):
    command = ["audit", "zoo:shapes-standard", "--attacks", "fgsm", "--limit", "10", "--device", "cpu", "--out"]
    for folder, more, checks in (("a", [], ["precheck"]), ("b", ["--no-doctor"], [])):
        assert CliRunner().invoke(app, [*command, str(tmp_path / folder), *more]).exit_code == 0
        results = json.loads((tmp_path / folder / "results.json").read_text())
        assert [finding["check"] for finding in results["findings"]] == checks
