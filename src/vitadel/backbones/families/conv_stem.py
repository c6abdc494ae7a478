"""The stem of stride-2 convolutions that XCiT and FAN share: convolutions that lose their stride make smaller patches.

The first ones lose it, and no weight changes (Debenedetti et al. 2022, arXiv:2209.07399).
"""

from __future__ import annotations

from typing import cast

from timm.models.xcit import ConvPatchEmbed
from torch import nn

from vitadel.errors import UserError

__all__ = ["set_patch_size"]


def set_patch_size(embed: ConvPatchEmbed, image_size: int | tuple[int, int], patch_size: int) -> None:
    """Change the strides in place, so that a token stands for `patch_size` pixels."""
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
