"""Does AFAT's opponent find what matters? A model with one decisive patch; the gain and the gradient share by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training_toys import FakeTraining

from vitadel.attacks.pgd import PGD
from vitadel.attacks.threats import Linf
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.instrument.hooks import block_features
from vitadel.statistics import bootstrap_ratio
from vitadel.training.objectives.afat import Afat
from vits import make_vit

DECISIVE = 9  # of 16 patches of 8 px


class Run(FakeTraining):
    folder = None


def planted(others: float = 0.02):
    """A ViT that sees one patch as it is and the others with hardly any contrast."""
    model = wrap(make_vit("vit"), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)).eval()
    contrast = torch.full((1, 1, 4, 4), others)
    contrast.view(-1)[DECISIVE] = 1
    contrast = contrast.repeat_interleave(8, 2).repeat_interleave(8, 3)
    model.backbone.patch_embed.register_forward_pre_hook(lambda _module, args: args[0] * contrast)
    return model


def pictures(count: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def learned(objective: Afat, model, x, tmp_path, steps: int = 25):
    """The opponent after some steps against a model that does not learn; what its epoch logs and reports."""
    run, y = Run(model, batches=[(x, torch.arange(len(x)) % 5)]), torch.arange(len(x)) % 5
    run.folder = tmp_path
    for run.step in range(steps):
        with objective.patch_selector.around_step(run, lambda: ()):
            objective(model, x, x, y)["loss"].backward()
    model.zero_grad()
    objective.patch_selector.after_epoch(run)
    return run


@pytest.mark.slow
def test_a_credited_opponent_finds_the_decisive_patch(tmp_path):
    """Random masks of 2 in 16 patches hit it once in eight: the gain can be 8."""
    model, x = planted(), pictures()
    run = learned(Afat(learning="credited", lr=1e-2), model, x, tmp_path)
    assert run.logged["opponent_gain"] > 4
    assert run.logged["opponent_gain_low"] > 3
    assert run.logged["opponent_gain_low"] <= run.logged["opponent_gain"] <= run.logged["opponent_gain_high"]
    assert not run.reported


def test_an_opponent_at_its_start_is_reported_as_no_better_than_chance(tmp_path):
    model, x = planted(others=1.0), pictures()
    objective = Afat(learning="straight-through", lr=1e-9)
    run = learned(objective, model, x, tmp_path, steps=1)
    assert run.logged["opponent_gain_low"] <= 1
    (warning,) = run.reported
    assert "no worse for the model than random ones: opponent_gain" in warning
    assert "objective.learning=credited" in warning
    objective.patch_selector.after_epoch(run)
    assert len(run.reported) == 1  # once, until the gain has been above 1


@pytest.mark.parametrize("selector", ["alignment", "cross-entropy"])
def test_credit_is_the_damage_of_each_patch(selector):
    """For a model that is linear in the mask, credit by hand: slope times mask, less the mean over noisy patches."""
    from vitadel.attacks.patches.corruption_model import credited_scores
    from vitadel.runtime.rng import SampleRNG

    scores = torch.zeros(3, 6, requires_grad=True)
    harm = torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    rng = SampleRNG.of_samples(0, range(3))
    credited_scores(scores, lambda keep: -(harm * keep).sum(), 2, rng).backward()
    noisy = rng.stream("patches").permutation(6) < 2
    expected = torch.where(noisy, -harm + harm[noisy].mean(), 0.0)
    torch.testing.assert_close(scores.grad, expected)
    model, x = planted(), pictures(4)
    y = torch.tensor([0, 3, 1, 4])
    objective = Afat(learning="credited", selector=selector)
    before = [each.clone() for each in model.parameters()]
    model.train()
    objective(model, x, x, y)["loss"].backward()
    assert model.training
    assert all(
        each.requires_grad and torch.equal(each, old) for each, old in zip(model.parameters(), before, strict=True)
    )
    assert objective.patch_selector._model.mix.grad.abs().max() > 0


def test_credit_teaches_the_model_nothing():
    model, x = planted(), pictures(4)
    y, grads = torch.tensor([0, 3, 1, 4]), []
    for learning in ("straight-through", "credited"):
        model.zero_grad()
        Afat(weight=0.3, learning=learning)(model, x, x, y)["loss"].backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_gradient_share_by_two_backward_passes(tmp_path):
    model, x = planted(), pictures(8)
    objective = Afat(weight=0.7, selector="random", label_smoothing=0.1)
    run = learned(objective, model, x, tmp_path, steps=0)
    assert set(run.logged) == {"gradient_share"}
    seen = []
    hook = model.register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach()))
    objective.patch_selector.after_epoch(run)
    hook.remove()
    altered, clean = seen[-1].chunk(2)
    assert torch.equal(clean, x)
    lengths = []
    with block_features(model) as features:
        natural = F.cross_entropy(model(clean), torch.arange(8) % 5, label_smoothing=0.1)
        own = list(features)
        model(altered)
        apart = 0.7 * torch.stack([F.mse_loss(a, b) for a, b in zip(features, own, strict=True)]).mean()
    for loss in (natural, apart):
        slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        lengths.append(torch.cat([each.flatten() for each in slopes if each is not None]).norm().item())
    assert run.logged["gradient_share"] == pytest.approx(lengths[1] / sum(lengths), rel=1e-4)
    nothing = learned(Afat(weight=0.0, selector="random"), model, x, tmp_path, steps=0)
    assert nothing.logged["gradient_share"] == 0


def test_nothing_corrupted_has_no_gain(tmp_path):
    run = learned(Afat(share=0), planted(), pictures(4), tmp_path, steps=1)
    assert "opponent_gain" not in run.logged


def test_a_token_cannot_be_dropped_in_part():
    with pytest.raises(UserError, match="a token is dropped or not"):
        Afat(fill="drop", learning="credited")


def test_the_interval_of_a_ratio_uses_pairs():
    """Ratios of pairs that are all 2 have no spread, however much the values differ."""
    others = np.random.default_rng(0).uniform(0.1, 3, 50)
    assert bootstrap_ratio(2 * others, others) == pytest.approx((2, 2))
    low, high = bootstrap_ratio(np.random.default_rng(1).uniform(0.1, 3, 50), others)
    assert low < 1 < high


def test_the_weight_is_calibrated_to_a_share_of_the_gradient(tmp_path):
    """w = s / (1 - s) |g1| / |g2|, from gradients of another weight; all selectors start with the same one."""
    model, x = planted(), pictures(8)
    share = learned(Afat(weight=0.7, selector="random"), model, x, tmp_path, steps=0).logged["gradient_share"]
    expected = 0.1 / 0.9 * 0.7 * (1 - share) / share
    weights = []
    for selector in ("random", "alignment"):
        objective = Afat(gradient_share=0.1, selector=selector)
        run = learned(objective, model, x, tmp_path, steps=1)
        weights.append(run.logged["alignment_weight"])
        saved = objective.patch_selector.state()
        again = Afat(gradient_share=0.1, selector=selector)
        again.patch_selector.load(saved)
        assert again.patch_selector.weight == objective.patch_selector.weight  # a resumed training keeps it
    assert weights == [pytest.approx(expected, rel=1e-4)] * 2
    run = learned(Afat(gradient_share=0.1, selector="random"), model, x, tmp_path, steps=1)
    assert run.logged["gradient_share"] == pytest.approx(0.1, rel=1e-4)  # the model did not learn meanwhile


def test_a_calibrated_weight_enters_the_loss(tmp_path):
    model, x = planted(), pictures(8)
    objective = Afat(gradient_share=0.1, selector="random")
    learned(objective, model, x, tmp_path, steps=1)
    found = objective(model, x, x, torch.arange(8) % 5)
    weighted = objective.patch_selector.weight * found["alignment"]
    torch.testing.assert_close(found["loss"].detach(), found["natural"] + weighted)


def test_shares_that_no_weight_gives_are_refused(tmp_path):
    with pytest.raises(UserError, match="gradient_share must be at least 0 and below 1, got 1"):
        Afat(gradient_share=1)
    with pytest.raises(UserError, match="share 0 corrupts none"):
        Afat(gradient_share=0.1, share=0)
    gray = torch.full((2, 3, 32, 32), 0.5)  # its mean color is what patches are filled with
    with pytest.raises(UserError, match="no gradient at the first step"):
        learned(Afat(gradient_share=0.1, selector="random", fill="zero"), planted(), gray, tmp_path, steps=1)


def test_with_an_attack_adversarial_images_are_aligned_and_classified():
    model, x = planted(), pictures(4)
    z, y = (x + 0.1).clamp(0, 1), torch.tensor([0, 3, 1, 4])
    on_z = Afat(attack=PGD(Linf(8 / 255), steps=1), selector="random")(model, x, z, y)
    for name, value in Afat(selector="random")(model, z, z, y).items():
        torch.testing.assert_close(on_z[name], value)
