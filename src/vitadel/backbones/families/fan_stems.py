"""Stems of FAN (Zhou et al., ICML 2022): four convolutions, or the first two stages of a ConvNeXt."""

from __future__ import annotations

from functools import partial

from timm.layers import LayerNorm, LayerNorm2d
from timm.models.convnext import ConvNeXtStage
from timm.models.xcit import ConvPatchEmbed
from torch import Tensor, nn

from vitadel.backbones.families.conv_stem import set_patch_size
from vitadel.errors import UserError

__all__ = ["HybridEmbed", "conv_embed"]

_AFTER_FIRST = 4
"""How often the hybrid stem halves the grid after its first convolution, as a factor: between stages and at the end."""


def conv_embed(img_size: tuple[int, int], patch_size: int, in_chans: int, embed_dim: int) -> ConvPatchEmbed:
    """XCiT's stem of four 3x3 convolutions with batch norm: (images) -> (tokens, (rows, columns))."""
    if embed_dim % 8:
        raise UserError(
            f"the stem of FAN doubles its width three times on the way to embed_dim, and {embed_dim} is no multiple of "
            "8. Give one."
        )
    embed = ConvPatchEmbed(img_size=img_size, patch_size=16, in_chans=in_chans, embed_dim=embed_dim)
    set_patch_size(embed, img_size, patch_size)
    return embed


class HybridEmbed(nn.Module):
    """Two ConvNeXt stages and a 2x2 convolution to the width of the tokens: (images) -> (tokens, (rows, columns)).

    The first convolution takes what is left of the patch size: 4 x 4 pixels for patches of 16, single pixels for 4.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        dims: tuple[int, int] = (128, 256),
        depths: tuple[int, int] = (3, 3),
    ) -> None:
        super().__init__()
        first, rest = divmod(patch_size, _AFTER_FIRST)
        if rest or first < 1:
            raise UserError(f"the hybrid stem of FAN makes patches of 4, 8, 12, 16 ... pixels, not of {patch_size}.")
        self.stem = nn.Sequential(nn.Conv2d(in_chans, dims[0], first, first), LayerNorm2d(dims[0], eps=1e-6))
        stage = partial(
            ConvNeXtStage,
            ls_init_value=1e-6,
            norm_layer=partial(LayerNorm2d, eps=1e-6),
            norm_layer_cl=partial(LayerNorm, eps=1e-6),
        )
        self.stages = nn.Sequential(
            stage(dims[0], dims[0], stride=1, depth=depths[0]), stage(dims[0], dims[1], stride=2, depth=depths[1])
        )
        self.proj = nn.Conv2d(dims[1], embed_dim, 2, 2)
        self.note_size(img_size)

    def note_size(self, img_size: tuple[int, int]) -> None:
        """Read the patch size off the first convolution, and note the images it is meant for; any other size runs."""
        first = self.stem[0]
        assert isinstance(first, nn.Conv2d)
        self.patch_size = first.kernel_size[0] * _AFTER_FIRST
        self.img_size = img_size
        self.num_patches = (img_size[0] // self.patch_size) * (img_size[1] // self.patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        maps: Tensor = self.proj(self.stages(self.stem(x)))
        return maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3])
