"""Adapting to small images: answers that can be computed in another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitadel.backbones.small_images import adapt_to_small_images, sum_kernel_blocks
from vitadel.backbones.timm_models import create_backbone
from vitadel.errors import UserError

SMALL = {"embed_dim": 24, "depth": 1, "num_heads": 3}


def make(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return create_backbone(name, 5, {**SMALL, **kwargs}).eval()


def images(size: int = 32) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_each_new_kernel_value_is_the_sum_of_its_square() -> None:
    kernel = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    got = sum_kernel_blocks(kernel, 4)
    for row in range(4):
        for column in range(4):
            square = kernel[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            torch.testing.assert_close(got[:, :, row, column], square.sum(dim=(2, 3)))


@pytest.mark.parametrize(("patch", "factor"), [(4, 4), (8, 2), (2, 8)])
def test_response_is_kept_for_images_that_are_constant_on_squares(patch: int, factor: int) -> None:
    x = images()
    model = make("vit_tiny_patch16_224", img_size=32 * factor)
    before = model.patch_embed(x.repeat_interleave(factor, 2).repeat_interleave(factor, 3))
    adapt_to_small_images(model, 32, patch)
    torch.testing.assert_close(model.patch_embed(x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "fan_tiny_8_p4_hybrid"])
def test_whole_network_is_kept_when_the_grid_is(name: str) -> None:
    x = images()
    model = make(name, img_size=128)  # 8 x 8 patches before and after
    before = model(x.repeat_interleave(4, 2).repeat_interleave(4, 3))
    torch.testing.assert_close(adapt_to_small_images(model)(x), before, rtol=1e-4, atol=1e-5)


def patch_tokens(model: Any, x: Tensor) -> int:
    tokens = model.forward_features(x)
    return int(tokens.shape[1]) - int(getattr(model, "num_prefix_tokens", 1))


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "vit_base_patch16_siglip_224",
        "vit_base_patch32_224",
        "xcit_nano_12_p16_224",
        "xcit_nano_12_p8_224",
        "fan_tiny_12_p16_224",
        "fan_tiny_8_p4_hybrid",
    ],
)
def test_64_patch_tokens_at_32_pixels(name: str) -> None:
    model = make(name)
    assert id(adapt_to_small_images(model)) == id(model)
    assert patch_tokens(model, images()) == 64
    assert model(images()).shape == (2, 5)
    assert model.patch_embed.num_patches == 64
    assert model.feature_info[0]["reduction"] == 4


@pytest.mark.parametrize(("size", "patch", "tokens"), [(64, 4, 256), (32, 8, 16), (32, 2, 256)])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "xcit_nano_12_p16_224", "fan_tiny_12_p16_224"])
def test_other_sizes_and_patches(name: str, size: int, patch: int, tokens: int) -> None:
    model = adapt_to_small_images(make(name), size, patch)
    assert patch_tokens(model, images(size)) == tokens


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"])
@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_positions_are_resampled_and_those_of_prefix_tokens_are_not(name: str, mode: Any) -> None:
    model = make(name)
    before = model.pos_embed.detach().clone()
    prefix = before.shape[1] - 14 * 14
    assert prefix == (2 if "distilled" in name else 0)  # DeiT III gives its class token no position
    adapt_to_small_images(model, interpolation=mode)
    assert torch.equal(model.pos_embed[:, :prefix], before[:, :prefix])
    for channel in range(0, 24, 7):
        plane = before[0, prefix:, channel].reshape(1, 1, 14, 14)
        expected = F.interpolate(plane, size=(8, 8), mode=mode, align_corners=False)
        torch.testing.assert_close(model.pos_embed[0, prefix:, channel].reshape(1, 1, 8, 8), expected)


def test_positions_stay_what_they_are_when_they_grow_linearly() -> None:
    """Bilinear resampling of a linear ramp is that ramp at the new centres, known in closed form."""
    model = make("vit_tiny_patch16_224")
    ramp = (torch.arange(14) + 0.5) / 14
    with torch.no_grad():
        model.pos_embed[0, 1:, 0] = ramp.repeat_interleave(14)
    adapt_to_small_images(model, interpolation="bilinear")
    expected = ((torch.arange(8) + 0.5) / 8).repeat_interleave(8)
    torch.testing.assert_close(model.pos_embed[0, 1:, 0].detach(), expected)


@pytest.mark.parametrize(
    ("name", "patch", "strides"),
    [
        ("xcit_nano_12_p16_224", 16, (2, 2, 2, 2)),
        ("xcit_nano_12_p16_224", 8, (1, 2, 2, 2)),
        ("xcit_nano_12_p16_224", 4, (1, 1, 2, 2)),
        ("xcit_nano_12_p16_224", 2, (1, 1, 1, 2)),
        ("xcit_nano_12_p8_224", 4, (1, 2, 2)),
        ("fan_tiny_12_p16_224", 4, (1, 1, 2, 2)),
    ],
)
def test_xcit_loses_strides_and_keeps_all_weights(name: str, patch: int, strides: tuple[int, ...]) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adapt_to_small_images(model, 32, patch)
    assert tuple(part[0].stride[0] for part in model.patch_embed.proj if hasattr(part, "__len__")) == strides
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_frozen_parameters_stay_frozen_and_the_bias_stays_itself() -> None:
    model = make("vit_tiny_patch16_224").requires_grad_(False)
    bias = model.patch_embed.proj.bias
    adapt_to_small_images(model)
    assert model.patch_embed.proj.bias is bias
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert make("vit_tiny_patch16_224").patch_embed.proj.weight.requires_grad


def test_doing_it_twice_changes_nothing_more() -> None:
    model = adapt_to_small_images(make("vit_tiny_patch16_224"))
    before = model(images())
    assert torch.equal(adapt_to_small_images(model)(images()), before)


@pytest.mark.parametrize(
    ("name", "kwargs", "size", "patch", "said"),
    [
        ("vit_tiny_patch16_224", {}, 30, 4, "30 pixels cannot be cut into patches of 4"),
        ("vit_tiny_patch16_224", {}, 32, 0, "cannot be cut into patches of 0"),
        ("vit_tiny_patch16_224", {"img_size": 28, "patch_size": 14}, 32, 4, "14 pixels cannot be shrunk to 4"),
        ("xcit_nano_12_p8_224", {}, 32, 16, "3 convolutions cannot make patches of 16 pixels. Allowed: 1, 2, 4, 8"),
        ("xcit_nano_12_p16_224", {}, 33, 3, "4 convolutions cannot make patches of 3 pixels. Allowed: 1, 2, 4, 8, 16"),
        ("fan_tiny_8_p4_hybrid", {}, 32, 2, "16 pixels cannot be shrunk to 2.*Hybrids of patch 16 go to 8 and 4"),
        ("fan_tiny_8_p4_hybrid", {}, 36, 12, "16 pixels cannot be shrunk to 12"),
        ("cait_xxs24_224", {}, 32, 4, "no adaptation to small images is known for 'Cait'"),
    ],
)
def test_what_cannot_be_adapted_is_a_user_error(name: str, kwargs: Any, size: int, patch: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        adapt_to_small_images(make(name, **kwargs), size, patch)


def test_hybrids_and_unknown_interpolations_are_user_errors() -> None:
    with pytest.raises(UserError, match="no adaptation"):
        adapt_to_small_images(make("vit_tiny_r_s16_p8_224"))
    with pytest.raises(UserError, match="bicubic or bilinear, got 'nearest'"):
        adapt_to_small_images(make("vit_tiny_patch16_224"), interpolation="nearest")  # type: ignore[arg-type]
