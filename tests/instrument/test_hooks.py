"""Modes are restored one by one, and hooks that saw nothing raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features, frozen, hooked, scaled_attention
from vitadel.instrument.hooks import Edge, count_macs
from vits import make_vit, pixels


def mixed() -> nn.Module:
    """Training and learning flags in no order that a single switch could restore."""
    model = make_vit("xcit").train()
    for place, module in enumerate(model.modules()):
        module.training = place % 3 != 0
    for place, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(place % 4 != 1)
    return model


def flags(model: nn.Module) -> tuple[list[bool], list[bool]]:
    return [module.training for module in model.modules()], [each.requires_grad for each in model.parameters()]


class Layers(nn.Sequential):
    """A convolution with 8 x 8 outputs, and a linear layer, after noise."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(()))


def test_multiply_adds_are_counted_without_a_trace() -> None:
    model = Layers().train()
    before, torch_state, statistics = flags(model), torch.get_rng_state(), model[1].running_mean.clone()
    assert count_macs(model, (8, 8)) == 64 * 4 * 3 * 9 + 4 * 64 * 10
    assert flags(model) == before
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.equal(model[1].running_mean, statistics)
    assert count_macs(model, (9, 9)) is None  # it takes no such image
    assert count_macs(nn.Identity(), (8, 8)) is None


def test_multiply_adds_need_no_weights_in_memory() -> None:
    """A DeiT of width 16 on 4 x 4 patches and a class token: per block 12 widths squared per token, and attention."""
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10}
    with torch.device("meta"):
        nowhere = timm.create_model("deit_tiny_patch16_224", **options)
    expected = 16 * 48 * 16 + 2 * (17 * 12 * 16**2 + 2 * 17**2 * 16) + 16 * 10
    assert count_macs(nowhere, (16, 16)) == expected
    assert count_macs(timm.create_model("deit_tiny_patch16_224", **options), (16, 16)) == expected


@pytest.mark.parametrize("trouble", [False, True])
def test_frozen_restores_every_flag(trouble: bool) -> None:
    model = mixed()
    before = flags(model)
    assert all(len(set(kind)) == 2 for kind in before)

    def use() -> None:
        with frozen(model) as same:
            assert same is model
            assert not any(flags(model)[0] + flags(model)[1])
            with frozen(model):
                model(pixels("xcit"))
            assert not any(flags(model)[0] + flags(model)[1])
            if trouble:
                raise ZeroDivisionError

    if trouble:
        with pytest.raises(ZeroDivisionError):
            use()
    else:
        use()
    assert flags(model) == before


def test_frozen_restores_a_module_that_is_used_twice() -> None:
    shared = nn.Dropout()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)).train()
    shared.training = False
    with frozen(model):
        pass
    assert flags(model)[0] == [True, True, False, True]


def test_frozen_leaves_batch_norm_statistics_and_gradients_alone() -> None:
    model, x = make_vit("xcit").train(), pixels("xcit").requires_grad_()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with frozen(model):
        (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert slope.abs().max() > 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["xcit", "levit", "levit_conv", "swin"])
def test_the_gradient_of_one_image_does_not_depend_on_its_batch(family: str) -> None:
    """Torch's batch norm gives another one for a batch of one before tokens."""
    model, x = make_vit(family).double(), pixels(family, 3, dtype=torch.float64)

    def slope(images: Tensor) -> Tensor:
        z = images.clone().requires_grad_()
        return torch.autograd.grad(model(z)[:, 0].sum(), z)[0]

    with frozen(model):
        assert torch.allclose(slope(x[1:2]), slope(x)[1:2], atol=1e-10)
    assert not any(module._forward_hooks for module in model.modules())


def test_frozen_drops_what_levit_remembers_of_its_biases() -> None:
    model, x = make_vit("levit").train(), pixels("levit")
    with frozen(model):
        model(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention_biases"):
                parameter.add_(torch.linspace(-3, 3, parameter.numel()).view_as(parameter))
    with frozen(model):
        after = model(x)
    assert torch.equal(after, model.eval()(x))

    with frozen(model):
        model(x)
    model(x).sum().backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if name.endswith("attention_biases"))


class Skipping(nn.Module):
    """Runs the first block only, behind the backbone's back."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_vit("vit")

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.backbone
        out: Tensor = net.blocks[0](net.patch_embed(x))
        return out


@pytest.mark.parametrize(
    ("block", "site"),
    [
        (block_features, r"'blocks\.1'"),
        (attention_maps, r"'blocks\.1\.attn'"),
        (lambda model: scaled_attention(model, 0.5), r"'blocks\.1\.attn'"),
    ],
)
def test_a_site_that_saw_nothing_is_refused(block: Any, site: str) -> None:
    model, x = Skipping(), pixels("vit")
    with pytest.raises(UserError, match=f"Skipping ran, but nothing was seen at {site}: "), block(model):
        model(x)
    with block(model):
        pass  # never ran: nothing to complain about
    with pytest.raises(ZeroDivisionError), block(model):
        model(x).sum().item() / 0
    with block(model), pytest.raises(RuntimeError):  # the user deals with a run that failed, and goes no further
        model(x[:, :2])
    assert not model._forward_hooks
    assert not model.backbone._forward_hooks


def test_sites_replace_what_passes_them() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(first, second)
    seen: list[Tensor] = []
    x = torch.randn(4, 2)
    plain = model(x)
    sites = [
        Edge("0", first, lambda _: torch.zeros(4, 2), before=True),
        Edge("0", first, lambda output: output + 1),
        Edge("1", second, seen.append),
    ]
    with hooked(model, sites):
        out = model(x)
    torch.testing.assert_close(out, second(first.bias + 1).expand(4, 1))
    assert seen[0] is out
    assert torch.equal(model(x), plain)


def test_sites_attached_before_one_that_fails_are_taken_off() -> None:
    class Failing(Edge):
        def attach(self, fired: Any) -> Any:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(2, 2))
    sites = [Edge("0", model[0], lambda _: None), Failing("0", model[0], lambda _: None)]
    with pytest.raises(ZeroDivisionError), hooked(model, sites):
        pass
    assert not model._forward_hooks
    assert not model[0]._forward_hooks


def test_an_edge_that_is_first_acts_before_hooks_that_were_there() -> None:
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    for first in (False, True):
        with hooked(module, [Edge("module", module, lambda output: output * 0, first=first)]):
            assert (module(torch.ones(1, 2)) == 0).all()
    assert (seen[0] != 0).any()
    assert (seen[1] == 0).all()
