"""Adaptive attention scaling: factors, verdicts, and the number that the paper would have reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf, make
from vitadel.attacks.apgd import apgd_t
from vitadel.attacks.attention_scaling.aas import AAS, PrintedAAS, Rescaled
from vitadel.attacks.attention_scaling.objectives import DISTANCES, eq3_distance, lpips_distance, scaled_features
from vitadel.attacks.goals import Changed
from vitadel.attacks.wrappers import Restarts
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.evaluation.engine.stages import count_passes
from vitadel.instrument import block_features, scaled_attention
from vitadel.runtime.rng import SampleRNG
from vits import VITS, make_vit, pixels

BALL = Linf(8 / 255)


def random_features(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lpips_distance_by_hand():
    ours, theirs = [random_features(s, 2, 5, 4) for s in (0, 1)], [random_features(s, 2, 5, 4) for s in (2, 3)]
    expected = []
    for sample in range(2):
        layers = []
        for a, b in zip(ours, theirs, strict=True):
            unit = [t[sample] / t[sample].norm(dim=1, keepdim=True) for t in (a, b)]
            layers.append(((unit[0] - unit[1]) / 5**0.5).flatten())
        expected.append(float(torch.cat(layers).norm()))
    assert lpips_distance(ours, theirs).tolist() == pytest.approx(expected)
    assert float(lpips_distance([3 * t for t in ours], theirs)[0]) == pytest.approx(expected[0])  # blind to scale
    assert lpips_distance(ours, ours).max() < 1e-9


def test_equation_3_by_hand():
    ours, theirs = [random_features(0, 1, 5, 4)], [random_features(2, 1, 5, 4)]
    a, b = ours[0].flatten(), theirs[0].flatten()
    assert float(eq3_distance(ours, theirs)) == pytest.approx(float((a - b).norm() / (a.norm() * b.norm())))


@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_take_every_shape_of_features(distance):
    shapes = [(2, 5, 4), (2, 3, 3, 4), (2, 1, 4), (2, 4)]
    ours, theirs = [random_features(0, *s) for s in shapes], [random_features(1, *s) for s in shapes]
    assert DISTANCES[distance](ours, theirs).shape == (2,)


def calibration(name: str, batches: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(pixels(name, 4, seed=50 + k), torch.arange(4) % 3) for k in range(batches)]


def mean_distance(model: nn.Module, x: Tensor, factors: Sequence[float]) -> float:
    def features(scales: Sequence[float] | float) -> list[Tensor]:
        with torch.no_grad(), scaled_attention(model, scales), block_features(model) as seen:
            model(x)
            return list(seen)

    return float(lpips_distance(features(factors), features(1.0)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(VITS))
def test_works_on_every_family_and_ascends(family):
    model = make_vit(family, classes=3)
    batches = calibration(family, 1)
    ascent = AAS(PGD(BALL), search="ascent", ascent_steps=6, select=False)
    start = replace(ascent, ascent_steps=1, pace=1e-9).prepared(model, batches).factors
    found = ascent.prepared(model, batches).factors
    assert len(found) == len(attentions_of(model))
    assert all(1e-7 <= factor <= 1 for factor in found)
    assert mean_distance(model, batches[0][0], found) > mean_distance(model, batches[0][0], start)


@pytest.mark.parametrize("family", ["levit", "levit_conv", "swin"])
def test_features_are_compared_token_by_token(family):
    """LeViT's convolutional variant has channels first, Swin a grid of tokens: neither is a sequence."""
    widths = {"levit": [64, 96, 96], "levit_conv": [64, 96, 96], "swin": [16, 16, 32, 32]}[family]
    tokens = {"levit": [16, 4, 4], "levit_conv": [16, 4, 4], "swin": [64, 64, 16, 16]}[family]
    model, x = make_vit(family), pixels(family)
    with torch.no_grad():
        seen = scaled_features(model, x, 1.0)
    assert [each.shape for each in seen] == [(2, *shape) for shape in zip(tokens, widths, strict=True)]
    with torch.no_grad(), block_features(model) as raw:
        model(x)
    token = raw[-1][1, :, 1, 0] if family == "levit_conv" else raw[-1].flatten(1, -2)[1, 4 if family == "swin" else 2]
    assert torch.equal(seen[-1][1, 4 if family == "swin" else 2], token)


