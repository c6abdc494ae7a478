"""The search for attention factors: planted saturation, objectives, cost, controls, and attacks around attacks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from vitadel.attacks import PGD, Linf, make
from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.attention_scaling.equal_cost import control_attacks
from vitadel.attacks.attention_scaling.factors import FactorSearch, search_factors
from vitadel.attacks.attention_scaling.gaps import quantile, score_gaps, softening
from vitadel.attacks.attention_scaling.objectives import DEPLOYED, DISTANCES, LOSSES, OBJECTIVES, Passes, Probe, bind
from vitadel.attacks.goals import Changed
from vitadel.attacks.parse import read_attack_name
from vitadel.attacks.registry import ATTACKS
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.data.batches import read_batches
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.engine.target import CalibrationImages, calibration_images, open_target
from vitadel.instrument import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Calibrated
from vits import make_vit, pixels

BALL = Linf(8 / 255)
ROWS = torch.tensor([[3.0, 5.0, 100.0, 1000.0, 2.0, 4.0, 7.0, 8.0, 9.0, 6.0]])


def test_a_start_softens_the_rows_that_it_should():
    (factor,), (half,) = softening(ROWS, 0.9), softening(ROWS, 0.5)
    assert factor == pytest.approx(2 / 100)
    assert half == pytest.approx(2 / 6)
    assert softening([torch.tensor([0.5, 1.0])]) == (1.0,)
    assert softening([torch.empty(0)]) == (1.0,)  # every row has a single key


def planted(gap: float, places: Sequence[int]) -> tuple[Classifier, Tensor, Tensor]:
    """A tiny ViT whose attentions at these places have this median gap of scores."""
    model, x = wrap(make_vit("vit", classes=3)), pixels("vit", 8, seed=5)
    for place in places:  # in turn: a block's scores depend on the blocks before
        factors = [1.0, 1.0] if model.attention_factors is None else model.attention_factors.tolist()
        factors[place] *= gap / quantile(score_gaps(model, x)[place], 0.5)
        model.set_attention_factors(factors)
    return model, x, torch.arange(8) % 3


@pytest.mark.parametrize("gap", [20, 100, 1000])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("method", ["grid", "both"])
def test_planted_saturation_is_found(gap, places, method):
    """The factors bring the planted scores to where the softmax has a slope, and only there one is left to find."""
    model, x, y = planted(gap, places)
    with frozen(model):
        before = score_gaps(model, x)
        factors = AAS(PGD(BALL), search=method, select=False, ascent_steps=3).prepared(model, [(x, y)]).factors
        with scaled_attention(model, factors):
            after = score_gaps(model, x)
        bound = bind("lpips", model, x, y, Passes())
        blind = bound.slope(torch.zeros(2, dtype=torch.float64)).abs()
        seen = bound.slope(torch.tensor(factors, dtype=torch.float64).log10()).abs()
    for place in places:
        assert quantile(before[place], 0.5) == pytest.approx(gap, rel=0.01)
        assert 0.05 <= quantile(after[place], 0.9) <= 5
        assert seen[place] > 1e-4
        assert gap < 1000 or blind[place] < 0.1 * seen[place]


def test_the_ascent_alone_is_blind_to_saturation():
    model, x, y = planted(1000, (0,))
    model.set_attention_factors([100 * model.attention_factors[0].item(), 1.0])  # no row is left with a slope
    rng = SampleRNG.of_samples(0, [0])
    with frozen(model):
        found = search_factors(model, [(x, y)], rng, FactorSearch("ascent", steps=4))
    start = 10 ** (-2 * rng.uniform(2)[0])
    assert found[0] == pytest.approx(float(start[0]), rel=1e-2)
    assert found[1] != pytest.approx(float(start[1]), rel=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_grid_never_ends_below_its_start_and_both_never_below_the_grid(objective):
    model, x, y = planted(100, (0,))
    probe = Probe(BALL)
    with frozen(model):
        search = FactorSearch("both", objective, steps=2)
        found = search.find(model, [(x, y)], SampleRNG.of_samples(0, [0]), Passes(), probe=probe)
        value = bind(objective, model, x, y, Passes(), probe=probe).value
        values = {each.name: value(each.factors) for each in found}
    assert [each.value for each in found] == pytest.approx(list(values.values()))
    assert found[0].value == max(each.value for each in found)
    assert "gaps" in values
    assert values.get("grid", values["gaps"]) >= values["gaps"]
    assert ("grid + ascent" in values) == (objective not in DEPLOYED)


def test_objectives_by_hand():
    """Losses of the scaled model on clean images, and of the deployed one on images found through the factors."""
    model, x, y = planted(20, (0,))
    factors = (0.2, 0.7)
    scaled = Changed(model, lambda inner: scaled_attention(inner, factors))
    z = PGD(BALL, steps=3, stop_when_fooled=False)(scaled, x, y, SampleRNG.of_samples(0, range(8)))
    with frozen(model), torch.no_grad():
        found = {name: bind(name, model, x, y, Passes(), probe=Probe(BALL)).value(factors) for name in OBJECTIVES}
        entropy = [float(nn.functional.cross_entropy(each, y)) for each in (scaled(x), model(z))]
        logits, clean = scaled(x), model(x).softmax(1)
        own = logits.gather(1, y[:, None])[:, 0]
        margin = logits.scatter(1, y[:, None], -torch.inf).amax(1) - own
        p = logits.softmax(1)
        gama = p.scatter(1, y[:, None], -1).amax(1) - p.gather(1, y[:, None])[:, 0] + 50 * (p - clean).square().sum(1)
    assert [found["cross-entropy"], found["deployed-cross-entropy"]] == pytest.approx(entropy, rel=1e-5)
    assert found["margin"] == pytest.approx(float(margin.mean()), rel=1e-4)
    assert found["gama"] == pytest.approx(float(gama.mean()), rel=1e-4)
    assert set(OBJECTIVES) == {*DISTANCES, *LOSSES, *DEPLOYED}


def test_slopes_are_those_of_the_values():
    model, x, y = planted(20, (0,))
    model = model.double()
    at = torch.tensor([-1.0, -0.3], dtype=torch.float64)
    with frozen(model):
        for name in (*DISTANCES, *LOSSES):
            bound = bind(name, model, x.double(), y, Passes())
            slope = bound.slope(at)
            for place in range(2):
                step = torch.zeros(2, dtype=torch.float64)
                step[place] = 1e-5
                up, down = (bound.value((10 ** (at + sign * step)).tolist()) for sign in (1, -1))
                assert float(slope[place]) == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-6)


NAMES = ["fgsm", "pgd-20", "gama-100", "square(queries=500)", "apgd-ce-100"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", ["", "(search=grid)", "(search=ascent)", "(select=false)"])
def test_a_calibration_costs_at_most_the_attack_on_25_images(name, settings):
    """Half of a tenth of --limit 500; counted by the model's own passes."""
    model = wrap(make_vit("vit", classes=3))
    batch = [(pixels("vit", 64, seed=5), torch.arange(64) % 3)]
    attack = make(f"aas{settings}+{name}")
    with count_passes(model) as cost:
        found = attack.prepared(model, batch)
    record = found.calibration
    assert cost.gradients + cost.forwards == record["gradients"] + record["forwards"]
    gradients, forwards = Rescaled(attack.attack).passes()
    assert 3 * record["gradients"] + record["forwards"] <= 25 * (3 * gradients + forwards)
    assert 1 <= record["images"] <= 64


