"""`autoattack-fast`: its losses, its bookkeeping, and that it finds what full-length runs find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from toys import Constant, TinyNet, images, trained_toy
from vitadel.attacks.apgd import apgd_ce, apgd_t
from vitadel.attacks.autoattack.fast import STAGES, AutoAttackFast, giving_up_nothing
from vitadel.attacks.autoattack.fast_search import _two_phases
from vitadel.attacks.autoattack.sentinel_probe import Probe
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.gain_ratio import KINDS, SCALES, TERMS
from vitadel.attacks.losses import probability_margin
from vitadel.attacks.parse import make
from vitadel.attacks.per_sample import SampleInfo
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import Stage, StageResult, WorstOf, next_stage
from vitadel.diagnosis.gallery.pixels import triangle
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.instrument.attention import attention_maps, scaled_attention
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat
from vits import make_vit, pixels


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


@pytest.mark.slow
def test_notes_say_when_each_sample_fell():
    model, x = TinyNet(5).eval(), images(80)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 5
    ball = Linf(0.015)
    whole = AutoAttackFast(ball, least_chance=0.0)  # far samples that are given up get no restarts
    z, notes = whole.run_with_info(model, x, y, SampleRNG.of_samples(0, range(80)))
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
    square = notes["square_margin"]
    assert int((~square.isnan()).sum()) == min(40, int((before | (fell == STAGES.index("sentinel"))).sum()))
    assert not ((~square.isnan()) & (fell >= 0) & (fell < STAGES.index("sentinel"))).any()


def test_far_samples_are_drawn_before_anything_is_known():
    x = images(400)
    rng = SampleRNG.of_samples(0, range(400))
    small = AutoAttackFast(
        Linf(1e-5), 1, 2, 2, 1, 1, 1, sentinel_steps=1, sentinel_queries=1, escalate=False, least_chance=0.0
    )
    seen = []
    for seed in (0, 1):
        model = TinyNet(4, seed).eval()
        y = model(x).argmax(1)
        seen.append(small.run_with_info(model, x, y, rng)[1]["kept_alive"])
    assert torch.equal(*seen)
    assert 5 <= int(seen[0].sum()) <= 38  # a twentieth of 400, within four standard deviations


@pytest.mark.slow
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


def short(threat: Threat) -> WorstOf:
    return autoattack(threat, steps=10, targets=2, queries=300)


@pytest.mark.slow
def test_masked_gradients_are_noticed_and_all_of_autoattack_runs():
    model, x = Rounded(TinyNet(4).eval()), images(60)
    y, rng = model(x).argmax(1), SampleRNG.of_samples(0, range(60))
    fast = AutoAttackFast(Linf(0.1), ensemble=short)
    z, notes = fast.run_with_info(model, x, y, rng)
    assert int((notes["fell_in"] == STAGES.index("sentinel")).sum()) > 0
    assert int((notes["fell_in"] == STAGES.index("escalation")).sum()) > 0
    held = judge(model, Linf(0.1), x, z, y).held
    assert torch.equal(held, notes["fell_in"] < 0)
    only = judge(model, Linf(0.1), x, short(Linf(0.1))(model, x, y, rng), y).held
    assert int(held.sum()) <= int(only.sum())  # as low as the ensemble that it escalates to
    alone = replace(fast, escalate=False).run_with_info(model, x, y, rng)[1]["fell_in"]
    assert torch.equal(
        alone[notes["fell_in"] != STAGES.index("escalation")],
        notes["fell_in"][notes["fell_in"] != STAGES.index("escalation")],
    )
    assert (alone[notes["fell_in"] == STAGES.index("escalation")] < 0).all()


class Rippled(nn.Module):
    """Pixels with a triangle wave, 2/255 wide, before a model: half of all gradients point back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(triangle(2, 1.5)(x))


@pytest.mark.slow
def test_given_up_samples_of_a_masked_model_get_all_of_autoattack():
    """The gradients point nowhere, so nearly all samples seem far from every boundary."""
    toy, x, y = trained_toy()
    model, ball = Rippled(toy), Linf(0.05)
    right = (model(x[:100]).argmax(1) == y[:100]).nonzero()[:, 0]
    x, y, rng = x[right], y[right], SampleRNG.of_samples(0, range(len(right)))
    z, notes = AutoAttackFast(ball, ensemble=short).run_with_info(model, x, y, rng)
    held = judge(model, ball, x, z, y).held
    by_escalation = notes["fell_in"] == STAGES.index("escalation")
    assert notes["given_up"].double().mean() > 0.9
    assert int((notes["given_up"] & by_escalation).sum()) > 5
    assert not (held & ~judge(model, ball, x, short(ball)(model, x, y, rng), y).held).any()


