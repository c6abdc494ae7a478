"""Attacks inside training: their form, their eps, and what they leave behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks import L1, L2, PGD, Linf, Restarts, WorstOf, make
from vitadel.attacks.apgd import APGD, OverTargets
from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.losses import cross_entropy, rescaled_cross_entropy
from vitadel.attacks.registry import ATTACKS
from vitadel.attacks.settings import at_eps, threats_in, training_form
from vitadel.attacks.steppers import Steepest
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG
from vitadel.training.loop import run_inner_attack
from vitadel.types import Calibrated
from vits import VITS, make_vit

EPS = 8 / 255


def soft(y: Tensor, classes: int = 3) -> Tensor:
    one, other = (nn.functional.one_hot(each, classes).float() for each in (y, (y + 1) % classes))
    return 0.7 * one + 0.3 * other


def test_another_eps_reaches_every_threat_and_no_step():
    step = Steepest(0.01)
    inner = PGD(Linf(EPS), stepper=step, steps=3)
    around = Rescaled(Restarts(WorstOf((inner, APGD(L1(EPS, sparsity=0.2))), ("a", "b")), 2), (0.1, 0.2))
    expected = Rescaled(
        Restarts(WorstOf((replace(inner, threat=Linf(0.5)), APGD(L1(0.5, sparsity=0.2))), ("a", "b")), 2), (0.1, 0.2)
    )
    assert at_eps(around, 0.5) == expected
    assert at_eps(around, EPS) == around
    assert around.attack.attack.attacks[0] is inner
    assert at_eps(AAS(inner), 0.5) == AAS(replace(inner, threat=Linf(0.5)))


def test_step_lengths_stay_what_full_eps_made_them():
    full = make("pgd-10", eps=EPS)
    small = at_eps(full, EPS / 10)
    assert small == replace(full, threat=Linf(EPS / 10))
    assert small.stepper == full.stepper == Steepest(2.5 * EPS / 10)
    assert at_eps(make("fgsm-rs", eps=EPS), 0.001).stepper.length == pytest.approx(1.25 * EPS)


def a_norm_of(name):
    norms = ATTACKS[name].norms
    return "linf" if "linf" in norms else norms[0]


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_of_the_catalogue_can_be_changed(name):
    attack = make(name, eps=EPS, norm=a_norm_of(name))
    assert f"eps={EPS / 2}" in repr(at_eps(attack, EPS / 2))
    assert f"eps={EPS}" not in repr(at_eps(attack, EPS / 2))
    assert repr(at_eps(at_eps(attack, EPS / 2), EPS)) == repr(attack)
    assert repr(training_form(training_form(attack))) == repr(training_form(attack))


QUICK = {
    "square": "square(queries=9)",
    "fgsm": "fgsm",
    "fgsm-rs": "fgsm-rs",
    "autoattack": "autoattack(steps=2,targets=2,queries=5)",
    "autoattack-plus": "autoattack-plus(steps=2,targets=2,queries=5,restarts=1)",
    "autoattack-rand": "autoattack-rand(steps=2,times=2)",
    "autoattack-fast": "autoattack-fast(entropy_steps=2,margin_steps=2,target_steps=2,best_steps=2,sentinel_queries=5)",
    "noise": "noise",
    "patches-random": "patches-random(masks=2)",
    "patches-learned": "patches-learned(masks=2,images=8)",
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_of_the_catalogue_can_be_trained_against(name, mixed):
    """But for those that first study the model: a recipe refuses these."""
    attack = training_form(make(QUICK.get(name, f"{name}-2"), eps=EPS, norm=a_norm_of(name)))
    if isinstance(attack, Calibrated):
        pytest.skip("studies the model on other images first")
    model, x, y = make_vit("vit", classes=3).train(), images(4, side=VITS["vit"].size), torch.arange(4) % 3
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    z = run_inner_attack(attack, model, x, soft(y) if mixed else y, SampleRNG.of_samples(0, range(4)))
    assert z.shape == x.shape
    assert ((z >= 0) & (z <= 1)).all()
    assert not z.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    if (threats := threats_in(attack)) and "patch" not in name:
        assert (z - x).abs().amax() <= threats[0].eps + 1e-6


def test_what_holds_no_threat_is_reported():
    @dataclass(frozen=True)
    class Own:
        budget: float = 0.1

        def __call__(self, model, x, y, rng=None):
            return x

        def passes(self):
            return 0, 0

    with pytest.raises(UserError, match=r"eps of Own.*linf, l2, l1"):
        at_eps(Own(), 0.1)
    with pytest.raises(UserError, match=r"negative, got -0\.1"):
        at_eps(make("pgd-2"), -0.1)


def test_training_goes_all_the_way():
    inner = PGD(Linf(EPS), steps=3)
    last = replace(inner, stop_when_fooled=False)
    assert training_form(inner) == last
    assert training_form(last) is last
    nested = Rescaled(WorstOf((Restarts(inner, 2), inner)), 0.1)
    assert training_form(nested) == Rescaled(WorstOf((Restarts(last, 2), last)), 0.1)
    climbing = APGD(Linf(EPS))
    assert training_form(climbing) == replace(climbing, stop_when_fooled=False)
    targets = OverTargets(climbing)
    assert training_form(targets) is targets


def test_the_training_form_pushes_the_loss_higher():
    model, x = TinyNet().eval(), images(30)
    y = model(x).argmax(1)
    first, last = (run_inner_attack(each, model, x, y) for each in (make("pgd-10"), training_form(make("pgd-10"))))
    assert cross_entropy(model(last), y).mean() > cross_entropy(model(first), y).mean()


class Witness(TinyNet):
    """Notes in which modes and with what flags it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        learning = any(p.requires_grad for p in self.parameters())
        self.seen.append((self.training, self.features[3].training, learning))
        return super().forward(x)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", ["pgd-3", "pgd-3(restarts=2)", "apgd-ce(steps=3)", "eot:2+pgd-3", "kl-3"])