def test_images_that_are_asked_for_are_all_used():
    model = make_vit("vit", classes=3)
    batches = [(pixels("vit", 6, seed=k), torch.arange(6) % 3) for k in (5, 6)]
    record = make("aas(images=12,search=ascent,steps=2,select=false)+pgd-2").prepared(model, batches).calibration
    assert (record["images"], record["gradients"]) == (12, 24)


def test_factors_do_not_depend_on_what_else_is_in_the_batch():
    """Images that are not used, because the budget is spent, change nothing."""
    model, x = make_vit("vit", classes=3), pixels("vit", 64, seed=5)
    y = torch.arange(64) % 3
    used = AAS(PGD(BALL, steps=2)).prepared(model, [(x, y)]).calibration["images"]
    assert used < 64
    places = torch.arange(used) * 64 // used
    assert AAS(PGD(BALL, steps=2)).prepared(model, [(x[places], y[places])]) == AAS(PGD(BALL, steps=2)).prepared(
        model, [(x, y)]
    )


@pytest.mark.slow
def test_by_default_finalists_are_the_winner_and_one_that_breaks_others():
    model, x = make_vit("vit", classes=3), pixels("vit", 24, seed=5)
    with torch.no_grad():
        y = model(x).argmax(1)
    for name, usual, most in (("pgd-4", 2, 6), ("autoattack(steps=2)", 1, 1)):
        attack = make(f"aas(images=24,steps=1)+{name}", eps=1 / 255)
        found = attack.prepared(model, [(x, y)])
        assert 1 + len(found.others) <= usual
        assert found.calibration["finalists"][0] == found.calibration["winner"]
        for planned, finalists in ((attack.usual_passes(), usual), (attack.passes(), most)):
            others = ((1.0,),) * (finalists - 1)
            assert planned == Rescaled(attack.attack, 1.0, others=others, paper_style=most > 1).passes()


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "saturated"), [(2, False), (100, True)])
@pytest.mark.parametrize("search", ["both", "grid", "ascent"])
def test_all_candidates_run_where_attention_is_saturated_and_results_say_whether_it_is(gap, saturated, search):
    model, x, y = planted(gap, [1])
    attack = AAS(PGD(BALL, steps=2), search=search, ascent_steps=2, images=8)
    found = attack.prepared(model, [(x, y)])
    said = found.calibration["saturation"]
    beyond = [float((each > 16.6).double().mean()) for each in score_gaps(model, x)]
    assert said["rows"] == pytest.approx(beyond)
    assert said["is_saturated"] == saturated == (max(beyond) > 0.25)
    assert said["largest_gap"] == pytest.approx(float(score_gaps(model, x)[1].max()))
    different = {tuple(each["factors"]) for each in found.calibration["candidates"]} - {(1.0, 1.0)}
    assert ({found.factors, *found.others} == different) == saturated
    assert found.passes() <= attack.passes()
    around_an_ensemble = make("aas+autoattack(steps=2)").prepared(model, [(x, y)])
    assert around_an_ensemble.others == ()