def drive(
    fast: AutoAttackFast, fooled: Callable[[Stage], Tensor], n: int, probed: SampleInfo | None = None, **info: Tensor
) -> list[Stage]:
    """The stages that follow from invented results; `info` is that of the search, `probed` that of the probe."""
    rng, seen, result = SampleRNG.of_samples(0, range(n)), [], None
    stages = fast.stages(rng)
    margins = torch.full((n,), -1.0, dtype=torch.float64)
    known = {"fell_in": torch.full((n,), -1), "missing": margins + 2, "margin": margins, **info}
    while (stage := next_stage(stages, result)) is not None:
        seen.append(stage)
        sentinels = {"square_margin": margins[stage.places] - 1}
        again = {name: values[stage.places] for name, values in known.items()}
        reported = {"search": known, "audit": again, "whole-search": again, "probe": probed or {}}.get(
            stage.name, sentinels
        )
        result = StageResult(stage.places, fooled(stage), reported)
    return seen


def nothing(stage: Stage) -> Tensor:
    return torch.zeros(len(stage.places), dtype=torch.bool)


def test_sentinels_are_forty_samples_or_all_or_one_in_25():
    fast = AutoAttackFast(Linf(0.1))
    for n, expected in ((12, 12), (40, 40), (1000, 40), (2000, 80)):
        stages = drive(fast, nothing, n)
        assert len(stages[1].places) == expected
        names = [stage.name for stage in stages if not stage.name.startswith("square")]
        assert names == ["search", "probe", "fab-sentinel"]
        queries = sum(stage.attack.queries * len(stage.places) for stage in stages if "square" in stage.name)
        assert queries <= max(40 * n, 100 * expected)  # no more than 1000 queries for one in 25 samples


@pytest.mark.parametrize(("broken", "again"), [(0, False), (1, True)])
def test_given_up_samples_are_attacked_after_all_if_an_audited_one_is_broken(broken, again):
    place = torch.arange(400)
    info = {"given_up": place >= 100, "audited": place >= 350, "fell_in": torch.where(place >= 400 - broken, 4, -1)}

    def breaks(stage: Stage) -> Tensor:
        last = stage.places >= 400 - broken
        return last if stage.name == "search" else stage.places == 100

    stages = drive(AutoAttackFast(Linf(0.1), escalate=False), breaks, 400, **info)
    assert [stage.name for stage in stages[:2]] == ["search", "whole-search" if again else "probe"]
    if again:
        assert torch.equal(stages[1].places, torch.arange(100, 350))
        assert stages[1].attack.least_chance == 0
        assert stages[1].own(rng := SampleRNG.of_samples(0, range(3))) is rng  # the same random numbers
        assert not any(100 in stage.places for stage in stages[2:])  # which it broke


@pytest.mark.parametrize(("targeted", "again"), [(70, False), (71, True)])
def test_given_up_samples_are_attacked_after_all_if_targets_break_what_other_losses_do_not(targeted, again):
    """The targets were tried on 350 of 400 samples, and a fifth of them may fall."""
    place = torch.arange(400)
    fell = torch.where(place < 50, STAGES.index("cross-entropy"), -1)
    fell[50 : 50 + targeted] = STAGES.index("targets")
    info = {"given_up": place >= 200, "audited": place >= 380, "fell_in": fell}
    fast = AutoAttackFast(Linf(0.1), escalate=False)
    stages = drive(fast, lambda stage: fell[stage.places] >= 0, 400, **info)
    assert (stages[1].name == "whole-search") == again