def test_the_attack_meets_the_mode_that_was_asked_for(mode, name):
    model, x = Witness().train(), images(6)
    y = torch.arange(6) % 3
    model.seen.clear()
    model.features[1].eval()
    next(model.parameters()).requires_grad_(False)
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    weights = [p.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    z = run_inner_attack(make(name), model, x, y, SampleRNG.of_samples(0, range(6)), mode)
    assert set(model.seen) == {(mode == "train", mode == "train", False)}
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all((p.grad == 7).all() for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not z.requires_grad
    assert (z - x).abs().max() <= EPS + 1e-6


def test_flags_come_back_after_an_error():
    model = TinyNet().train()
    with pytest.raises(UserError, match="pixels"):
        run_inner_attack(make("pgd-3"), model, images(4) * 255, torch.zeros(4, dtype=torch.int64), mode="train")
    with pytest.raises(RuntimeError):
        run_inner_attack(make("pgd-3"), model, images(4, side=9), torch.zeros(4, dtype=torch.int64), mode="train")
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_only_train_mode_moves_statistics_and_the_generator():
    model, x = TinyNet().train(), images(6)
    y = torch.arange(6) % 3
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    run_inner_attack(training_form(make("pgd-3")), model, x, y, mode="eval")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    run_inner_attack(training_form(make("pgd-3")), model, x, y, mode="train")
    assert int(model.features[1].num_batches_tracked - state["features.1.num_batches_tracked"]) == 3
    assert not torch.equal(model.features[1].running_mean, state["features.1.running_mean"])
    assert not torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("name", ["scale:0.1+pgd-2", "features-2", "self-ensemble-2"])
def test_attacks_that_look_inside_work_in_both_modes(name):
    """Without dropout and batch norm the modes are the same, and so are the images."""
    model, x = make_vit("vit", classes=3).train(), images(3, side=VITS["vit"].size)
    attack, rng = training_form(make(name)), SampleRNG.of_samples(0, range(3))
    evaluated, trained = (run_inner_attack(attack, model, x, torch.arange(3), rng, mode) for mode in ("eval", "train"))
    assert torch.equal(evaluated, trained)
    assert not torch.equal(evaluated, x)


@pytest.mark.parametrize("name", ["pgd-3", "scale:0.1+pgd-3", "autoattack"])
def test_no_budget_costs_nothing(name):
    model, x = make_vit("vit", classes=3), images(3, side=VITS["vit"].size)
    with count_passes(model) as cost:
        z = run_inner_attack(at_eps(make(name), 0.0), model, x, torch.arange(3))
    assert torch.equal(z, x)
    assert (cost.gradients, cost.forwards) == (0, 0)


@pytest.mark.parametrize("name", ["pgd-3", "pgd-3(restarts=2)", "eot:1+pgd-3", "mifpe-3"])
def test_pgd_uses_mixed_labels_as_they_are(name):
    model, x = TinyNet().eval(), images(12)
    y = torch.arange(12) % 3
    # All but even: the gradient then points elsewhere than that of the likeliest class alone.
    even = 0.34 * nn.functional.one_hot(y, 3).float() + 0.22
    attack, rng = training_form(make(name)), SampleRNG.of_samples(0, range(12))
    z = run_inner_attack(attack, model, x, even, rng)
    assert torch.equal(z, attack(model, x, even, rng))
    assert not torch.equal(z, attack(model, x, y, rng))


@pytest.mark.parametrize("name", ["cw-3", "dlr-3", "gama-3", "kl-3", "fgsm", "fgsm-rs"])
def test_losses_of_one_class_take_the_likeliest(name):
    model, x = TinyNet().eval(), images(12)
    y = torch.arange(12) % 3
    attack, rng = training_form(make(name)), SampleRNG.of_samples(0, range(12))
    mixed, hard = (run_inner_attack(attack, model, x, each, rng) for each in (soft(y), y))
    assert mixed.isfinite().all()
    if not name.startswith("fgsm"):
        assert torch.equal(mixed, hard)


@pytest.mark.parametrize("name", ["apgd-ce(steps=4)", "apgd-t(steps=4)", "fab(steps=3)", "square(queries=20)"])
def test_other_attacks_get_the_likeliest_class(name):
    model, x = TinyNet().eval(), images(6)
    y = torch.arange(6) % 3
    rng = SampleRNG.of_samples(0, range(6))
    assert torch.equal(run_inner_attack(make(name), model, x, soft(y), rng), make(name)(model, x, y, rng))


def test_wrapped_attacks_that_compare_labels_get_the_likeliest_class():
    model, x = make_vit("vit", classes=3), images(3, side=VITS["vit"].size)
    y, rng, attack = torch.arange(3), SampleRNG.of_samples(0, range(3)), make("scale:0.1+pgd-2")
    assert torch.equal(run_inner_attack(attack, model, x, soft(y), rng), attack(model, x, y, rng))


def test_rescaled_cross_entropy_of_mixed_labels():
    logits, target = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.5, 0.3, 0.2]])
    by_hand = -(target * (logits * 5).log_softmax(1)).sum(1)
    assert torch.allclose(rescaled_cross_entropy(logits, target), by_hand)


def test_other_norms_are_threats_too():
    assert at_eps(PGD(L2(0.5)), 0.2).threat == L2(0.2)
