"""The doctor as a whole: what a visit costs, how it ends, what is written down."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from toys import trained_toy
from vitadel.diagnosis.doctor import CHECKS, cost_of, examine, next_command, sentence
from vitadel.diagnosis.examination import LEVELS, Examination
from vitadel.diagnosis.finding import OK
from vitadel.diagnosis.visit import Appointment, diagnose
from vitadel.errors import Mistake
from vitadel.evaluation.metering import metered


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
    assert next_command(healthy, "m", "d", "linf", 8 / 255).endswith("--eps 8/255 --attacks autoattack")
    assert sentence(sick, 16).startswith("Do not trust robustness numbers of this model: 'outputs are logits'")
    assert next_command(sick, "m", "d", "linf", 8 / 255).startswith("vitadel diagnose m --data d")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"level": "deep"}, "unknown level"), ({"eps": 0.0}, "above 0"), ({"eps": 8.0}, "8/255"), ({"limit": 3}, "8")],
)
def test_mistakes_are_told_before_anything_is_loaded(wrong, message):
    with pytest.raises(Mistake, match=message):
        Appointment(**wrong)


def test_the_verb(tmp_path, monkeypatch):
    from vitadel.cli.diagnose import diagnose as verb
    from vitadel.diagnosis import visit

    few = [check for check in CHECKS if check.name in ("pixel range", "outputs are logits", "gradients are there")]
    monkeypatch.setattr(visit, "examine", lambda e, shown=False: examine(e, few, shown))
    app = typer.Typer()
    app.command()(verb)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["zoo:shapes-standard", "--limit", "8", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Nothing speaks against" in done.output
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert [finding["check"] for finding in results["findings"]] == [check.name for check in few]
    assert {finding["verdict"] for finding in results["findings"]} == {"ok"}
    assert results["clean"]["n"] == results["data"]["n"] == 8
    assert results["diagnosis"]["cost"]["gradients"] > 100
    assert "outputs are logits" in (out / "report.html").read_text()
    again = CliRunner().invoke(
        app, ["zoo:shapes-standard", "--limit", "8", "--device", "cpu", "--out", str(out), "--resume", "--json"]
    )
    assert json.loads(again.stdout) == results
