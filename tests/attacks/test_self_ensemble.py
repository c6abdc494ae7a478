"""Logits of every block against heads applied by hand, and the sum that is climbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitadel.attacks.losses import cross_entropy, margin
from vitadel.attacks.threats import Linf
from vitadel.attacks.transfer.self_ensemble import EveryBlock, SelfEnsemble, block_logits
from vitadel.backbones.anatomy import blocks_of
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.instrument import block_features, extra_tokens
from vits import VITS, make_vit, pixels, precise_vit

# How many blocks end where norm and head fit: of PiT, Swin and LeViT the last stage, of CaiT and XCiT class attention.
FITTING = {"pit": 2, "cait": 2, "xcit": 2, "swin": 2, "swinv2": 2, "levit": 2, "levit_conv": 2, "rvt": 2}


def by_hand(model: nn.Module, x: Tensor, family: str) -> list[Tensor]:
    """The backbone's own norm and head on what each fitting block returned; the last one is the last block's."""
    net: Any = model
    with block_features(model) as features:
        net(x)
    own = [each for each in features if each.shape == features[-1].shape]
    if family == "levit":
        return [net.forward_head(each) for each in own]
    if family == "fan":  # class attention pools the tokens of every block
        own = [
            net.class_blocks[1](net.class_blocks[0](torch.cat([net.cls_token.expand(2, 1, -1), each], 1)))
            for each in own
        ]
    if family == "pit":
        own = [each[:, : net.num_tokens] for each in own]
    return [net.forward_head(net.norm(each)) for each in own]


@pytest.mark.parametrize("name", VITS)
def test_every_block_is_read_by_the_models_own_norm_and_head(name: str) -> None:
    model, x = precise_vit(name)
    plain, expected = model(x), by_hand(model, x, VITS[name].family)
    with block_logits(model) as seen:
        own = model(x)
    assert seen.earlier is not None
    assert len(expected) == FITTING.get(name, VITS[name].blocks) == len(seen.earlier) + 1
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([*seen.earlier, own]), torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected[-1], plain, rtol=0, atol=1e-12)
    assert (seen.earlier[0] - own).abs().max() > 1e-3
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("pool", ["avg", "token", "max"])
def test_pooling_is_the_models_own(pool: str) -> None:
    model, x = precise_vit("vit", global_pool=pool)
    with block_logits(model) as seen:
        own = model(x)
    assert seen.earlier is not None
    torch.testing.assert_close(torch.stack([*seen.earlier, own]), torch.stack(by_hand(model, x, "vit")))


def test_distilled_models_answer_by_the_mean_of_both_heads() -> None:
    model, x = precise_vit("deit_distilled")
    net: Any = model
    with block_logits(model) as seen, block_features(model) as features:
        model(x)
    normed = net.norm(features[0])
    assert seen.earlier is not None
    torch.testing.assert_close(seen.earlier[0], (net.head(normed[:, 0]) + net.head_dist(normed[:, 1])) / 2)


def test_what_wraps_the_backbone_is_passed_by_every_block() -> None:
    class Halved(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with extra_tokens(self.inner, tokens):
                out: Tensor = self.inner(x) / 2
            return out

    net, x = precise_vit("vit", global_pool="avg")
    tokens = torch.randn(3, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Halved(wrap(net, (0.5,) * 3, (0.25,) * 3))
    with block_features(net, [0]) as features:
        plain = model(x)
    first: Any = torch.cat([features[0][:, :1], features[0][:, 4:]], dim=1)
    head: Any = net
    with block_logits(model) as seen:
        torch.testing.assert_close(model(x), plain)
    assert seen.earlier is not None
    torch.testing.assert_close(seen.earlier[0], head.forward_head(head.norm(first)) / 2)


@pytest.mark.parametrize("loss", [cross_entropy, margin])
def test_the_goal_is_the_sum_over_blocks(loss: Any) -> None:
    model, x = precise_vit("vit", depth=3)
    y = torch.tensor([1, 4])
    expected = sum(loss(logits, y) for logits in by_hand(model, x, "vit"))
    with block_logits(model) as seen:
        aim = EveryBlock(seen, loss)(model, x, y)
        values, fooled = aim.evaluate(x, 0.0)
        second, _ = aim.keep(torch.tensor([False, True])).evaluate(x[1:], 0.0)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(second, values[1:])
    assert torch.equal(fooled, model(x).argmax(1) != y)


def test_one_step_goes_along_the_sign_of_the_summed_gradient() -> None:
    model, x = precise_vit("vit")
    y = model(x).argmax(1)
    z = x.clone().requires_grad_()
    loss = torch.stack([cross_entropy(logits, y) for logits in by_hand(model, z, "vit")]).sum()
    (grad,) = torch.autograd.grad(loss, z)
    (last,) = torch.autograd.grad(cross_entropy(model(z), y).sum(), z)
    found = SelfEnsemble(Linf(0.02), steps=1)(model, x, y)
    torch.testing.assert_close(found, (x + 0.02 * grad.sign()).clamp(0, 1), rtol=0, atol=1e-12)
    assert (grad.sign() != last.sign()).float().mean() > 0.05


@pytest.mark.parametrize("name", VITS)
def test_raises_the_loss_of_every_family(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    y = model(x).argmax(1)
    z = SelfEnsemble(Linf(0.03), steps=3)(model, x, y)

    def total(images: Tensor) -> Tensor:
        return torch.stack([cross_entropy(logits, y) for logits in by_hand(model, images, VITS[name].family)]).sum(0)

    with torch.no_grad():
        assert (total(z) > total(x)).all()


def test_an_empty_batch_and_a_skipped_norm() -> None:
    model, x = make_vit("vit"), pixels("vit")
    assert SelfEnsemble(Linf(0.03))(model, x[:0], torch.zeros(0, dtype=torch.long)).shape == (0, 3, 32, 32)
    net: Any = model
    net.forward_features = lambda images, **_: net.blocks(net._pos_embed(net.patch_embed(images)))
    with pytest.raises(UserError, match="nothing was seen at 'norm'"), block_logits(model):
        model(x)
    assert len(blocks_of(model)) == 2
