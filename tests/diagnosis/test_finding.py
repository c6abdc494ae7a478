"""Verdicts must not come from luck, and every check must be explained."""

from __future__ import annotations

import pytest
import torch

from vitadel.diagnosis.doctor import CHECKS
from vitadel.diagnosis.finding import Finding, beaten, explanation_of, sign_test, surprising


def test_sign_test_counts_coin_tosses():
    assert sign_test(10, 0) == 2**-10
    assert sign_test(0, 10) == 1
    assert sign_test(2, 1) == pytest.approx(4 / 8)  # 3 + 1 of 8 outcomes have two heads or more
    assert sign_test(0, 0) == 1


def held(count: int, n: int = 100) -> torch.Tensor:
    return torch.arange(n) < count


def test_beaten_needs_both_size_and_certainty():
    assert beaten(held(60), held(40), floor=0.05)
    assert not beaten(held(40), held(60), floor=0.05)
    assert not beaten(held(60), held(51), floor=0.05)  # 9 tosses of 9: one in 512 is not rare enough
    assert not beaten(held(60), held(40), floor=0.2)  # certain, and just as large as allowed
    one_way = torch.arange(100) < 60
    other_way = torch.arange(100) >= 30  # 30 fall here alone and 40 there alone: noise, not strength
    assert not beaten(one_way, other_way, floor=0.0)


def test_surprising_takes_the_lower_end():
    assert not surprising(1, 100, 0.01)
    assert not surprising(2, 100, 0.01)  # the interval of 2 of 100 begins at 0.55 %
    assert surprising(6, 100, 0.01)
    assert not surprising(0, 100, 0.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_is_explained(check):
    told = explanation_of(check.run)
    assert min(map(len, (told.raised_if, told.why, told.what_to_do))) > 30
    assert "\n" not in told.raised_if + told.why + told.what_to_do


def test_an_explanation_has_three_paragraphs():
    def half_explained() -> None:
        """Raised if something.

        Why it matters: it does.
        """

    with pytest.raises(AssertionError, match="half_explained"):
        explanation_of(half_explained)


def test_a_finding_is_plain_data():
    finding = Finding("a check", "ok", {"n": 3}, "")
    assert finding.as_dict() == {"check": "a check", "verdict": "ok", "evidence": {"n": 3}, "advice": ""}


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
