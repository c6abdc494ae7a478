"""Adapt models trained on large images to small ones, such as CIFAR's, without training.

Plain ViT and DeiT: the patch kernel shrinks by summing its blocks (Shao et al. 2021, arXiv:2103.15670; Mo et al. 2022,
arXiv:2210.07540) and the position embedding is resampled. XCiT and FAN: the first stride-2 convolutions of the stem get
stride 1 and weights stay as they are (Debenedetti et al. 2022, arXiv:2209.07399). Models of other families may have
`set_patch_size(image_size, patch_size)`.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import ConvPatchEmbed, Xcit
from torch import Tensor, nn

from vitadel.errors import UserError

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
    model = cast(Any, backbone)  # the layout of timm's classes, which carry no types
    plain = isinstance(model, VisionTransformer) and type(model.patch_embed) is PatchEmbed
    if plain and isinstance(model.patch_embed.proj, nn.Conv2d):
        _adapt_vit(model, image_size, patch_size, interpolation)
    elif isinstance(model, Xcit):
        set_stem_patch_size(model.patch_embed, image_size, patch_size)
    elif hasattr(model, "set_patch_size"):
        model.set_patch_size(image_size, patch_size)
    else:
        raise UserError(
            f"no adaptation to small images is known for '{type(backbone).__name__}'. Known: ViT and DeiT with one "
            "patch convolution, XCiT, FAN. Build other models for the image size they will see; RVT has names for it "
            "that end in _32."
        )
    for entry in model.feature_info:
        entry["reduction"] = patch_size
    return backbone


def sum_kernel_blocks(kernel: Tensor, size: int) -> Tensor:
    """Shrink a (out, in, K, K) kernel to (out, in, size, size), each value the sum of a K/size square.

    A sum, not a mean, keeps the response to an image whose pixels are enlarged to constant squares exactly the same.
    """
    factor = kernel.shape[-1] // size
    blocks = kernel.reshape(*kernel.shape[:2], size, factor, size, factor)
    return blocks.sum(dim=(3, 5))


def _adapt_vit(vit: Any, image_size: int, patch_size: int, interpolation: Interpolation) -> None:
    embed = vit.patch_embed
    old: nn.Conv2d = embed.proj
    if old.kernel_size[0] % patch_size:
        raise cannot_shrink(old.kernel_size[0], patch_size, "Patch-16 models go to 8, 4 and 2")
    old_grid = embed.grid_size
    embed.proj = shrink_kernel(old, patch_size)
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
                antialias=False,  # as in both papers; timm's default differs
            )
        vit.pos_embed = nn.Parameter(resampled, requires_grad=vit.pos_embed.requires_grad)


def cannot_shrink(old: int, new: int, known: str) -> UserError:
    """The error for a patch size that does not divide the model's own."""
    return UserError(
        f"patches of {old} pixels cannot be shrunk to {new}: blocks of the kernel are summed, so the new patch size "
        f"must divide the old one. {known}."
    )


def shrink_kernel(old: nn.Conv2d, size: int) -> nn.Conv2d:
    """The convolution with its kernel and stride shrunk to `size`; the same module if it has that size."""
    if size == old.kernel_size[0]:
        return old
    new = nn.Conv2d(old.in_channels, old.out_channels, size, size, bias=False, device="meta")
    new.weight = nn.Parameter(sum_kernel_blocks(old.weight.detach(), size), requires_grad=old.weight.requires_grad)
    new.bias = old.bias
    new.training = old.training
    return new


def set_stem_patch_size(embed: ConvPatchEmbed, image_size: int | tuple[int, int], patch_size: int) -> None:
    """Set the strides of a stem of stride-2 convolutions (XCiT, FAN) so that a token covers `patch_size` pixels."""
    convolutions = [cast(nn.Conv2d, part[0]) for part in embed.proj if isinstance(part, nn.Sequential)]
    halvings = patch_size.bit_length() - 1
    if 2**halvings != patch_size or halvings > len(convolutions):
        raise UserError(
            f"a stem of {len(convolutions)} convolutions cannot make patches of {patch_size} pixels. "
            f"Allowed: {', '.join(str(2**n) for n in range(len(convolutions) + 1))}."
        )
    for place, convolution in enumerate(convolutions):
        stride = 1 if place < len(convolutions) - halvings else 2
        convolution.stride = (stride, stride)
    height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    embed.patch_size = patch_size
    embed.img_size = (height, width)
    embed.num_patches = (height // patch_size) * (width // patch_size)
