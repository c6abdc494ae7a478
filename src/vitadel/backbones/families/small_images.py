"""Fit models trained on large images to small ones, such as CIFAR's, without training.

Plain ViT and DeiT: the patch kernel shrinks by summing its blocks (Shao et al. 2021, arXiv:2103.15670; Mo et al. 2022,
arXiv:2210.07540) and the position embedding is resampled. XCiT, and FAN with its stem: the first convolutions of the
stem lose their stride (Debenedetti et al. 2022, arXiv:2209.07399); weights stay as they are. FAN hybrids: the kernel of
the first convolution shrinks as ViT's does.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from vitadel.backbones.families.conv_stem import set_patch_size
from vitadel.backbones.families.fan import Fan
from vitadel.backbones.families.fan_stems import HybridEmbed
from vitadel.errors import UserError

__all__ = ["adapt_to_small_images", "sum_kernel_blocks"]

Interpolation = Literal["bicubic", "bilinear"]


def adapt_to_small_images(
    backbone: nn.Module, image_size: int = 32, patch_size: int = 4, interpolation: Interpolation = "bicubic"
) -> nn.Module:
    """Change the backbone in place, and return it: (image_size / patch_size)**2 patch tokens afterwards.

    `interpolation` is that of a learned position embedding: bicubic as Debenedetti et al., bilinear as Mo et al.
    """
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise UserError(
            f"images of {image_size} pixels cannot be cut into patches of {patch_size}. "
            "The patch size must divide the image size; 4 for 32 pixels is usual."
        )
    if interpolation not in ("bicubic", "bilinear"):
        raise UserError(f"interpolation must be bicubic or bilinear, got '{interpolation}'.")
    parts = cast(Any, backbone)  # the layout of timm's classes, which carry no types
    if isinstance(parts, VisionTransformer) and type(parts.patch_embed) is PatchEmbed:
        _adapt_vit(parts, image_size, patch_size, interpolation)
    elif isinstance(parts, Fan) and isinstance(parts.patch_embed, HybridEmbed):
        _adapt_hybrid(parts.patch_embed, image_size, patch_size)
    elif isinstance(parts, Xcit | Fan):
        set_patch_size(parts.patch_embed, image_size, patch_size)
    else:
        raise UserError(
            f"no adaptation to small images is known for '{type(backbone).__name__}'. Known: ViT and DeiT with one "
            "patch convolution, XCiT, FAN. Build other models for the image size they will see; RVT has names for it "
            "that end in _32."
        )
    for entry in parts.feature_info:
        entry["reduction"] = patch_size
    return backbone


def sum_kernel_blocks(kernel: Tensor, size: int) -> Tensor:
    """A (out, in, K, K) kernel shrunk to (out, in, size, size), each value the sum of a K/size square.

    A sum, not a mean: the response to an image whose pixels stand for constant squares is then exactly what it was.
    """
    factor = kernel.shape[-1] // size
    blocks = kernel.reshape(*kernel.shape[:2], size, factor, size, factor)
    return blocks.sum(dim=(3, 5))


def _adapt_vit(vit: Any, image_size: int, patch_size: int, interpolation: Interpolation) -> None:
    embed = vit.patch_embed
    old: nn.Conv2d = embed.proj
    if old.kernel_size[0] % patch_size:
        raise _cannot_shrink(old.kernel_size[0], patch_size, "Patch-16 models go to 8, 4 and 2")
    old_grid = embed.grid_size
    embed.proj = _with_kernel(old, patch_size)
    embed.patch_size = (patch_size, patch_size)
    embed.img_size = (image_size, image_size)
    embed.grid_size = (image_size // patch_size, image_size // patch_size)
    embed.num_patches = embed.grid_size[0] * embed.grid_size[1]
    if vit.pos_embed is not None and old_grid != embed.grid_size:
        with torch.no_grad():
            resampled = resample_abs_pos_embed(
                vit.pos_embed,
                new_size=embed.grid_size,
                old_size=old_grid,
                num_prefix_tokens=0 if vit.no_embed_class else vit.num_prefix_tokens,
                interpolation=interpolation,
                antialias=False,  # as both papers did it; timm's own default differs
            )
        vit.pos_embed = nn.Parameter(resampled, requires_grad=vit.pos_embed.requires_grad)


def _adapt_hybrid(embed: HybridEmbed, image_size: int, patch_size: int) -> None:
    first = cast(nn.Conv2d, embed.stem[0])
    size, rest = divmod(first.kernel_size[0] * patch_size, embed.patch_size)
    if rest or first.kernel_size[0] % size:
        raise _cannot_shrink(embed.patch_size, patch_size, "Hybrids of patch 16 go to 8 and 4")
    embed.stem[0] = _with_kernel(first, size)
    embed.note_size((image_size, image_size))


def _cannot_shrink(old: int, new: int, known: str) -> UserError:
    return UserError(
        f"patches of {old} pixels cannot be shrunk to {new}: blocks of the kernel are summed, so the new patch size "
        f"must divide the old one. {known}."
    )


def _with_kernel(old: nn.Conv2d, size: int) -> nn.Conv2d:
    """The convolution with its kernel shrunk, itself if there is nothing to shrink."""
    if size == old.kernel_size[0]:
        return old
    new = nn.Conv2d(old.in_channels, old.out_channels, size, size, bias=False, device="meta")
    new.weight = nn.Parameter(sum_kernel_blocks(old.weight.detach(), size), requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    new.training = old.training
    return new
