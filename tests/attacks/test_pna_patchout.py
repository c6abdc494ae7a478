"""PNA and PatchOut: which patches take part, what the gradient passes by, and what is left when both are off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks.goals import gradient
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum
from vitadel.attacks.threats import Linf
from vitadel.attacks.transfer.pna_patchout import PatchOut, PnaPatchOut
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.instrument import extra_tokens
from vitadel.instrument.attention import constant_attention
from vitadel.instrument.tokens import patch_grid
from vitadel.runtime.rng import SampleRNG
from vits import VITS, make_vit, pixels, precise_vit

EPS = 8 / 255
GRIDS = {"pit": (7, 7), "swin": (8, 8), "swinv2": (8, 8)}  # of their first block; all others have 4 x 4 patches


def slope(goal: PatchOut, model: nn.Module, x: Tensor, z: Tensor, y: Tensor, progress: float = 0.0) -> Tensor:
    z = z.clone().requires_grad_()
    values, _ = goal(model, x, y).evaluate(z, progress)
    return gradient(values, z)


def patches_of(grad: Tensor, side: int = 8) -> Tensor:
    """Whether anything of each patch is not zero, (batch, patches)."""
    cells = grad.unfold(2, side, side).unfold(3, side, side)
    return (cells != 0).any(-1).any(-1).any(1).flatten(1)


@pytest.fixture
def scene() -> tuple[nn.Module, Tensor, Tensor, SampleRNG]:
    model, x = precise_vit("vit")
    return model, x, model(x).argmax(1), SampleRNG.of_samples(0, range(2))


@pytest.mark.parametrize("name", VITS)
def test_the_grid_is_that_of_the_first_block(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    with count_passes(model) as cost:
        assert patch_grid(model, x) == GRIDS.get(name, (4, 4))
    assert cost.forwards == 0  # it breaks off after the embedding
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_extra_tokens_are_no_patches_and_wide_images_have_wide_grids() -> None:
    model = make_vit("vit", dynamic_img_size=True)
    with extra_tokens(model, torch.ones(3, 24)):
        assert patch_grid(model, torch.rand(1, 3, 32, 32)) == (4, 4)
    assert patch_grid(model, torch.rand(1, 3, 32, 48)) == (4, 6)
    assert patch_grid(model, torch.rand(1, 3, 48, 32)) == (6, 4)


def test_tokens_that_form_no_grid_are_refused() -> None:
    model = make_vit("vit", patch_size=(8, 4))
    with pytest.raises(UserError, match=r"32 patch tokens form no grid of squares on images of 32 x 32"):
        patch_grid(model, pixels("vit"))


def test_only_the_chosen_share_of_patches_has_a_gradient(scene) -> None:
    model, x, y, rng = scene
    seen = []
    for progress in (0.0, 0.1, 0.2, 0.3):
        grad = slope(PatchOut(rng), model, x, x, y, progress)  # at the clean image the length has no gradient
        taken = patches_of(grad)
        assert (taken.sum(1) == 11).all()  # 130 of 196 is 0.663; of 16, that is 10.6
        assert torch.equal(patches_of(slope(PatchOut(rng), model, x, x, y, progress)), taken)
        seen.append(taken)
    together = torch.stack(seen)
    assert len(together.flatten(0, 1).unique(dim=0)) == 8  # another choice for each sample and each step
    quarter = patches_of(slope(PatchOut(rng, share=0.25), model, x, x, y))
    assert (quarter.sum(1) == 4).all()


def test_196_patches_keep_130() -> None:
    model = make_vit("vit", img_size=112)
    x = torch.rand(1, 3, 112, 112)
    grad = slope(PatchOut(SampleRNG.of_samples(0, [0]), weight=0.0), model, x, x, torch.tensor([0]))
    assert patches_of(grad).sum() == 130


def test_the_model_is_shown_the_clean_image_in_the_other_patches(scene) -> None:
    model, x, y, rng = scene
    z = Linf(0.1).random(x, rng)
    chosen = patches_of(slope(PatchOut(rng, weight=0.0), model, x, z, y)).view(2, 1, 4, 4).double()
    mask = nn.functional.interpolate(chosen, scale_factor=8, mode="nearest").bool()
    values, _ = PatchOut(rng, weight=0.0)(model, x, y).evaluate(z, 0.0)
    torch.testing.assert_close(values, cross_entropy(model(torch.where(mask, z, x)), y), rtol=0, atol=1e-12)


def test_the_length_counts_per_sample_and_pulls_on_every_patch(scene) -> None:
    model, x, y, rng = scene
    z = Linf(0.1).random(x, rng)
    (with_length, _), (without, _) = (
        PatchOut(rng, weight=weight)(model, x, y).evaluate(z, 0.0) for weight in (0.5, 0.0)
    )
    lengths = torch.stack([(z[i] - x[i]).square().sum().sqrt() for i in range(2)])
    torch.testing.assert_close(with_length - without, 0.5 * lengths)
    difference = slope(PatchOut(rng, weight=0.5), model, x, z, y) - slope(PatchOut(rng, weight=0.0), model, x, z, y)
    torch.testing.assert_close(difference, 0.5 * (z - x) / lengths.view(-1, 1, 1, 1))


def test_pna_changes_gradients_and_neither_logits_nor_verdicts(scene) -> None:
    model, x, y, rng = scene
    z = Linf(0.1).random(x, rng)
    goal = PatchOut(rng)
    plain, (values, verdicts) = slope(goal, model, x, z, y), goal(model, x, y).evaluate(z, 0.0)
    with constant_attention(model):
        held, (held_values, held_verdicts) = slope(goal, model, x, z, y), goal(model, x, y).evaluate(z, 0.0)
    torch.testing.assert_close(held_values, values, rtol=0, atol=1e-11)
    assert torch.equal(held_verdicts, verdicts)
    assert (held - plain).abs().max() > 1e-3 * plain.abs().max()


def test_one_step_goes_along_the_sign_of_the_masked_gradient(scene) -> None:
    model, x, y, rng = scene
    with constant_attention(model):
        grad = slope(PatchOut(rng), model, x, x, y)
    z = PnaPatchOut(Linf(EPS), steps=1)(model, x, y, rng)
    torch.testing.assert_close(z, (x + EPS * grad.sign()).clamp(0, 1), rtol=0, atol=1e-12)


def test_momentum_starts_alike_and_then_differs(scene) -> None:
    model, x, y, rng = scene
    plain, with_momentum = (
        [PnaPatchOut(Linf(EPS), k, decay, EPS / 8)(model, x, y, rng) for k in (1, 4)] for decay in (0, 1)
    )
    torch.testing.assert_close(plain[0], with_momentum[0], rtol=0, atol=1e-12)
    assert not torch.allclose(plain[1], with_momentum[1])


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_with_both_off_it_is_mi_fgsm_on_any_model(decay: float) -> None:
    model, x = TinyNet().double().eval(), images(5).double()
    y = model(x).argmax(1)
    ours = PnaPatchOut(Linf(EPS), 6, decay=decay, weight=0.0, pna=False, patchout=False)(model, x, y)
    usual = PGD(Linf(EPS), stepper=Momentum(decay), steps=6, random_start=False, stop_when_fooled=False)(model, x, y)
    torch.testing.assert_close(ours, usual, rtol=0, atol=1e-12)


def test_each_half_alone_differs_from_both(scene) -> None:
    model, x, y, rng = scene
    found = [
        PnaPatchOut(Linf(EPS), 3, pna=pna, patchout=patchout)(model, x, y, rng)
        for pna in (True, False)
        for patchout in (True, False)
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(found) for b in found[:i])


def test_verdicts_are_on_the_whole_image(scene) -> None:
    model, x, y, rng = scene
    wrong = (y + 1) % 5
    _, verdicts = PatchOut(rng)(model, x, wrong).evaluate(x, 0.0)
    _, silent = PatchOut(rng, verdicts=False)(model, x, wrong).evaluate(x, 0.0)
    assert verdicts.all()
    assert not silent.any()
    assert torch.equal(PnaPatchOut(Linf(EPS), stop_when_fooled=True)(model, x, wrong, rng), x)
    assert not torch.equal(PnaPatchOut(Linf(EPS))(model, x, wrong, rng), x)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=f"above 0 and at most 1, got {share}"):
        PnaPatchOut(Linf(EPS), share=share)