@pytest.mark.slow
def test_with_all_finalists_no_candidate_breaks_an_image_that_aas_does_not():
    """Each runs with the random numbers that it would have alone; on the calibration images and on others."""
    model, x = make_vit("vit", classes=3), pixels("vit", 24, seed=5)
    with torch.no_grad():
        y = model(x).argmax(1)
    attack = AAS(PGD(Linf(1 / 255), steps=4), images=12, ascent_steps=2, finalists=9)
    found = attack.prepared(model, [(x[:12], y[:12])])
    candidates = [tuple(each["factors"]) for each in found.calibration["candidates"][:-1]]
    ran, different = (
        {tuple(round(factor, 6) for factor in each) for each in factors}
        for factors in ([found.factors, *found.others], candidates)
    )
    assert ran == different - {(1.0, 1.0)}
    assert len(ran) == 1 + len(found.others)  # none runs twice
    rng = SampleRNG.of_samples(0, range(24))
    broken = model(found(model, x, y, rng)).argmax(1) != y
    assert 0 < int(broken.sum()) < 24
    for factors in candidates:
        alone = model(Rescaled(attack.attack, factors)(model, x, y, rng)).argmax(1) != y
        assert not (alone & ~broken).any()


@pytest.mark.slow
def test_the_search_alone_breaks_the_saturated_codebook():
    target = open_target("python:vitadel.diagnosis.gallery:saturated_codebook", "shapes")
    indices, _ = target.selection(20, 0, False)
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess)
    source, rows = calibration_images(target, indices, None, 64, 0)
    calibration = CalibrationImages(source, rows, target.preprocess, torch.device("cpu"))
    model, rng, left = target.model, SampleRNG.of_samples(0, indices), dict[str, int]()
    for name in ("pgd-20", "aas(select=false)+pgd-20", "aas(select=false,search=grid)+pgd-20"):
        attack = make(name)
        attack = attack.prepared(model, calibration) if isinstance(attack, AAS) else attack
        with torch.no_grad():
            left[name] = int((model(attack(model, batch.x, batch.y, rng)).argmax(1) == batch.y).sum())
    assert left.pop("pgd-20") >= 19
    assert max(left.values()) <= 1


