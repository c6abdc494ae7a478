"""The corruption model and the attack that it makes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from toys import Constant, TinyNet, images
from vitadel.attacks.patches.corruption_model import CorruptionModel, alignment, corrupted, keep_mask
from vitadel.attacks.patches.learned_patches import LearnedPatches
from vitadel.attacks.patches.patch_threat import Patches, changed_patches
from vitadel.attacks.patches.random_patches import RandomPatches
from vitadel.attacks.threats import Linf
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.instrument import block_features
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Calibrated
from vits import make_vit, pixels

BALL = Linf(8 / 255)


class OnePatch(nn.Module):
    """Answers 0 as long as the patch in row 1, column 2 is bright: noise there, and nowhere else, decides."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x[:, :, 4:8, 8:12].mean((1, 2, 3))
        return torch.stack([20 * (bright - 0.75), torch.zeros_like(bright)], 1)


def bright_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = 0.9 + 0.1 * SampleRNG.of_samples(seed, range(count)).uniform(3, 16, 16)
    return x, torch.zeros(count, dtype=torch.long)


BRIGHT = [bright_images(16, seed) for seed in (5, 6)]


def learned(model: nn.Module, calibration, seed: int = 0, **settings) -> LearnedPatches:
    attack = LearnedPatches(BALL, **settings).prepared(model, calibration, seed)
    assert isinstance(attack, LearnedPatches)
    return attack