@pytest.mark.parametrize(("n", "most_missed"), [(60, 0.2), (60, 1.0), (400, 0.4), (400, 1.0), (4000, 1.0)])
def test_as_many_given_up_samples_are_audited_as_bound_what_is_missed(n, most_missed):
    """So that, if this many of the unseen ones could be broken, none is among the audited with a chance below 5 %."""
    place = torch.arange(n)
    info = {"given_up": place >= n // 2, "audited": place >= n - round(0.03 * n)}
    fast = AutoAttackFast(Linf(0.1), escalate=False, most_missed=most_missed)
    stages = drive(fast, nothing, n, **info)
    given_up, first = n - n // 2, round(0.03 * n)
    audited = first + (len(stages[1].places) if stages[1].name == "audit" else 0)

    def unlikely(audited: int, missed: int) -> bool:
        return math.comb(given_up - missed, audited) <= 0.05 * math.comb(given_up, audited)

    most = int(most_missed * n**0.5)
    assert unlikely(audited, most + 1)
    assert audited == first or not unlikely(audited - 1, most + 1)
    if audited > first:
        assert stages[1].attack.least_chance == 0
        assert int(stages[1].places.min()) >= n // 2
        assert int(stages[1].places.max()) < n - first
        lots = SampleRNG.of_samples(0, range(n)).stream("sentinel lots").bits(1)[n // 2 : n - first, 0]
        chosen = n // 2 + lots.argsort()[: len(stages[1].places)].sort().values
        assert torch.equal(stages[1].places, chosen)
    assert (audited == first) == (n == 4000)  # of which 3 % are enough


def test_all_are_attacked_after_all_if_a_further_audit_is_broken():
    """One broken of some 40 audited samples stands for four others, more than 1 in 500 of 400."""
    place = torch.arange(400)
    info = {"given_up": place >= 200, "audited": place >= 388}

    def breaks(stage: Stage) -> Tensor:
        return stage.places == stage.places[0] if stage.name == "audit" else nothing(stage)

    stages = drive(AutoAttackFast(Linf(0.1), escalate=False), breaks, 400, **info)
    assert [stage.name for stage in stages[:4]] == ["search", "audit", "whole-search", "probe"]
    every = torch.cat([stages[1].places, stages[2].places]).sort().values
    assert torch.equal(every, torch.arange(200, 388))
    assert not any(int(stages[1].places[0]) in stage.places for stage in stages[2:])


@pytest.mark.parametrize("escalate", [True, False])
def test_sentinels_and_escalation_include_given_up_samples(escalate):
    place = torch.arange(400)
    info = {"given_up": place >= 10, "audited": place >= 370}

    def breaks(stage: Stage) -> Tensor:
        return torch.full((len(stage.places),), stage.name == "square-sentinel-1")

    stages = drive(AutoAttackFast(Linf(0.1), escalate=escalate), breaks, 400, **info)
    square = next(stage for stage in stages if stage.name == "square-sentinel-1")
    seen = next(stage.places for stage in stages if stage.name == "audit")
    unseen = place[(place >= 10) & (place < 370) & ~torch.isin(place, seen)]
    assert torch.isin(square.places, unseen).any()
    assert (stages[-1].name == "square") == escalate
    if escalate:
        assert torch.equal(stages[-1].places, place[~torch.isin(place, square.places)])


def test_signs_of_the_search_spare_given_up_samples_no_member():
    """They would be audited, but all of AutoAttack runs on them."""
    place, gains = torch.arange(60), torch.zeros(60, len(KINDS), len(SCALES), len(TERMS), dtype=torch.float64)
    gains[:, 0, 2, TERMS.index("steps")] = 10
    info = {"given_up": place >= 10, "audited": place >= 57, "gains": gains}
    stages = drive(AutoAttackFast(Linf(0.1)), nothing, 60, **info)
    assert "audit" not in [stage.name for stage in stages]
    for member in ("apgd-ce", "apgd-t", "fab-t", "square"):
        assert torch.equal(next(stage.places for stage in stages if stage.name == member), place)


def test_growing_samples_are_searched_to_the_end():
    fast, eps = AutoAttackFast(Linf(0.1)), 8 / 255
    assert giving_up_nothing(fast).least_chance == 0
    assert giving_up_nothing(make("scale:0.1+autoattack-fast", eps=eps)).attack.least_chance == 0
    assert giving_up_nothing(plain := make("pgd-2", eps=eps)) == plain


def test_a_sentinel_is_chosen_by_its_lot_not_by_its_place():
    chosen = drive(AutoAttackFast(Linf(0.1)), nothing, 500)[1].places
    lots = SampleRNG.of_samples(0, range(500)).stream("sentinel lots").bits(1)[:, 0]
    assert torch.equal(chosen, lots.argsort()[: len(chosen)].sort().values)


def test_square_stops_as_soon_as_masking_is_decided():
    def breaks(stage: Stage) -> Tensor:
        return torch.arange(len(stage.places)) < (10 if stage.name == "square-sentinel-1" else 0)

    names = [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), breaks, 500)]
    assert names == ["search", "probe", "square-sentinel-1", "apgd-ce", "apgd-t", "fab-t", "square"]
    calm = [stage.name for stage in drive(AutoAttackFast(Linf(0.1), escalate=False), breaks, 500)]
    assert calm == ["search", "probe", "square-sentinel-1"]


@pytest.mark.parametrize(("ratio", "wild", "escalates"), [(1.0, 0.0, False), (0.1, 0.0, True), (1.0, 0.8, True)])
def test_steps_that_break_their_promise_are_a_sign(ratio, wild, escalates):
    gains = torch.zeros(60, len(KINDS), len(SCALES), len(TERMS), dtype=torch.float64)
    gains[:, 0, 2, TERMS.index("steps")] = 10
    gains[:, 0, 2, TERMS.index("ratio")] = 10 * ratio
    gains[:, 1, 0, TERMS.index("steps")] = 20
    gains[:, 1, 0, TERMS.index("wild")] = 20 * wild
    names = [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), nothing, 60, gains=gains)]
    assert ("apgd-t" in names) == escalates


