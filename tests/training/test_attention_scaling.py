"""AAS-AT: when scales are refreshed, what they maximize, and that they are a part of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from training_toys import FakeTraining

import vitadel
from toys import TinyNet
from vitadel.attacks.attention_scaling.factors import FactorSearch, search_factors, search_factors_as_printed
from vitadel.attacks.attention_scaling.objectives import lpips_distance
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import BeforeEpoch
from vitadel.training.plugins.attention_scaling import AttentionScaling
from vits import make_vit, pixels


def scaled_run(family: str = "vit", **settings: object) -> tuple[AttentionScaling, FakeTraining, Classifier]:
    plugin = AttentionScaling(gap=2, images=8, **settings)
    model = wrap(make_vit(family)).train()
    plugin.prepare(model)
    batches = [(pixels(family, 4, seed=k), torch.arange(4)) for k in (3, 4)]
    return plugin, FakeTraining(model, batches), model


def test_factors_begin_at_one_and_change_no_bit():
    plain = wrap(make_vit("vit"))
    x = pixels("vit")
    before = plain(x)
    AttentionScaling().prepare(plain)
    assert plain.attention_factors.tolist() == [1, 1]
    assert torch.equal(plain(x), before)
    assert "attention_factors" in plain.state_dict()


def test_a_model_that_has_factors_keeps_them():
    model = wrap(make_vit("vit"))
    model.set_attention_factors([0.5, 0.25])
    AttentionScaling().prepare(model)
    assert model.attention_factors.tolist() == [0.5, 0.25]


def test_refreshed_at_multiples_of_the_gap_only():
    plugin, run, model = scaled_run(steps=1)
    assert isinstance(plugin, BeforeEpoch)
    refreshed = []
    for run.epoch in range(6):
        before = model.attention_factors.clone()
        run.logged.clear()
        plugin.before_epoch(run)
        if not torch.equal(before, model.attention_factors):
            refreshed.append(run.epoch)
        assert bool(run.logged) == (run.epoch in (2, 4))
    assert refreshed == [2, 4]
    assert run.asked == [8, 8]


@pytest.mark.parametrize("family", ["vit", "xcit", "swin"])
def test_new_factors_are_far_from_the_model_with_the_old_ones(family):
    plugin, run, model = scaled_run(family, steps=6)
    model.set_attention_factors([0.7] * len(model.attention_factors))
    x = run.batches[0][0]

    def features() -> list[torch.Tensor]:
        with frozen(model), torch.no_grad(), vitadel.block_features(model) as seen:
            model(x)
            return [each.detach() for each in seen]

    old = features()
    run.epoch = 2
    plugin.before_epoch(run)
    refreshed = float(lpips_distance(features(), old).mean())
    start = 10 ** (
        -2 * SampleRNG.of_samples(0, [2]).stream("attention scaling").uniform(len(model.attention_factors))[0]
    )
    model.set_attention_factors(start.tolist())
    assert refreshed > 1.01 * float(lpips_distance(features(), old).mean())


def test_they_are_those_of_the_attacks_ascent_and_do_not_pile_up():
    """The second refresh finds absolute factors again: the first ones are the reference, not a start."""
    plugin, run, model = scaled_run(steps=2)
    bare = copy.deepcopy(model)
    bare.attention_factors = None
    held: float | list[float] = 1.0
    for run.epoch in (2, 4):
        plugin.before_epoch(run)
        rng = SampleRNG.of_samples(run.seed, [run.epoch]).stream("attention scaling")
        with frozen(bare):
            search = FactorSearch("ascent", steps=2, smallest=0.01)
            expected = search_factors(bare, run.batches, rng, search, held)
        assert model.attention_factors.tolist() == pytest.approx(expected, rel=1e-5)
        assert 0.01 <= min(expected) <= max(expected) <= 1
        held = model.attention_factors.tolist()


def test_the_printed_search_starts_at_the_models_factors():
    plugin, run, model = scaled_run(steps=1, search="printed", smallest=0.05)
    bare = copy.deepcopy(model)
    bare.attention_factors = None
    held: float | list[float] = 1.0
    for run.epoch in (2, 4):
        plugin.before_epoch(run)
        rng = SampleRNG.of_samples(run.seed, [run.epoch]).stream("attention scaling")
        with frozen(bare):
            expected = search_factors_as_printed(bare, run.batches, rng, 1, held, 0.05)
        assert model.attention_factors.tolist() == pytest.approx(expected, rel=1e-5)
        held = model.attention_factors.tolist()


def test_random_factors_are_new_after_every_gap_and_keyed_by_the_epoch():
    found = []
    for epochs in ((2, 4), (4,)):
        plugin, run, model = scaled_run(search="random", smallest=0.1)
        for run.epoch in epochs:
            plugin.before_epoch(run)
            found.append(model.attention_factors.tolist())
    assert found[0] != found[1]
    assert found[1] == found[2]
    assert all(0.1 <= factor <= 1 for factors in found for factor in factors)


def test_fixed_factors_stay_and_cost_no_image():
    plugin, run, model = scaled_run(search="fixed")
    run.epoch = 2
    plugin.before_epoch(run)
    assert model.attention_factors.tolist() == [1, 1]
    assert run.asked == []


def test_factors_end_at_the_bound_that_is_set_and_go_no_further():
    """From sharp attention the way leads down; long steps reach the bound."""
    for smallest in (0.2, 1e-3):
        plugin, run, model = scaled_run(steps=8, pace=3.0, smallest=smallest)
        run.epoch = 2
        plugin.before_epoch(run)
        assert float(model.attention_factors.min()) == pytest.approx(smallest, rel=1e-5)
        assert float(model.attention_factors.max()) <= 1


@pytest.mark.parametrize("smallest", [0.0, 1.0, -0.1])
def test_a_bound_that_is_none_is_refused(smallest):
    with pytest.raises(UserError, match="smallest must be between 0 and 1"):
        AttentionScaling(smallest=smallest)


def test_the_jump_of_the_loss_is_reported():
    plugin, run, model = scaled_run()
    x, y = run.batches[0]

    def loss() -> float:
        with frozen(model), torch.no_grad():
            return float(nn.functional.cross_entropy(model(x), y))

    before = loss()
    run.epoch = 2
    plugin.before_epoch(run)
    factors = model.attention_factors
    assert run.logged["loss_jump"] == pytest.approx(loss() - before, abs=1e-6)
    assert abs(run.logged["loss_jump"]) > 1e-3
    assert run.logged["scales_mean"] == pytest.approx(float(factors.mean()))
    assert run.logged["scales_min"] == pytest.approx(float(factors.min()))


def test_repeats_and_leaves_no_trace():
    found = []
    for _ in range(2):
        plugin, run, model = scaled_run(steps=1)
        held = model.attention_factors
        weights = {name: each.clone() for name, each in model.named_parameters()}
        state = torch.get_rng_state()
        run.epoch = 2
        plugin.before_epoch(run)
        found.append(model.attention_factors.tolist())
        assert model.attention_factors is held  # in place: averages and processes hold this tensor
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)
        for name, weight in model.named_parameters():
            assert weight.grad is None
            assert weight.requires_grad
            assert torch.equal(weight, weights[name])
    assert found[0] == found[1]


def test_factors_come_back_if_the_search_fails():
    plugin, run, model = scaled_run()
    run.batches.append((torch.zeros(1, 3, 7, 7), torch.zeros(1)))
    run.epoch = 2
    with pytest.raises(UserError, match="cannot be cut into patches"):
        plugin.before_epoch(run)
    assert model.attention_factors.tolist() == [1, 1]


def test_settings_and_models_it_cannot_take():
    with pytest.raises(UserError, match=r"'l2'.*lpips, eq3"):
        AttentionScaling(distance="l2")
    with pytest.raises(UserError, match=r"'best'.*ascent, grid, both, printed, random, fixed"):
        AttentionScaling(search="best")
    with pytest.raises(UserError, match="gap must be at least 1, got 0"):
        AttentionScaling(gap=0)
    with pytest.raises(UserError, match="no anatomy known"):
        AttentionScaling().prepare(wrap(TinyNet()))
    with pytest.raises(UserError, match=r"got VisionTransformer; use vitadel.wrap"):
        AttentionScaling().prepare(make_vit("vit"))
    with pytest.raises(UserError, match="pace must be a finite number above 0, got inf"):
        AttentionScaling(pace=float("inf"))
    for refuse in (AttentionScaling().check_model, AttentionScaling().prepare):
        with pytest.raises(UserError, match="VisionTransformer has no softmax attention to scale"):
            refuse(wrap(make_vit("vit", depth=0)))
    with pytest.raises(UserError, match="no anatomy known"):
        AttentionScaling().check_model(wrap(TinyNet()))
    fine = wrap(make_vit("vit"))
    AttentionScaling().check_model(fine)
    assert fine.attention_factors is None
    plugin, run, _ = scaled_run()
    run.batches.clear()
    run.epoch = 2
    with pytest.raises(UserError, match="needs training images"):
        plugin.before_epoch(run)