def test_the_network_has_the_papers_size_and_torchs_start():
    rng = torch.get_rng_state()
    model = CorruptionModel(14, 14, 16)
    assert torch.equal(torch.get_rng_state(), rng)
    assert sum(p.numel() for p in model.parameters()) == 3 * 16 * 16 + 196 * 196 == 39_184
    assert model.look.abs().max().item() == pytest.approx(1 / math.sqrt(768), rel=0.02)
    assert model.mix.abs().max().item() == pytest.approx(1 / 14, rel=0.01)
    other = CorruptionModel(14, 14, 16, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(model.mix, other.mix)


def test_scores_are_a_convolution_gelu_and_a_mixing():
    model = CorruptionModel(2, 3, 4)
    x = images(2, side=12)[:, :, :8]
    seen = torch.stack([(x[:, :, r : r + 4, c : c + 4] * model.look).sum((1, 2, 3)) for r in (0, 4) for c in (0, 4, 8)])
    wanted = model.mix @ (seen * 0.5 * (1 + torch.erf(seen / math.sqrt(2))))
    assert torch.allclose(model(x), wanted.T, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = model(x)
    assert torch.equal(under_autocast, model(x))


def test_other_image_sizes_are_refused():
    with pytest.raises(UserError, match=r"made for 2 x 3 patches of side 4.*have 2 x 2"):
        CorruptionModel(2, 3, 4)(images(1))


def test_the_mask_has_exactly_as_many_holes_and_lets_gradients_through():
    scores = torch.tensor([[0.3, -0.2, 0.9, 0.1], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    keep = keep_mask(scores, 2)
    assert keep.tolist() == [[1, 0, 1, 0], [0, 0, 1, 1]]
    (grad,) = torch.autograd.grad((keep * torch.arange(4.0)).sum(), scores)
    assert grad.tolist() == [[0, 1, 2, 3]] * 2
    assert keep_mask(scores, 0).min() == 1


def test_what_is_not_kept_is_noise():
    x, noise = images(1), 1 - images(1)
    z = corrupted(x, torch.tensor([[1.0, 0.0, 1.0, 1.0]]), noise, 4)
    assert torch.equal(z[..., :4, 4:], noise[..., :4, 4:])
    assert torch.equal(changed_patches(z, x, 4), torch.tensor([[False, True, False, False]]))


def test_alignment_is_a_mean_of_means():
    a, b = torch.zeros(2, 3, 4), torch.zeros(2, 7)
    assert alignment([a, b], [a + 2, b - 1]).item() == pytest.approx((4 + 1) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("paper", [False, True])
def test_the_patch_that_decides_is_found(seed, paper):
    attack = learned(OnePatch(), BRIGHT, seed, share=1 / 16, masks=1, side=4, objective="ce", paper=paper)
    x, y = bright_images(32, 0)
    z = attack(OnePatch(), x, y)
    chosen = changed_patches(z, x, 4)
    assert chosen.sum() == 32
    assert chosen[:, 6].all()
    assert (OnePatch()(z).argmax(1) == 1).all()
    by_chance = RandomPatches(BALL, share=1 / 16, masks=1, side=4)(OnePatch(), x, y)
    assert (OnePatch()(by_chance).argmax(1) == 0).float().mean() > 0.7


def feature_distance(model: nn.Module, x: Tensor, z: Tensor) -> float:
    with torch.no_grad(), block_features(model) as features:
        model(x)
        clean = list(features)
        model(z)
        return torch.stack([(a - b).square().mean() for a, b in zip(clean, features, strict=True)]).mean().item()


def test_it_moves_features_further_than_chance_on_new_images():
    model = make_vit("vit")
    with torch.no_grad():
        model.pos_embed[:, 6:8] *= 8  # two patches whose place says so much that their content says nothing
    batches = [(pixels("vit", 16, seed), torch.zeros(16, dtype=torch.long)) for seed in (3, 4, 5)]
    attack = learned(model, batches, share=0.25, masks=1, training_steps=40, noise="pixel")
    x, y = pixels("vit", 64, seed=9), torch.zeros(64, dtype=torch.long)
    chance = [
        RandomPatches(BALL, share=0.25, masks=1, noise="pixel")(model, x, y, SampleRNG.of_samples(seed, range(64)))
        for seed in range(5)
    ]
    by_chance = [feature_distance(model, x, z) for z in chance]
    assert feature_distance(model, x, attack(model, x, y)) > max(by_chance)
    assert not changed_patches(attack(model, x, y), x, 8)[:, 5:7].float().mean() > 0.1


def test_preparation_is_decided_by_the_seed_and_leaves_no_trace():
    model = make_vit("vit").train()
    batches = [(pixels("vit", 4), torch.zeros(4, dtype=torch.long))]
    weights, rng = [p.clone() for p in model.parameters()], torch.get_rng_state()
    first, again, other = (learned(model, batches, seed, training_steps=3) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert first.selector is not None
    start = CorruptionModel(4, 4, 8, generator=torch.Generator().manual_seed(0))
    for name, weight in first.selector.named_parameters():
        assert torch.equal(weight, again.selector.get_parameter(name))
        assert not torch.equal(weight, other.selector.get_parameter(name))
        assert not torch.equal(weight, start.get_parameter(name))
        assert not weight.requires_grad
    x, y = pixels("vit", 5, seed=7), torch.zeros(5, dtype=torch.long)
    assert torch.equal(first(model, x, y), again(model, x, y))


def test_the_selector_sees_what_the_model_sees():
    """Normalized pixels: the same network behind another normalization of shifted images makes the same choice."""
    x, y = 0.5 * images(8, side=16), torch.zeros(8, dtype=torch.long)
    selector = CorruptionModel(4, 4, 4)
    attack = dataclasses.replace(LearnedPatches(BALL, side=4, share=0.2), selector=selector)
    one = attack(wrap(OnePatch(), mean=(0.0,) * 3, std=(0.5,) * 3), x, y)
    two = attack(wrap(OnePatch(), mean=(0.5,) * 3, std=(0.5,) * 3), x + 0.5, y)
    assert torch.equal(changed_patches(one, x, 4), changed_patches(two, x + 0.5, 4))
    lowest = selector(2 * x).argsort(1)[:, :3].sort(1).values
    assert torch.equal(changed_patches(one, x, 4).nonzero()[:, 1].view(8, 3), lowest)


def test_unprepared_it_says_what_to_do():
    attack = LearnedPatches(BALL)
    assert isinstance(attack, Calibrated)
    assert attack.calibration_images == 256
    with pytest.raises(UserError, match=r"trained on the model first.*attack\.prepared\(model, batches\)"):
        attack(make_vit("vit"), pixels("vit"), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("calibration", [[], [(torch.zeros(0, 3, 32, 32), torch.zeros(0, dtype=torch.long))]])
def test_no_images_to_learn_from(calibration):
    with pytest.raises(UserError, match="no calibration images"):
        LearnedPatches(BALL).prepared(make_vit("vit"), calibration)


def test_a_stream_that_ends_is_refused_unless_it_is_long_enough():
    model = make_vit("vit")
    for paper in (False, True):
        stream = ((pixels("vit", 2, seed), torch.zeros(2, dtype=torch.long)) for seed in range(2))
        with pytest.raises(UserError, match="used only once"):
            LearnedPatches(BALL, training_steps=3, paper=paper).prepared(model, stream)
    stream = ((pixels("vit", 2, seed), torch.zeros(2, dtype=torch.long)) for seed in range(2))
    assert learned(model, stream, training_steps=2).selector is not None


@pytest.mark.parametrize("name", ["dinov2_registers", "cait", "xcit", "swin", "levit", "rvt", "fan"])
@pytest.mark.parametrize("objective", ["features", "ce"])
def test_works_on_every_family_with_a_grid(name, objective):
    model, x, y = make_vit(name), pixels(name, 4), torch.zeros(4, dtype=torch.long)
    attack = learned(model, [(x, y)], objective=objective, training_steps=2, share=0.2, masks=2)
    rules = attack.rules(model, x)
    assert (rules.size(attack(model, x, y), x) == rules.eps).all()


def test_models_without_a_grid_need_a_side_and_the_logits():
    model, x = TinyNet().eval(), images(4)
    y = model(x).argmax(1)
    with pytest.raises(UserError, match="not known here"):
        LearnedPatches(BALL).prepared(model, [(x, y)])
    attack = learned(model, [(x, y)], side=4, objective="ce", training_steps=2)
    assert (Patches(1, 4).size(attack(model, x, y), x) == 1).all()


@pytest.mark.parametrize("paper", [False, True])
def test_a_constant_model_teaches_nothing_and_breaks_nothing(paper):
    x, y = images(3), torch.zeros(3, dtype=torch.long)
    attack = learned(Constant(), [(x, y)], side=4, objective="ce", training_steps=2, paper=paper)
    assert attack(Constant(), x, y).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "feature"}, "did you mean features"),
        ({"training_steps": 0}, "at least 1 training step"),
        ({"share": 2.0}, r"in \(0, 1\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        LearnedPatches(BALL, **settings)
