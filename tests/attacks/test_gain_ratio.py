"""What steps deliver against what gradients promised: closed forms, and the recorder of searches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from toys import Constant, TinyNet, images
from vitadel.attacks.apgd import APGD, apgd_t
from vitadel.attacks.gain_ratio import (
    GAINS,
    SCALES,
    GainRecorder,
    Outlook,
    are_broken,
    kept_promises,
    measure_gains,
    summarize_gains,
)
from vitadel.attacks.goals import OnLogits
from vitadel.attacks.losses import margin
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Scripted
from vitadel.attacks.threats import L1, L2, Linf, dual_order
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

EPS = 0.04
BALLS = [Linf(EPS), L2(0.3), L1(1.0)]


class Linear(nn.Module):
    """Two classes; the margin is a linear function of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = SampleRNG.of_samples(3, [0]).normal(3, 8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        score = (x.double() * self.weight).flatten(1).sum(1)
        return torch.stack([50 + score, -score], dim=1)


class Reversed(Linear):
    """The same function; its gradient has the opposite sign."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x.detach() - x)


class Detached(Linear):
    """The same function without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Rippled(Linear):
    """A triangle wave on every pixel, finer than the steps of an attack: slopes of 2.5 and -0.5 instead of 1."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.double() / (EPS / 16)
        return super().forward(x + 0.375 * EPS / 16 * (4 * (place - place.round()).abs() - 1))


def gray(count: int) -> Tensor:
    """Pixels away from black and white, and from the kinks of `Rippled`."""
    return 0.2013 + 0.5971 * images(count)


@pytest.mark.parametrize("threat", BALLS, ids=lambda ball: type(ball).__name__)
def test_a_linear_model_delivers_what_it_promises(threat):
    y = torch.zeros(6, dtype=torch.int64)
    gains = measure_gains(Linear(), gray(6), y, threat, tuple(scale * threat.eps / 4 for scale in SCALES))
    assert torch.allclose(gains.ratio, torch.ones(3, 6, dtype=torch.float64), atol=1e-4)


def test_the_promise_in_linf_is_the_l1_norm_of_the_gradient():
    model, y = Linear(), torch.zeros(4, dtype=torch.int64)
    gains = measure_gains(model, gray(4), y, Linf(EPS), (0.01, 0.03))
    slope = 2 * float(model.weight.abs().sum())
    expected = torch.tensor([[0.01 * slope] * 4, [0.03 * slope] * 4], dtype=torch.float64)
    assert torch.allclose(gains.promised, expected, rtol=1e-5)


def test_a_reversed_gradient_delivers_the_opposite():
    y = torch.zeros(6, dtype=torch.int64)
    gains = measure_gains(Reversed(), gray(6), y, Linf(EPS), (0.01,))
    assert torch.allclose(gains.ratio, -torch.ones(1, 6, dtype=torch.float64), atol=1e-4)


def test_a_fine_ripple_keeps_short_promises_only():
    y = torch.zeros(30, dtype=torch.int64)
    gains = measure_gains(Rippled(), gray(30), y, Linf(EPS), (EPS / 1600, EPS))
    assert gains.ratio[0].median() > 0.9
    assert gains.ratio[1].abs().median() < 0.1


@pytest.mark.parametrize(("model", "share"), [(Linear(), 1.0), (Reversed(), -1.0), (Detached(), 0.0)], ids=repr)
def test_promises_are_kept_broken_or_not_made(model, share):
    y = torch.zeros(12, dtype=torch.int64)
    kept = kept_promises(model, gray(12), y, Linf(EPS / 8))
    assert torch.allclose(kept, torch.full((12, 3), share, dtype=torch.float64), atol=1e-3)
    assert are_broken(kept) == (share <= 0)


def test_promises_end_at_the_boundary():
    model, y = Linear(), torch.zeros(4, dtype=torch.int64)
    assert torch.allclose(kept_promises(model, gray(4), y, Linf(100 * EPS)), torch.ones(1, dtype=torch.float64))
    assert kept_promises(model, gray(4), 1 - y, Linf(EPS)).isnan().all()  # misclassified


def test_no_gradient_gives_no_ratio():
    gains = measure_gains(Constant(), gray(3), torch.zeros(3, dtype=torch.int64), Linf(EPS), (0.01,))
    assert gains.ratio.isnan().all()


@pytest.mark.parametrize("threat", BALLS, ids=lambda ball: type(ball).__name__)
@pytest.mark.parametrize("search", ["pgd", "apgd"])
def test_a_recorder_sees_the_steps_of_a_search(threat: Threat, search: str):
    """On a linear model every step delivers its promise, whatever the search; nothing is fooled at this distance."""
    x, y, rng = gray(5), torch.zeros(5, dtype=torch.int64), SampleRNG.of_samples(0, range(5))
    gains = GainRecorder.of(threat, x)
    if search == "pgd":
        lengths = (2.0, 1.0, 0.2, 0.05, 0.02)
        PGD(threat, OnLogits(margin), Scripted(lengths), len(lengths)).search(Linear(), x, y, rng, gains)
    else:
        APGD(threat, OnLogits(margin), 12).search(Linear(), x, y, rng, gains=gains)
    steps, failed, wild, ratio, promised, delivered = gains.sums.sum((1, 2)).unbind(1)
    assert (steps >= 1).all()
    assert (steps <= 12).all()
    assert (failed == 0).all()
    assert (wild == 0).all()
    assert torch.allclose(ratio, steps, atol=1e-2)
    assert torch.allclose(promised, delivered, rtol=1e-3)


def test_steps_are_sorted_by_their_length():
    x, y, rng = gray(4), torch.zeros(4, dtype=torch.int64), SampleRNG.of_samples(0, range(4))
    gains = GainRecorder.of(Linf(EPS), x)
    attack = PGD(Linf(EPS), OnLogits(margin), Scripted((0.0625, 0.0625, 0.25, 1.0, 0.0)), 5, random_start=False)
    attack.search(Linear(), x, y, rng, gains)
    assert gains.sums[:, 0, :, 0].tolist() == [[2.0, 1.0, 1.0]] * 4
    assert not gains.sums[:, 1].any()


def test_a_recorder_costs_no_pass_and_changes_nothing():
    model, x, rng = TinyNet(4).eval(), images(20), SampleRNG.of_samples(0, range(20))
    y = model(x).argmax(1)
    for attack in (PGD(Linf(0.02), steps=6), APGD(Linf(0.02), steps=10)):
        runs = []
        for gains in (None, GainRecorder.of(Linf(0.02), x)):
            with count_passes(model) as cost:
                runs.append((attack.search(model, x, y, rng, gains=gains), cost))
        (plain, cheap), (recorded, dear) = runs
        plain, recorded = (run[0] if isinstance(run, tuple) else run for run in (plain, recorded))
        assert torch.equal(plain, recorded)
        assert cheap == dear


def test_the_recorder_agrees_with_an_independent_sum():
    """Gains of PGD on a bent model, recomputed from its iterates."""
    model, x, rng = TinyNet(4).eval(), images(6), SampleRNG.of_samples(0, range(6))
    y, ball, seen = model(x).argmax(1), Linf(0.03), []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits)
        return margin(logits, labels)

    gains = GainRecorder.of(ball, x)
    PGD(ball, OnLogits(loss), Scripted((1.0,) * 5), 5, stop_when_fooled=False).search(model, x, y, rng, gains)
    values = torch.stack([margin(logits.detach(), y).double() for logits in seen])
    changes = values.diff(dim=0)
    assert math.isclose(float(gains.sums[..., 5].sum()), float(changes.sum()), abs_tol=0.2 * float(changes.abs().sum()))
    assert (gains.sums[..., 0].sum((1, 2)) <= 4).all()


def test_a_step_to_another_loss_does_not_count():
    x, y, rng = gray(4), torch.zeros(4, dtype=torch.int64), SampleRNG.of_samples(0, range(4))
    for changes, steps in (((), 4), ((2,), 3)):
        gains = GainRecorder.of(Linf(EPS), x, changes)
        attack = PGD(Linf(EPS), OnLogits(margin), Scripted((0.1,) * 5), 5, random_start=False)
        attack.search(Linear(), x, y, rng, gains)
        assert (gains.sums[..., 0].sum((1, 2)) == steps).all()


def test_a_summary_has_scales_and_points():
    x, y, rng = gray(4), torch.zeros(4, dtype=torch.int64), SampleRNG.of_samples(0, range(4))
    attack = PGD(Linf(EPS), OnLogits(margin), Scripted((0.0625, 0.25, 0.25, 0.0)), 4, random_start=False)
    z, info = attack.run_with_info(Linear(), x, y, rng)
    assert torch.equal(z, attack(Linear(), x, y, rng))
    summary = summarize_gains(info[GAINS])
    assert [(row["length"], row["steps"]) for row in summary["free"]] == [(0.0625, 4), (0.25, 8)]
    assert all(abs(row["median_ratio"] - 1) < 1e-3 for row in summary["free"])
    assert summary["cornered"] == []
    assert all(math.isclose(promised, delivered, rel_tol=1e-3) for promised, delivered in summary["points"])


def test_targets_add_up_their_steps():
    model, x, rng = TinyNet(4).eval(), images(6), SampleRNG.of_samples(0, range(6))
    y = model(x).argmax(1)
    one, three = (
        apgd_t(Linf(1e-4), steps=5, targets=count).run_with_info(model, x, y, rng)[1][GAINS] for count in (1, 3)
    )
    assert (three[..., 0].sum((1, 2)) > one[..., 0].sum((1, 2))).all()


@pytest.mark.parametrize(
    ("first", "second", "chance"),
    [
        (-9.0, -8.5, False),  # half of the promise of 1 was kept, and 21 times as much as can still be had is missing
        (-9.0, -7.9, True),  # not quite 20 times as much
        (-10.6, -8.5, True),  # more than twice the promise was delivered, so it is not believed
    ],
)
def test_a_sample_far_beyond_what_is_promised_has_no_chance(first: float, second: float, chance: bool):
    """One pixel with a gradient of 20: in a ball of 0.05 it promises 1 from the image, and 0.4 from 0.03 above it."""
    x = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    grad, place = torch.full_like(x, 20.0), torch.tensor([0])
    outlook = Outlook.of(Linf(0.05), x, 20.0)
    assert outlook.has_chance(place, torch.tensor([first], dtype=torch.float64), grad, x, x).item()
    second_value = torch.tensor([second], dtype=torch.float64)
    assert outlook.has_chance(place, second_value, grad, x + 0.03, x).item() is chance


def test_without_a_gradient_or_outside_the_ball_nothing_is_known():
    """At 0.15 in a ball of 0.05 the way back costs 2, so the promise is negative; a step that lost 5 kept it."""
    x = torch.full((2, 1, 1, 1), 0.5, dtype=torch.float64)
    outlook, place = Outlook.of(Linf(0.05), x, 20.0), torch.arange(2)
    z = x + torch.tensor([0.0, 0.15]).view(2, 1, 1, 1)
    grad = torch.tensor([0.0, 20.0], dtype=torch.float64).view(2, 1, 1, 1)
    for value in (-9.0, -14.0):
        assert outlook.has_chance(place, torch.tensor([value, value], dtype=torch.float64), grad, z, x).all()


@pytest.mark.parametrize(("wall", "slope"), [(1.0, 20.0), (0.0, -20.0)])
def test_pixels_that_are_black_or_white_promise_nothing(wall: float, slope: float):
    """Two pixels with a gradient of 20, one of them at its end already: in a ball of 0.05 the other one promises 1."""
    x = torch.tensor([wall, 0.5], dtype=torch.float64).view(1, 1, 1, 2)
    grad, place = torch.full_like(x, slope), torch.tensor([0])
    for first, second, chance in ((-31.0, -30.5, False), (-30.0, -29.5, True)):
        outlook = Outlook.of(Linf(0.05), x, 30.0)
        assert outlook.has_chance(place, torch.tensor([first], dtype=torch.float64), grad, x, x).item()
        second_value = torch.tensor([second], dtype=torch.float64)
        assert outlook.has_chance(place, second_value, grad, x, x).item() is chance


class Centered(Linear):
    """A linear model whose boundary runs through the gray image."""

    def forward(self, x: Tensor) -> Tensor:
        score = ((x.double() - 0.5) * self.weight).flatten(1).sum(1)
        return torch.stack([score, -score], dim=1)


@pytest.mark.parametrize(("threat", "share"), [(Linf(EPS), 0.5), (L2(0.3), 0.5), (L1(1.0), 0.9)])
def test_the_outlook_saves_the_passes_of_samples_that_are_out_of_reach(threat: Threat, share: float):
    """Of a linear model; what is broken without it is broken with it. In L1 APGD starts in larger balls."""
    model, x = Centered(), 0.4 + 0.2 * images(40).double()
    y = model(x).argmax(1)
    distance = -margin(model(x), y) / (2 * torch.linalg.vector_norm(model.weight, ord=dual_order(threat)))
    threat = replace(threat, eps=float(distance.median()))
    attack, found, costs = APGD(threat, OnLogits(margin), 20), [], []
    for outlook in (None, Outlook.of(threat, x, 20.0)):
        with count_passes(model) as cost:
            z, _ = attack.search(model, x, y, SampleRNG.of_samples(0, range(40)), outlook=outlook)
        found.append(model(z).argmax(1) != y)
        costs.append(cost.gradients)
    assert 10 < int(found[0].sum()) < 30
    assert torch.equal(*found)
    assert costs[1] < share * costs[0]