def test_wild_steps_of_samples_that_the_search_breaks_are_no_sign():
    """They have few steps before they are broken: this honest model escalated for them."""
    gains = torch.zeros(60, len(KINDS), len(SCALES), len(TERMS), dtype=torch.float64)
    broken = torch.arange(60) < 40
    gains[:, 1, 0, TERMS.index("steps")] = torch.where(broken, 2.0, 200.0)
    gains[:, 1, 0, TERMS.index("wild")] = torch.where(broken, 1.0, 6.0)

    def early(stage: Stage) -> Tensor:
        return broken if stage.name == "search" else nothing(stage)

    assert "apgd-t" not in [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), early, 60, gains=gains)]
    gains[~broken, 1, 0, TERMS.index("wild")] = 60.0
    assert "apgd-t" in [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), early, 60, gains=gains)]


@pytest.mark.parametrize(
    ("kept", "one_hot", "escalates"),
    [
        ((1.0, 1.0, 1.0), 0.0, False),
        ((0.7, 0.6, 1.7), 0.2, False),
        ((0.6, 0.3, 0.6), 0.0, True),
        ((1.0, 1.0, 4.0), 0.0, True),
        ((1.0, 1.0, 1.0), 0.3, True),
    ],
)
def test_what_the_probe_measures_may_be_a_sign(kept, one_hot, escalates):
    steps = torch.tensor([(1.0, 1.0, 1.0), kept], dtype=torch.float64).expand(40, 2, 3)
    rows = torch.tensor([0.0, one_hot], dtype=torch.float64).expand(40, 2)
    probed = {"kept": steps, "one_hot": rows}
    names = [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), nothing, 60, probed)]
    assert ("apgd-t" in names) == escalates
    few = {"kept": steps.where(torch.arange(40).view(-1, 1, 1) < 7, torch.nan), "one_hot": rows}
    names = [stage.name for stage in drive(AutoAttackFast(Linf(0.1)), nothing, 60, few)]
    assert ("apgd-t" in names) == (one_hot > 0.25)  # no median of seven samples


class SteepStairs(nn.Module):
    """Two classes by mean brightness, after a staircase that is steep in the middle of a step and flat elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.double() / 0.04
        floor = place.detach().floor()
        level = ((floor + torch.sigmoid(80 * (place - floor - 0.5))) * 0.04).mean((1, 2, 3))
        return torch.stack([level, 3 - level], dim=1)


def test_the_probe_sees_that_steep_stairs_end():
    x = (0.04 * (11 + torch.arange(2 * 3 * 8 * 8) % 2 * 0.5)).view(2, 3, 8, 8)
    y, probe = torch.ones(2, dtype=torch.int64), Probe(Linf(0.04))
    with count_passes(model := SteepStairs()) as cost:
        z, info = probe.run_with_info(model, x, y, SampleRNG.of_samples(0, range(2)))
    assert torch.equal(z, x)
    assert (cost.gradients / 2, cost.forwards / 2) <= probe.passes()
    # Half of the pixels promise 20 times their own move, and rise by at most half a step however far they go.
    for column, length in enumerate((0.0025, 0.01)):
        rise = 0.04 / (1 + math.exp(-80 * length / 0.04)) - 0.02
        assert info["kept"][:, 0, column].tolist() == pytest.approx([rise / (20 * length)] * 2, rel=0.01)
    assert "one_hot" not in info


def test_the_probe_counts_one_hot_rows():
    vit, x = make_vit("vit"), pixels("vit", 3)
    probe, y = Probe(Linf(0.01)), torch.zeros(3, dtype=torch.int64)
    assert not probe.run_with_info(vit, x, y)[1]["one_hot"].any()
    with scaled_attention(vit, (1.0, 300.0)):
        shares = probe.run_with_info(vit, x, y)[1]["one_hot"]
        with torch.no_grad(), attention_maps(vit) as maps:
            vit(x)
            rounded = torch.stack([(each.amax(-1) == 1).double().mean((1, 2)) for each in maps], dim=1)
    assert shares.shape == (3, 2)
    assert (shares[:, 1] > 0.2).all()
    assert torch.allclose(shares, rounded, atol=0.05)  # from a gap of 16.6 on, float32 rounds a row to one


def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match="target_steps of autoattack-fast must be at least 1, got 0"):
        AutoAttackFast(Linf(0.1), target_steps=0)