SHORT = "(images=4,steps=2,select=false)"
SEARCHES = [f"aas{SHORT}", "aas-paper(images=4)"]
# A family decides how factors are applied, forward and backward; how they are searched is the same for all.
MODES = [(name, family) for name in ("scale:0.5", f"aas-bpda{SHORT}") for family in sorted(VITS)]
MODES += [(SEARCHES[place % 2], family) for place, family in enumerate(sorted(VITS))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), MODES)
def test_every_mode_attacks_every_family(name, family):
    """Joined with the plain attack, and without a trace."""
    model, x = make_vit(family, classes=3).double(), pixels(family, 6, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1)
    attack, plain = make(f"{name}+pgd-3", eps=4 / 255), make("pgd-3", eps=4 / 255)
    if not isinstance(attack, Rescaled):
        attack = attack.prepared(model, [(pixels(family, 4, 50, torch.float64), torch.arange(4) % 3)])
    rng = SampleRNG.of_samples(0, range(6))
    before = [list(vars(module)) for module in model.modules()]
    z = attack(model, x, y, rng)
    assert [list(vars(module)) for module in model.modules()] == before
    assert Linf(4 / 255).size(z, x).max() <= 4 / 255 + 1e-6
    broken, alone = (model(each).argmax(1) != y for each in (z, plain(model, x, y, rng)))
    assert not (alone & ~broken).any()


@pytest.mark.slow
def test_preparation_repeats_and_leaves_no_trace():
    model = make_vit("vit", classes=3).train()
    before = torch.get_rng_state()
    first, again = (AAS(PGD(BALL), ascent_steps=2).prepared(model, calibration("vit"), seed=4) for _ in range(2))
    assert first == again
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training
    ascent = AAS(PGD(BALL), search="ascent", ascent_steps=2, select=False)
    assert ascent.prepared(model, calibration("vit"), 4) != ascent.prepared(model, calibration("vit"), 5)


@pytest.mark.slow
def test_selection_takes_what_hurts_the_deployed_model_most():
    """Measured again by hand: ten steps through each candidate, judged on the deployed model."""
    model = make_vit("vit", classes=3)
    x, y = pixels("vit", 12, seed=50), torch.arange(12) % 3
    found = AAS(PGD(BALL), ascent_steps=2, images=12).prepared(model, [(x, y)])
    harms = {}
    for candidate in found.calibration["candidates"]:
        change = partial(scaled_attention, factors=tuple(candidate["factors"]))
        z = PGD(BALL, steps=10, stop_when_fooled=False)(
            Changed(model, change), x, y, SampleRNG.of_samples(0, range(12))
        )
        logits = model(z).detach()
        harm = (int((logits.argmax(1) != y).sum()), float(nn.functional.cross_entropy(logits, y)))
        assert (candidate["broken"], candidate["loss"]) == (harm[0], pytest.approx(harm[1], rel=1e-4))
        harms[candidate["name"]] = (*harm, tuple(candidate["factors"]))
    assert list(harms)[-1] == "plain"
    plain = harms.pop("plain")
    winner, second = sorted(harms, key=harms.__getitem__, reverse=True)[:2]
    assert found.calibration["winner"] == winner
    assert found.factors == harms[winner][2]
    assert found.calibration["margin"]["broken"] == harms[winner][0] - harms[second][0]
    assert set(harms) >= {"gaps", "uniform 0.1", "uniform 0.01", "uniform 0.001"}
    assert plain[2] == (1.0, 1.0)


def test_the_literal_algorithm_is_a_walk_between_the_clamps():
    """With gradients far smaller than the noise, factors are clamp(1 + noise), then clamp(that + noise), ..."""
    model = make_vit("vit", classes=3)
    found = PrintedAAS(PGD(BALL), ascent_steps=1).prepared(model, calibration("vit", 2), seed=3).factors
    rng = SampleRNG.of_samples(3, [0]).stream("aas factors")
    expected = torch.ones(len(found), dtype=torch.float64)
    for turn in range(2):
        noise = rng.stream("noise", turn).normal(len(found))[0].double()
        expected = (expected + noise).clamp(1e-7, 1)
    assert found == pytest.approx(expected.tolist(), abs=0.1)


