"""`autoattack-fast`: its losses, its bookkeeping, and that it finds what full-length runs find."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from toys import Constant, TinyNet, images
from vitadel.attacks.apgd import apgd_ce, apgd_t
from vitadel.attacks.autoattack.fast import STAGES, AutoAttackFast, _two_phases
from vitadel.attacks.losses import probability_margin
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import WorstOf
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.runtime.rng import SampleRNG


def logits_of(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_margin_is_a_weighted_mix_of_two_cross_entropies():
    """d(p_rival - p_y) = p_y dCE(y) + p_rival d log p_rival, exactly."""
    logits, y = logits_of(0).requires_grad_(), torch.tensor([0, 1, 2, 3, 4, 0])
    (slope,) = torch.autograd.grad(probability_margin(logits, y).sum(), logits)
    p = logits.softmax(1).detach()
    rival = p.scatter(1, y[:, None], -1).argmax(1)
    logs = logits.log_softmax(1)
    own, other = p.gather(1, y[:, None])[:, 0], p.gather(1, rival[:, None])[:, 0]
    mix = -own * logs.gather(1, y[:, None])[:, 0] + other * logs.gather(1, rival[:, None])[:, 0]
    (expected,) = torch.autograd.grad(mix.sum(), logits)
    assert torch.allclose(slope, expected, atol=1e-14)


@pytest.mark.parametrize("part", ["margin", "label", "rival"])
def test_large_logits_keep_a_gradient(part):
    logits = logits_of(1, 300.0).float().requires_grad_()
    y = logits.argmax(1)
    (slope,) = torch.autograd.grad(probability_margin(logits, y, part).sum(), logits)
    assert (slope.abs().amax(1) > 1e-3).all()
    raw = logits.softmax(1).gather(1, y[:, None]).sum()
    assert (torch.autograd.grad(raw, logits)[0].abs().amax(1) < 1e-6).any()  # which plain probabilities have lost


def test_both_sides_add_up():
    logits, y = logits_of(2), torch.tensor([0, 1, 2, 3, 4, 0])
    parts = probability_margin(logits, y, "rival") + probability_margin(logits, y, "label")
    assert torch.allclose(parts, probability_margin(logits, y))


def test_two_phases_fall_from_twice_eps_and_start_again():
    value, lengths = _two_phases(40, "label")
    assert len(lengths) == 40
    assert lengths[0] == lengths[16] == 2.0
    assert all(a > b for k, (a, b) in enumerate(pairwise(lengths)) if k != 15)
    assert min(lengths) > 0
    logits, y, place = logits_of(3), torch.zeros(6, dtype=torch.int64), torch.arange(6)
    assert torch.equal(value(logits, y, place, 15 / 40), probability_margin(logits, y, "label"))
    assert torch.equal(value(logits, y, place, 16 / 40), probability_margin(logits, y))


@pytest.mark.slow
@pytest.mark.parametrize(("ball", "seed"), [(Linf(0.02), 0), (Linf(0.01), 1), (L2(0.15), 0), (L1(1.0), 0)])
def test_finds_what_full_runs_find(ball, seed):
    model, x = TinyNet(6, seed).eval(), images(60, seed)
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(60))
    with count_passes(model) as cheap:
        fast = judge(model, ball, x, AutoAttackFast(ball)(model, x, y, rng), y)
    with count_passes(model) as dear:
        full = judge(model, ball, x, WorstOf((apgd_ce(ball), apgd_t(ball, targets=5)))(model, x, y, rng), y)
    assert not fast.void.any()
    assert 0 < int(full.held.sum()) < 60
    assert not (fast.held & ~full.held).any()
    assert 1.3 * (2 * cheap.gradients + cheap.forwards) < 2 * dear.gradients + dear.forwards


def test_notes_say_when_each_sample_fell():
    model, x = TinyNet(5).eval(), images(80)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 5
    ball = Linf(0.015)
    z, notes = AutoAttackFast(ball).run_with_info(model, x, y, SampleRNG.of_samples(0, range(80)))
    held = judge(model, ball, x, z, y).held
    fell = notes["fell_in"]
    assert torch.equal(fell < 0, held)
    assert fell[0] == STAGES.index("clean")
    assert torch.equal(z[0], x[0])
    assert fell.max() < len(STAGES)
    assert notes["missing"][held].isfinite().all()
    assert torch.equal(notes["restarts"] > 0, notes["missing"] < 0.3)
    assert torch.equal(notes["restarts"] == 7, notes["missing"] < 0.06)
    assert notes["missing"][held].min() > -1e-6  # what stands has not crossed the boundary
    before = (fell < 0) | (fell > STAGES.index("restarts"))
    assert torch.equal(notes["far"], before & (notes["restarts"] < 7))
    assert not (notes["sentinel"] & (fell >= 0) & (fell < STAGES.index("sentinel"))).any()


def test_who_is_watched_is_drawn_before_anything_is_known():
    x = images(400)
    rng = SampleRNG.of_samples(0, range(400))
    small = AutoAttackFast(Linf(1e-5), 1, 2, 2, 1, 1, 1, sentinel_steps=1, sentinel_queries=1)
    seen = []
    for seed in (0, 1):
        model = TinyNet(4, seed).eval()
        y = model(x).argmax(1)
        notes = small.run_with_info(model, x, y, rng)[1]
        seen.append((notes["sentinel"], notes["kept_alive"]))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert 20 <= int(seen[0][0].sum()) <= 60  # a tenth of 400, within four standard deviations
    assert 5 <= int(seen[0][1].sum()) <= 38  # a twentieth


def test_a_model_without_slope_is_noticed():
    x, y = images(5), torch.zeros(5, dtype=torch.int64)
    _, notes = AutoAttackFast(Linf(0.1)).run_with_info(Constant(), x, y, SampleRNG.of_samples(0, range(5)))
    assert notes["missing"].isinf().all()


class Rounded(nn.Module):
    """Pixels rounded to 9 levels before a model with slopes: gradients are zero almost everywhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x * 8).round() / 8)


def test_sentinels_break_what_gradients_cannot_see():
    model, x = Rounded(TinyNet(4).eval()), images(200)
    y = model(x).argmax(1)
    _, notes = AutoAttackFast(Linf(0.1)).run_with_info(model, x, y, SampleRNG.of_samples(0, range(200)))
    watched = notes["sentinel"]
    fell = (notes["fell_in"] == STAGES.index("sentinel")) & watched
    assert int(watched.sum()) > 5
    assert int(fell.sum()) > 0


def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match="target_steps of autoattack-fast must be at least 1, got 0"):
        AutoAttackFast(Linf(0.1), target_steps=0)