AROUND = [
    ("linf", "apgd-t-3(targets=1)"),
    ("linf", "autoattack(steps=2,targets=1,queries=2)"),
    ("linf", "square(queries=10)"),
    ("linf", "targeted:next+pgd-3"),
    ("linf", "eot:2+pgd-3"),
    ("l2", "autoattack(steps=2,targets=1,queries=2)"),
    ("l1", "autoattack(steps=2,targets=1,queries=2)"),
    ("l2", "pgd-3"),
    ("l2", "apgd-ce-3"),
    ("l1", "pgd-3"),
    ("l1", "apgd-ce-3"),
]


FAMILIES = ["swin", "levit", "xcit", "cait"]
# Families differ in where factors act, attacks in what runs inside, and neither looks at the other: one attack meets
# all families, and each of the others meets one of them in turn.
AROUND_ON = [(*AROUND[0], family) for family in FAMILIES]
AROUND_ON += [(*around, FAMILIES[place % len(FAMILIES)]) for place, around in enumerate(AROUND[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "name", "family"), AROUND_ON)
def test_never_weaker_than_what_it_goes_around(norm, name, family):
    model, x = make_vit(family, classes=4), pixels(family, 4)
    with torch.no_grad():
        y = model(x).argmax(1)
    eps = {"linf": 2 / 255, "l2": 0.2, "l1": 4.0}[norm]
    attack, plain = (make(text, eps=eps, norm=norm) for text in (f"aas(images=4,steps=1)+{name}", name))
    attack = attack.prepared(model, [(pixels(family, 4, seed=9), torch.arange(4))])
    rng = SampleRNG.of_samples(0, range(4))
    z = attack(model, x, y, rng)
    broken, alone = (model(each).argmax(1) != y for each in (z, plain(model, x, y, rng)))
    assert not (alone & ~broken).any()
    assert len(attack.factors) == len(attentions_of(model))


@pytest.mark.slow
def test_controls_are_attacks_of_the_same_cost_on_the_same_images():
    model, x = wrap(make_vit("vit", classes=4)), pixels("vit", 24, seed=3)
    with torch.no_grad():
        y = model(x).argmax(1)
    asked = {"eps": "2/255", "limit": 12, "batch_size": 5}
    name = "aas(controls=true,images=4,steps=1,finalists=1)+pgd-3"
    (entry,) = audit(model, (x, y), attacks=name, **asked)["attacks"]
    restarts, factors, double = entry["controls"]
    assert [each["name"] for each in entry["controls"]] == ["3 plain runs", "random factors", "3 plain runs in float64"]
    (plain,) = audit(model, (x, y), attacks="pgd-3(restarts=3)", **asked)["attacks"]
    assert (restarts["held"], restarts["gradient_calls"]) == (plain["held"], plain["gradient_calls"])
    for control in entry["controls"]:
        assert control["n"] == entry["attacked"]
        broken = control["n"] - control["held"]
        both = broken - control["only_control"]
        assert entry["attacked"] - entry["held"] == both + control["only_attack"]
        assert 0 <= control["p"] <= 1
    assert double["void"] == factors["void"] == 0
    assert (entry["held"], entry["attacked"]) == tuple(
        audit(model, (x, y), attacks=name.replace("controls=true,", ""), **asked)["attacks"][0][key]
        for key in ("held", "attacked")
    )


def test_controls_cost_no_less_than_the_attack():
    model = make_vit("vit", classes=3)
    for name in ("pgd-20", "apgd-t-5(targets=2)", "square(queries=50)", "autoattack(steps=2,targets=2,queries=5)"):
        attack = Rescaled(make(name), (0.1, 0.2), controls=True, others=((0.3, 0.4),))

        def cost(each):
            gradients, forwards = each.passes()
            return 3 * gradients + forwards

        plain, random, double = (each for _, each in control_attacks(attack, model, 0))
        assert cost(attack) <= cost(plain) < cost(attack) + cost(make(name)) + 3
        assert cost(random) == cost(attack)
        assert double.passes()[0] == plain.passes()[0]
        assert all(1e-3 <= factor <= 1 for factor in (*random.factors, *random.others[0]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale:2+pgd-3", "a factor above 0 and at most 1, got 2: .*write scale:2(sharpen=true"),
        ("scale:0+pgd-3", "must be positive, got '0'"),
        ("aas(controls=true)+fgsm", "starts at the clean image, so all restarts would be the same"),
        ("aas(controls=true)+targeted:next+fab", "starts at the clean image"),
        ("aas(controls=true)+pgd-3(random_start=false)", "leave out controls"),
        ("aas(controls=true)+deepfool", "leave out controls"),
        ("aas(controls=true)+self-ensemble", "leave out controls"),
        ("aas(images=0)+pgd-3", "must be positive, got '0'"),
        ("aas(images=2.5)+pgd-3", "at least 1 calibration image"),
        ("aas(finalists=0)+pgd-3", "must be positive, got '0'"),
    ],
)
def test_wrong_settings_are_told(name, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        make(name)


@pytest.mark.parametrize("factors", [0.0, -1.0, float("nan"), float("inf"), (0.1, -2.0)])
def test_factors_are_positive_and_finite(factors):
    with pytest.raises(UserError, match="finite factors above 0"):
        Rescaled(PGD(BALL), factors)
    with pytest.raises(UserError, match="finite factors above 0"):
        Rescaled(PGD(BALL), 0.1, others=(factors if isinstance(factors, tuple) else (factors,),))


SINGLE = [f"{name}-2" if "steps" in ATTACKS[name].settings else name for name in ATTACKS if "autoattack" not in name]
SHORT = {"square": "square(queries=10)", "patches-learned": "patches-learned(masks=2,images=4,training_steps=2)"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(SHORT.get(name, name) for name in SINGLE), "pna-patchout-2(patchout=false)"])
def test_controls_go_around_exactly_the_attacks_that_draw_random_numbers(name):
    """Found by running each with two seeds, at a budget in which gradients differ from one start to another."""
    norm = ATTACKS[read_attack_name(name).base].norms[0]
    attack = make(name, eps=0.1, norm=norm)
    model, x = make_vit("vit", classes=4), pixels("vit", 2)
    y = model(x).argmax(1)
    if isinstance(attack, Calibrated):
        attack = attack.prepared(model, [(x, y)])
    first, second = (attack(model, x, y, SampleRNG.of_samples(seed, range(2))) for seed in (0, 1))
    if torch.equal(first, second):
        with pytest.raises(UserError, match="leave out controls"):
            make(f"aas(controls=true)+{name}", norm=norm)
    else:
        make(f"aas(controls=true)+{name}", norm=norm)


@pytest.mark.parametrize("name", ["aas+pgd-2", "aas-paper+pgd-2", "scale:0.1+pgd-2"])
def test_a_model_without_softmax_attention_is_refused(name):
    model = make_vit("vit", depth=0)
    attack, x = make(name), pixels("vit")
    with pytest.raises(UserError, match="VisionTransformer has no softmax attention to scale"):
        attack(model, x, torch.zeros(2, dtype=torch.int64)) if isinstance(attack, Rescaled) else attack.prepared(
            model, [(x, torch.zeros(2, dtype=torch.int64))]
        )