def labelled(model: nn.Module, count: int = 12) -> tuple[Tensor, Tensor]:
    x = images(count, seed=3, side=VITS["vit"].size)
    with torch.no_grad():
        return x, model(x).argmax(1)


@pytest.mark.parametrize("inner", [PGD(BALL, steps=5), Restarts(PGD(BALL, steps=3), 2), apgd_t(BALL, 4, 2)])
@pytest.mark.parametrize("backward_only", [False, True])
def test_factors_of_one_repeat_the_plain_attack_bit_by_bit(inner, backward_only):
    model = make_vit("vit", classes=3)
    x, y = labelled(model)
    rng = SampleRNG.of_samples(0, range(len(x)))
    z = Rescaled(inner, 1.0, backward_only)(model, x, y, rng)
    scaled = inner(model, x, y, rng.stream("rescaled"))
    fell = model(scaled).argmax(1) != y
    assert torch.equal(z[fell], scaled[fell])
    assert torch.equal(z[~fell], inner(model, x, y, rng)[~fell])


@pytest.mark.parametrize("factors", [0.3, (0.05, 0.5)])
@pytest.mark.parametrize("mode", [{}, {"backward_only": True}, {"literal": True}])
def test_never_weaker_than_the_plain_attack(factors, mode):
    model = make_vit("vit", classes=3)
    x, y = labelled(model, 30)
    rng = SampleRNG.of_samples(0, range(30))
    plain = model(PGD(Linf(3 / 255), steps=4)(model, x, y, rng)).argmax(1) != y
    both = model(Rescaled(PGD(Linf(3 / 255), steps=4), factors, **mode)(model, x, y, rng)).argmax(1) != y
    assert 0 < int(plain.sum()) < 30
    assert not (plain & ~both).any()


MODES: dict[str, dict[str, bool]] = {"surrogate": {}, "bpda": {"backward_only": True}, "literal": {"literal": True}}


@pytest.mark.parametrize("mode", MODES)
def test_costs_what_it_says_where_nothing_falls(mode):
    model = make_vit("vit", classes=3)
    x, y = labelled(model, 6)
    with torch.no_grad(), scaled_attention(model, 0.9):
        x, y = x[model(x).argmax(1) == y], y[model(x).argmax(1) == y]
    assert len(x) > 2
    attack = Rescaled(PGD(Linf(1e-6), steps=3), 0.9, **MODES[mode])
    with count_passes(model) as cost:
        attack.run_with_info(model, x, y)
    gradients, forwards = attack.passes()
    assert (cost.gradients, cost.forwards) == (gradients * len(x), forwards * len(x))
    with_style = replace(attack, paper_style=True).passes()  # the scaled model's clean answers, and the attack on it
    assert with_style == (gradients + 3, forwards + 1)


def test_the_search_asks_the_deployed_model():
    """An image that fools the scaled model from the start must not end the search."""
    model = make_vit("vit", classes=3)
    x, y = labelled(model, 30)
    with torch.no_grad(), scaled_attention(model, 0.01):
        wrong = model(x).argmax(1) != y
    assert wrong.any()
    z = Rescaled(PGD(Linf(1e-4), steps=3, random_start=False), 0.01)(model, x, y)
    assert ((z - x)[wrong].flatten(1).abs().amax(1) > 5e-5).all()


