from __future__ import annotations

import itertools

import pytest
import torch

from vitadel.data import balanced_subset
from vitadel.errors import UserError

LABELS = torch.arange(100) % 7


def test_the_choice_is_pinned() -> None:
    """Written down once; a change here would silently change every audit with --limit."""
    assert balanced_subset(LABELS, 10, seed=0).tolist() == [5, 9, 27, 36, 38, 69, 75, 88, 94, 98]
    assert balanced_subset(LABELS, 10, seed=1).tolist() == [5, 11, 15, 30, 34, 56, 63, 65, 66, 89]


@pytest.mark.parametrize("limit", [1, 3, 7, 10, 50, 69, 99])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_as_many_as_asked_for_sorted_unique_and_balanced(limit: int, seed: int) -> None:
    chosen = balanced_subset(LABELS, limit, seed)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    counts = LABELS[chosen].bincount(minlength=7)
    assert int(counts.sum()) == limit
    assert int(counts.max() - counts.min()) <= 1


def test_a_class_that_runs_out_is_made_up_for_by_the_others() -> None:
    labels = torch.tensor([0] * 50 + [3] * 2 + [5] * 50)  # gaps in the numbering are no classes
    counts = labels[balanced_subset(labels, 42, seed=4)].bincount(minlength=6)
    assert counts.tolist() == [20, 0, 0, 2, 0, 20]
    assert sorted(labels[balanced_subset(labels, 7, seed=4)].bincount().tolist()) == [0, 0, 0, 2, 2, 3]


def test_larger_limits_contain_smaller_ones() -> None:
    sets = [set(balanced_subset(LABELS, limit, seed=2).tolist()) for limit in range(1, 100)]
    assert all(small < large for small, large in itertools.pairwise(sets))


def test_no_limit_or_a_large_one_takes_all() -> None:
    for limit in (None, 100, 10**9):
        assert balanced_subset(LABELS, limit, seed=0).tolist() == list(range(100))


def test_seeds_differ_and_every_sample_has_its_chance() -> None:
    taken = torch.zeros(100)
    for seed in range(400):
        taken[balanced_subset(LABELS, 20, seed)] += 1
    # Binomial with n = 400 and p = 0.2 (up to the one more or less in a class): mean 80, deviation 8.
    assert 45 < taken.min() < taken.max() < 115


def test_which_classes_get_one_more_depends_on_the_seed() -> None:
    more = torch.zeros(7)
    for seed in range(140):
        more += LABELS[balanced_subset(LABELS, 8, seed)].bincount(minlength=7) - 1
    assert int(more.sum()) == 140
    assert int(more.min()) > 5


def test_leaving_samples_out_moves_no_other() -> None:
    """Only the places of the missing ones are refilled, since the draw belongs to the stable index."""
    full = balanced_subset(LABELS, 28, seed=3)
    missing = int(full[5])
    index = torch.tensor([i for i in range(100) if i != missing])
    rest = balanced_subset(LABELS[index], 28, 3, index)
    assert missing not in rest.tolist()
    assert len(set(full.tolist()) - set(rest.tolist())) == 1
    assert LABELS[rest].bincount().tolist() == [4] * 7


def test_the_answer_does_not_depend_on_torchs_generator() -> None:
    torch.manual_seed(1)
    first = balanced_subset(LABELS, 30, seed=9)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, balanced_subset(LABELS, 30, seed=9))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_below_one_is_a_user_error(limit: int) -> None:
    with pytest.raises(UserError, match=f"at least 1, got {limit}"):
        balanced_subset(LABELS, limit, seed=0)
