"""What `autoattack-fast` expects of its later stages: features in closed form, and samples that are given up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images, trained_toy
from vitadel.attacks.autoattack.best_points import Progress
from vitadel.attacks.autoattack.fast import AutoAttackFast
from vitadel.attacks.autoattack.prospects import FEATURES, INTERCEPT, WEIGHTS, chance_of, features_of
from vitadel.attacks.parse import make
from vitadel.attacks.per_sample import SampleInfo
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat


class Linear(nn.Module):
    """Three classes by the mean of the pixels; the logits of the second and third fall behind by `gaps`."""

    def forward(self, x: Tensor) -> Tensor:
        level = x.double().mean((1, 2, 3))
        return torch.stack([torch.zeros_like(level), level - 0.6, 0.5 * (level - 0.9)], dim=1)


def searched(fast: AutoAttackFast, model: nn.Module, x: Tensor, y: Tensor, rows: range) -> dict[str, Tensor]:
    return fast.search.run_with_info(model, x[rows], y[rows], SampleRNG.of_samples(0, rows))[1]


def test_features_are_logarithms_of_known_ratios():
    logits = torch.tensor([[2.0, 1.0, -2.0, 0.5]])
    searches = [
        Progress(torch.tensor([half]), torch.tensor([end])) for half, end in ((-3, -3.0), (-1.8, -1.5), (-1.2, -1))
    ]
    found = features_of(torch.tensor([0.25]), logits, torch.tensor([0]), searches, Linf(0.1))
    expected = [math.log(0.25), math.log(1.2), math.log(3), math.log(1.5), 0]
    assert found[0].tolist() == pytest.approx(expected)
    two = features_of(torch.tensor([0.25]), logits[:, :2], torch.tensor([0]), searches, L1(1.0))
    assert two[0, 3:].tolist() == [0, 1]  # there is no second rival; in L1


def test_the_distance_of_a_linear_model_is_exact():
    """In Linf the level rises by eps at most, so 0.1 - eps is missing of it."""
    x, y = torch.full((2, 3, 4, 4), 0.5), torch.zeros(2, dtype=torch.int64)
    info = searched(AutoAttackFast(Linf(0.04), least_chance=0.0), Linear(), x, y, range(2))
    assert info["features"][:, 0].exp().tolist() == pytest.approx([0.06 / 0.04] * 2, rel=1e-4)
    assert info["features"][:, 2].tolist() == pytest.approx([0.0] * 2, abs=1e-4)  # all runs end in the same corner
    # Half of the gap between level and 0.9, against the gap to 0.6.
    assert info["features"][:, 3].exp().tolist() == pytest.approx([0.5 * 0.36 / 0.06] * 2, rel=1e-4)


def test_chances_are_a_logistic_function_that_falls_with_the_distance():
    distances = torch.tensor([0.01, 0.1, 1.0, 10.0], dtype=torch.float64)
    features = torch.zeros(4, len(FEATURES), dtype=torch.float64)
    features[:, 0] = distances.log()
    chance = chance_of(features)
    assert (chance.diff() < 0).all()
    assert float(chance[2]) == pytest.approx(1 / (1 + math.exp(-INTERCEPT)))
    assert float(chance[3]) == pytest.approx(1 / (1 + math.exp(-INTERCEPT - WEIGHTS[0] * math.log(10))))


@pytest.mark.parametrize(("ball", "steps", "ends"), [(Linf(1e-4), 8, 8), (L2(1e-3), 8, 8), (L1(1e-2), 16, 29)])
def test_a_sample_that_is_given_up_costs_a_few_runs(ball, steps, ends):
    """No more than whole runs: APGD in L1, seven times, has a check of its start and the ends of three phases.

    Six of them go towards classes, and end where the linear model leaves no chance: in Linf after the second gradient.
    """
    model, x = TinyNet(6).eval(), images(30)
    y = model(x).argmax(1)
    fast = AutoAttackFast(ball, least_chance=1.0, audited_share=0.0)
    with count_passes(model) as cost:
        info = searched(fast, model, x, y, range(30))
    assert info["given_up"].all()
    assert not info["audited"].any()
    most = 20 + 20 + 5 * steps + 10 + 1  # the last one is for the decision
    assert cost.gradients < 0.8 * 30 * most
    assert cost.forwards <= 30 * (1 + ends)  # the clean image, and the last point of each run
    if isinstance(ball, Linf):
        assert cost.gradients == 30 * (20 + 20 + 6 * 2 + 1)
        assert cost.forwards == 30 * (1 + 2)


def test_what_is_audited_is_drawn_by_the_lot_of_the_sample_and_attacked_to_the_end():
    model, x = TinyNet(6).eval(), images(200)
    y = model(x).argmax(1)
    short = {"entropy_steps": 1, "margin_steps": 2, "targets": 2, "target_steps": 1, "best_targets": 1, "best_steps": 1}
    fast = AutoAttackFast(Linf(1e-4), least_chance=1.0, **short)
    whole = searched(fast, model, x, y, range(200))
    lots = SampleRNG.of_samples(0, range(200)).stream("lots").uniform(2)[:, 1]
    assert torch.equal(whole["audited"], whole["given_up"] & (lots < 0.08))
    parts = [searched(fast, model, x, y, rows) for rows in (range(90), range(90, 200))]
    for name in ("given_up", "audited", "fell_in", "restarts"):
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))


@pytest.mark.slow
def test_an_audited_sample_gets_what_the_whole_search_gives_it():
    model, x = TinyNet(6, 1).eval(), images(60, 1)
    y = model(x).argmax(1)
    ball = Linf(0.012)
    whole = searched(AutoAttackFast(ball, least_chance=0.0), model, x, y, range(60))
    audited = searched(AutoAttackFast(ball, least_chance=1.0, audited_share=1.0), model, x, y, range(60))
    assert not whole["given_up"].any()
    for name in ("fell_in", "missing", "restarts", "margin"):
        assert torch.equal(whole[name], audited[name])
    skipped = searched(AutoAttackFast(ball, least_chance=1.0, audited_share=0.0), model, x, y, range(60))
    assert torch.equal(skipped["given_up"], audited["given_up"])
    assert (skipped["missing"][skipped["given_up"]] >= 0.06).all()
    assert (skipped["fell_in"][skipped["given_up"]] == -1).all()
    rest = ~skipped["given_up"]
    assert rest.any()
    assert torch.equal(skipped["fell_in"][rest], whole["fell_in"][rest])


def test_a_sample_without_a_gradient_is_never_given_up():
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2) + 0 * x.sum()

    x, y = images(3), torch.zeros(3, dtype=torch.int64)
    fast = AutoAttackFast(Linf(0.1), 1, 2, 1, 1, 1, 1, least_chance=1.0, audited_share=0.0)
    assert not searched(fast, Flat(), x, y, range(3))["given_up"].any()


@pytest.mark.parametrize("name", ["least_chance", "audited_share", "most_missed"])
def test_shares_outside_0_and_1_are_refused(name):
    with pytest.raises(UserError, match=f"{name} of autoattack-fast must lie between 0 and 1, got 1.5"):
        AutoAttackFast(Linf(0.1), **{name: 1.5})


@pytest.mark.parametrize("patience", [0, 0.0, -1, -1.0, math.nan])
def test_a_patience_that_is_not_positive_is_refused(patience):
    with pytest.raises(UserError, match="patience of autoattack-fast must be above 0, got"):
        AutoAttackFast(Linf(0.1), patience=patience)


def test_with_endless_patience_all_runs_take_all_their_steps():
    model, x = TinyNet(6).eval(), images(20)
    y = model(x).argmax(1)
    costs = []
    for patience in (math.inf, 30.0):
        fast = AutoAttackFast(Linf(1e-4), least_chance=1.0, audited_share=0.0, patience=patience)
        with count_passes(model) as cost:
            searched(fast, model, x, y, range(20))
        costs.append(cost.gradients)
    assert costs == [20 * (20 + 20 + 5 * 8 + 10 + 1), 20 * (20 + 20 + 6 * 2 + 1)]


class RowByRow(nn.Module):
    """A model that rounds each image in the same way, whatever the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(row[None]) for row in x])


