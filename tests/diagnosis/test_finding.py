"""Verdicts must not come from chance, and every check must be explained."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from vitadel.diagnosis.checks import Finding, explanation_of
from vitadel.diagnosis.run import CHECKS
from vitadel.statistics import binomial_tail, exceeds_share, sign_test, significantly_fewer


def test_sign_test_counts_coin_tosses():
    assert sign_test(10, 0) == 2**-10
    assert sign_test(0, 10) == 1
    assert sign_test(2, 1) == pytest.approx(4 / 8)  # 3 + 1 of 8 outcomes have two heads or more
    assert sign_test(0, 0) == 1


def held(count: int, n: int = 100) -> torch.Tensor:
    return torch.arange(n) < count


def test_beaten_needs_both_size_and_certainty():
    assert significantly_fewer(held(60), held(40), floor=0.05)
    assert not significantly_fewer(held(40), held(60), floor=0.05)
    assert not significantly_fewer(held(60), held(51), floor=0.05)  # 9 tosses of 9: one in 512 is not rare enough
    assert not significantly_fewer(held(60), held(40), floor=0.2)  # certain, and just as large as allowed
    one_way = torch.arange(100) < 60
    other_way = torch.arange(100) >= 30  # 30 fall here alone and 40 there alone: noise, not strength
    assert not significantly_fewer(one_way, other_way, floor=0.0)


def test_binomial_tail():
    assert binomial_tail(2, 3, 0.5) == pytest.approx(4 / 8)
    assert binomial_tail(1, 16, 0.01) == pytest.approx(1 - 0.99**16)
    assert binomial_tail(0, 16, 0.01) == binomial_tail(3, 3, 1.0) == 1
    assert binomial_tail(1, 16, 0.0) == 0
    assert binomial_tail(5000, 10_000, 0.5) == pytest.approx(0.504, abs=1e-3)  # 10^3008 choices overflow


def test_surprise_is_one_in_a_thousand():
    for n in (16, 48, 256):
        first = next(count for count in range(n) if exceeds_share(count, n, 0.01))
        below = sum(math.comb(n, k) * 0.01**k * 0.99 ** (n - k) for k in range(first))
        assert 1 - below < 1e-3 <= 1 - below + math.comb(n, first - 1) * 0.01 ** (first - 1) * 0.99 ** (n - first + 1)
    assert not exceeds_share(1, 16, 0.01)
    assert not exceeds_share(0, 100, 0.0)
    assert exceeds_share(1, 100, 0.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.identifier)
def test_every_check_is_explained(check):
    text = explanation_of(check.run)
    assert min(map(len, (text.raised_if, text.why, text.what_to_do))) > 30
    assert "\n" not in text.raised_if + text.why + text.what_to_do


def test_an_explanation_has_three_paragraphs():
    def half_explained() -> None:
        """Raised if something.

        Why it matters: it does.
        """

    with pytest.raises(AssertionError, match="half_explained"):
        explanation_of(half_explained)


def test_a_finding_is_plain_data():
    finding = Finding("a-check", "ok", {"n": 3}, "", "A title")
    assert finding.as_dict() == {
        "check": "a-check",
        "title": "A title",
        "verdict": "ok",
        "evidence": {"n": 3},
        "advice": "",
    }


def test_findings_with_infinity_and_nan_can_be_written():
    evidence = Finding("a check", "broken", {"change": float("inf"), "per block": [1.0, float("nan")]}, "").as_dict()
    assert json.loads(json.dumps(evidence, allow_nan=False))["evidence"] == {"change": "inf", "per block": [1.0, "nan"]}


def test_names_are_unique_and_well_formed():
    for names in ({check.identifier for check in CHECKS}, {check.title for check in CHECKS}):
        assert len(names) == len(CHECKS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", check.identifier) for check in CHECKS)
