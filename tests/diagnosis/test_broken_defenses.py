"""Every broken defense raises its checks, and no honest model raises any."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from vitadel.adapters.adapted_model import open_model
from vitadel.diagnosis.checks import OK, SUSPICIOUS
from vitadel.diagnosis.checks.gradients import gain_ratio
from vitadel.diagnosis.examination import Examination
from vitadel.diagnosis.gallery import BROKEN_DEFENSES, HONEST_MODELS
from vitadel.diagnosis.run import CHECKS, DiagnosisRequest, examination_of, run_checks
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes

FEW = 16
# Small differences, which need more images; Square, which takes longest, does not.
SUBTLE = {"normalization": 48, "restart-sensitivity": 48, "random-noise": 48, "eot": 32}
# Queries of Square. One robust model pays for all of them: the other differs in how it was trained or is built.
HONEST = {"zoo:shapes-standard": 500, "zoo:shapes-robust": 500, "zoo:shapes-pgd-at": 50, "zoo:shapes-tora": 50}
CLASSICS = [defense for defense in BROKEN_DEFENSES if defense.raises]
honest = cache(open_model)


def examination(model: nn.Module, images: int) -> Examination:
    return examination_of(open_target(model, "shapes"), DiagnosisRequest(limit=images), join_processes("cpu"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("defense", CLASSICS, ids=lambda defense: defense.name)
def test_every_broken_defense_raises_its_checks(defense):
    model = defense.build(copy.deepcopy(honest(defense.base)))
    checks = [check for check in CHECKS if check.identifier in defense.raises]
    assert len(checks) == len(defense.raises), "a check that must be raised must exist"
    images = max(SUBTLE.get(name, FEW) for name in defense.raises)
    findings = run_checks(examination(model, images), [c for c in checks if c.identifier != "black-box"]).findings
    findings += run_checks(examination(model, FEW), [c for c in checks if c.identifier == "black-box"]).findings
    assert {finding.check for finding in findings if finding.verdict != OK} == set(defense.raises)
    assert all(finding.advice for finding in findings)


def test_every_check_has_a_broken_defense_or_a_test():
    raised = {name for defense in BROKEN_DEFENSES for name in defense.raises}
    tests = (Path(__file__).parent / "test_checks.py").read_text()
    without = [check for check in CHECKS if check.identifier not in raised]
    assert [check.identifier for check in without if f".{check.run.__name__}(" not in tests] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "jumps"),
    [("k-winners, strength 0.1", True), ("quantization-aware, 8 bits", False), ("bfloat16 inside", False)],
)
def test_sparse_activations_break_promises_at_the_border_and_rounding_is_no_such_thing(name, jumps):
    (member,) = [each for each in (*BROKEN_DEFENSES, *HONEST_MODELS) if each.name == name]
    verdict, evidence = gain_ratio(examination(member.make(), FEW))
    assert all(0.4 < share < 3 for share in evidence["median share of the promise kept, clean"])
    assert ("median share of wild steps at the border" in evidence) == jumps
    assert verdict == (SUSPICIOUS if jumps else OK)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_honest_models_raise_nothing(name):
    e = examination(honest(name), FEW)
    diagnosis = run_checks(replace(e, level=replace(e.level, queries=HONEST[name])))
    assert [finding for finding in diagnosis.findings if finding.verdict != OK] == []
    assert set(diagnosis.not_examined) == {"eot"}
    assert len(diagnosis.findings) == len(CHECKS) - 1