def test_names_build_what_they_say():
    inner = make("pgd-7", eps=0.1)
    assert make("aas+pgd-7", eps=0.1) == AAS(inner, paper_style=True)
    assert make("aas(paper_style=false)+pgd-7", eps=0.1) == AAS(inner)
    assert make("aas-bpda(objective=eq3,select=false)+pgd-7", eps=0.1) == AAS(
        inner, backward_only=True, objective="eq3", select=False, paper_style=True
    )
    assert make("aas-paper+pgd-7", eps=0.1) == PrintedAAS(inner, paper_style=True)
    assert make("scale:1e-3+pgd-7", eps=0.1) == Rescaled(inner, 1e-3, paper_style=True)
    assert make("scale:1e-3(paper_style=false)+pgd-7", eps=0.1) == Rescaled(inner, 1e-3)
    for ensemble in ("autoattack", "autoattack-fast", "eot:2+autoattack"):
        assert not make(f"aas+{ensemble}").paper_style
        assert make(f"aas(paper_style=true)+{ensemble}").paper_style
    with pytest.raises(UserError, match="'paper_style' of prefix 'aas' must be true or false, got '1'"):
        make("aas(paper_style=1)+pgd-7")
    with pytest.raises(UserError, match="lpips, eq3"):
        make("aas(objective=cosine)+pgd-7")
    with pytest.raises(UserError, match="ascent, grid, both"):
        make("aas(search=best)+pgd-7")
    with pytest.raises(UserError, match="deployed-margin has no slope"):
        make("aas(search=ascent,objective=deployed-margin)+pgd-7")


def test_a_model_without_attention_is_refused():
    with pytest.raises(UserError, match=r"no anatomy known.*no softmax attention, leave out the prefix"):
        make("scale:0.1+pgd-5")(TinyNet().eval(), images(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["scale:0.3", "targeted:least+scale:0.3"])
def test_paper_style_is_an_audit_of_the_scaled_model(prefix):
    """Over all images, also those that only the scaled model gets right; the count on the deployed model stays."""
    model, x = wrap(make_vit("vit", classes=4)), pixels("vit", 24, seed=3)
    with torch.no_grad(), scaled_attention(model, 0.3):
        own = model(x).argmax(1)
    y = model(x).argmax(1)
    y[::2] = own[::2]  # every other image has the label that the scaled model gives
    assert (own != model(x).argmax(1)).sum() > 3
    asked = {"eps": "2/255", "batch_size": 7, "independent": True}
    plain = prefix.removesuffix("scale:0.3") + "pgd-3"
    names = [f"{prefix}+pgd-3", f"{prefix}(paper_style=false)+pgd-3"]
    with_style, without = audit(model, (x, y), attacks=names, **asked)["attacks"]
    model.set_attention_factors([0.3, 0.3])
    scaled_model = audit(model, (x, y), attacks=plain, **asked)
    style, (expected,) = with_style.pop("paper_style"), scaled_model["attacks"]
    assert without.pop("paper_style") is None
    assert (style["clean_scaled"], style["clean_scaled_correct"]) == (
        scaled_model["clean"]["accuracy"],
        scaled_model["clean"]["correct"],
    )
    assert (style["held"], style["n"], style["accuracy"]) == (expected["held"], 24, expected["robust_accuracy"])
    assert style["ci95"] == expected["ci95"]
    assert style["gradient_calls"] == expected["gradient_calls"]
    assert with_style["held"] == without["held"]
    assert with_style["gradient_calls"] == without["gradient_calls"]


@pytest.mark.slow
def test_an_audit_calibrates_on_other_images_and_reports_both_numbers():
    names = ["pgd-5", "aas(images=10,steps=2)+pgd-5"]
    results = audit("zoo:shapes-robust", attacks=names, limit=10, independent=True, eps="12/255")
    plain, aas = results["attacks"]
    assert plain["paper_style"] is None
    assert aas["held"] <= plain["held"]
    assert aas["judged_on"] == "deployed model"
    assert aas["paper_style"]["n"] == 10
    assert "not a robustness estimate" in aas["paper_style"]["remark"]
    assert len(aas["settings"]["factors"]) == 6
    asked = {"images": 10, "ascent_steps": 2, "pace": 0.3, "objective": "lpips", "select": True, "steps": 5}
    assert {key: aas["settings"][key] for key in asked} == asked
    other = audit("zoo:shapes-robust", attacks=names[1:], limit=10, eps="12/255", batch_size=7)
    assert other["attacks"][0]["settings"]["factors"] == aas["settings"]["factors"]
