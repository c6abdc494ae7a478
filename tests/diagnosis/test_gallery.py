"""Every liar is caught for the right reason, and no honest model is suspected."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from vitadel.adapters.adapted_model import open_model
from vitadel.diagnosis.broken_defenses import GALLERY
from vitadel.diagnosis.examination import Examination
from vitadel.diagnosis.finding import OK
from vitadel.diagnosis.run import DiagnosisRequest, examination_of
from vitadel.diagnosis.runner import CHECKS, examine
from vitadel.diagnosis.writing import gallery_in_words
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes

# Small differences, which take more images to be told from luck.
SUBTLE = {"normalisation", "more restarts", "gradients beat noise", "averaging does no better"}
DOCS = Path(__file__).parents[2] / "docs" / "checks.md"
HONEST = [f"zoo:shapes-{name}" for name in ("standard", "robust", "pgd-at", "trades", "aas-at", "tora")]
honest = cache(open_model)


def examination(model: nn.Module, images: int) -> Examination:
    return examination_of(open_target(model, "shapes"), DiagnosisRequest(limit=images), join_processes("cpu"))[0]


@pytest.mark.parametrize("liar", GALLERY, ids=lambda broken_defense: broken_defense.name)
def test_every_liar_is_caught_for_the_right_reason(broken_defense):
    model = broken_defense.lie(copy.deepcopy(honest(broken_defense.patient)))
    checks = [check for check in CHECKS if check.name in broken_defense.seen_by]
    assert len(checks) == len(broken_defense.seen_by), "a check that must see a liar must exist"
    examined = examine(examination(model, 48 if SUBTLE & set(broken_defense.seen_by) else 16), checks)
    raised = {finding.check for finding in examined.findings if finding.verdict != OK}
    assert raised == set(broken_defense.seen_by)
    assert all(finding.advice for finding in examined.findings)


def test_every_check_is_needed_by_a_liar():
    about_images = {"pixel range"}  # which no model can change
    assert {check.name for check in CHECKS} - {
        name for broken_defense in GALLERY for name in broken_defense.seen_by
    } == about_images


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_not_suspected(name):
    examined = examine(examination(honest(name), 16))
    assert [finding for finding in examined.findings if finding.verdict != OK] == []
    assert set(examined.not_examined) == {"averaging does no better"}
    assert len(examined.findings) == len(CHECKS) - 1


def test_the_docs_say_what_the_docstrings_say():
    page = DOCS.read_text()
    assert gallery_in_words() in page