@pytest.mark.parametrize("ball", [Linf(0.05), L2(0.4), L1(3.0)])
def test_where_runs_end_depends_on_each_sample_only(ball: Threat):
    """In other batches, and another order, every sample takes the same passes and ends at the same point."""
    toy, x, y = trained_toy()
    model, order = RowByRow(toy), torch.randperm(20, generator=torch.Generator().manual_seed(0))
    few = {"entropy_steps": 2, "margin_steps": 3, "targets": 2, "best_targets": 1, "best_steps": 20, "reaches": ()}
    fast = AutoAttackFast(ball, least_chance=0.0, **few)

    def run(rows: Tensor, fast: AutoAttackFast = fast) -> tuple[Tensor, SampleInfo, int]:
        with count_passes(model) as cost:
            found, info = fast.search.run_with_info(model, x[rows], y[rows], SampleRNG.of_samples(0, rows))
        return found, info, cost.gradients

    found, info, gradients = run(torch.arange(20))
    assert gradients < 0.99 * run(torch.arange(20), replace(fast, patience=math.inf))[2]
    parts = [run(rows) for rows in order.split(7)]
    assert gradients == sum(count for *_, count in parts)
    assert torch.equal(found[order], torch.cat([part for part, *_ in parts]))
    for name in ("fell_in", "margin", "missing"):
        assert torch.equal(info[name][order], torch.cat([part[name] for _, part, _ in parts]))


def test_the_whole_search_has_a_name():
    assert make("autoattack-fast(least_chance=0)", eps=0.1, norm="linf").least_chance == 0
    assert make("autoattack-fast(most_missed=0)", eps=0.1, norm="linf").most_missed == 0
