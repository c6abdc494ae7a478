"""Agreement by hand, and chance by going through every deal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from vitadel.reporting.kinds.study_perturbations import against_chance
from vitadel.studies.agreement import agreement, chance, permuted_agreement, top_classes, top_of


def test_counted_by_hand():
    tops = np.array([[0, 1], [2, 0], [1, 2], [0, 2]])
    reported = agreement(tops, np.array([0, 0, 0, 1]))
    assert (reported["top1"]["right"], reported["top1"]["n"], reported["top1"]["accuracy"]) == (1, 4, 0.25)
    assert (reported["topk"]["right"], reported["topk"]["accuracy"]) == (2, 0.5)


def test_equal_logits_have_one_order_and_the_first_is_argmax():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert top_classes(logits, 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    assert top_classes(logits, 1)[:, 0].tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("k", [1, 2])
def test_moments_are_those_of_all_deals(k):
    chosen = np.random.default_rng(k)
    tops = np.stack([chosen.permutation(4)[:k] for _ in range(6)])
    targets = np.array([0, 0, 0, 1, 2, 3])
    every = [(tops == targets[list(deal), None]).any(1).mean() for deal in itertools.permutations(range(6))]
    reported = permuted_agreement(tops, targets, 4)["topk"]
    assert reported["accuracy"] == pytest.approx(np.mean(every))
    half = 1.959963984540054 * np.std(every)
    assert reported["ci95"] == pytest.approx([max(0, np.mean(every) - half), min(1, np.mean(every) + half)])


def test_one_answer_to_everything_is_never_more_than_chance():
    """It scores the share of its class however the pictures are dealt: accuracy 2/3 here is no agreement at all."""
    tops, targets = np.zeros((6, 1), int), np.array([0, 0, 0, 0, 1, 2])
    reported = permuted_agreement(tops, targets, 3)["top1"]
    assert reported["accuracy"] == agreement(tops, targets)["top1"]["accuracy"] == pytest.approx(2 / 3)
    assert reported["ci95"] == pytest.approx([2 / 3, 2 / 3], abs=1e-6)


def test_few_pictures_and_few_classes():
    assert permuted_agreement(np.empty((0, 2), int), np.empty(0, int), 3)["topk"]["ci95"] == [0.0, 1.0]
    assert permuted_agreement(np.array([[1]]), np.array([1]), 3)["top1"]["accuracy"] == 1.0
    assert [top_of(classes) for classes in (2, 3, 5, 6, 1000)] == [1, 2, 4, 5, 5]
    assert chance(10) == {"top1": 0.1, "topk": 0.5}


def test_rounding_decides_nothing():
    """With one answer to everything and 5 balanced classes, means of shares come out a bit below a fifth."""
    for n in range(5, 200, 5):
        reported = permuted_agreement(np.zeros((n, 1), int), np.arange(n) % 5, 5)["top1"]
        assert against_chance({"accuracy": 0.2}, reported) == "no more than chance"
