"""A masked autoencoder (He et al. 2022, arXiv:2111.06377): a ViT sees few patches, a decoder paints the rest."""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.runtime.rng import SampleRNG

__all__ = ["Decoder", "MaskedAutoencoder", "encoder_of", "find_autoencoder"]


def encoder_of(classifier: Classifier) -> VisionTransformer:
    """The backbone, if it is a plain ViT: masked patches can be left out where no block needs the grid."""
    backbone = backbone_of(classifier)
    if not isinstance(backbone, VisionTransformer):
        raise UserError(
            f"a masked autoencoder needs a plain ViT of timm, whose blocks take any subset of patches, got "
            f"{type(backbone).__name__}"
        )
    return backbone


class Decoder(nn.Module):
    """A small ViT from visible tokens to the pixels of all patches; absent tokens are one learned vector."""

    positions: Tensor

    def __init__(self, encoder: VisionTransformer, width: int, depth: int, heads: int) -> None:
        super().__init__()
        embed = encoder.patch_embed
        (rows, columns), (height, breadth) = embed.grid_size, embed.patch_size
        self.prefix = encoder.num_prefix_tokens
        self.normalize = partial(nn.LayerNorm, eps=1e-6)
        # A model that norms the mean of its tokens has no norm of the tokens themselves.
        without = isinstance(encoder.norm, nn.Identity)
        self.enter = nn.Sequential(
            self.normalize(encoder.embed_dim) if without else nn.Identity(), nn.Linear(encoder.embed_dim, width)
        )
        self.absent = nn.Parameter(torch.zeros(1, 1, width).normal_(std=0.02))
        self.register_buffer("positions", build_sincos2d_pos_embed([rows, columns], width)[None], persistent=False)
        self.blocks = nn.Sequential(
            *(Block(width, heads, qkv_bias=True, norm_layer=self.normalize) for _ in range(depth))
        )
        self.leave = nn.Sequential(self.normalize(width), nn.Linear(width, 3 * height * breadth))

    def forward(self, latent: Tensor, order: Tensor) -> Tensor:
        """Pixels of all patches, (batch, patches, numbers); `order` lists visible patches first."""
        tokens = self.enter(latent)
        first, visible = tokens[:, : self.prefix], tokens[:, self.prefix :]
        absent = self.absent.expand(len(order), order.shape[1] - visible.shape[1], -1)
        shuffled = torch.cat([visible, absent.to(visible.dtype)], 1)
        back = order.argsort(1)[..., None].expand(-1, -1, shuffled.shape[2])
        patches = shuffled.gather(1, back) + self.positions
        pixels: Tensor = self.leave(self.blocks(torch.cat([first, patches], 1)))[:, self.prefix :]
        return pixels


class MaskedAutoencoder(nn.Module):
    """A classifier's backbone, which sees the share 1 - `mask_ratio` of the patches, and a decoder.

    Masks depend on the image, on `step`, which training counts, and on the name of their stream: attack and loss of
    the same step see different masks.
    """

    step: Tensor

    def __init__(self, classifier: Classifier, decoder: Decoder, mask_ratio: float) -> None:
        super().__init__()
        self.classifier, self.decoder, self.mask_ratio = classifier, decoder, mask_ratio
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, z: Tensor, x: Tensor | None = None, stream: str = "mask") -> Tensor:
        """The error of each image: the masked patches of `x` (default: `z`) as reconstructed from the others of `z`.

        It is the mean squared error of pixels that are normalized patch by patch: about 1 for a constant answer.
        """
        target = z if x is None else x
        order = self.order(target, stream)
        shown = self.shown_patches(order.shape[1])
        latent = self.encode(z, order[:, :shown])
        error = (self.decoder(latent, order).float() - self._targets(target)).square().mean(2)
        hidden: Tensor = error.gather(1, order[:, shown:])
        return hidden.mean(1)

    def shown_patches(self, count: int) -> int:
        return max(1, int(count * (1 - self.mask_ratio)))

    def order(self, x: Tensor, stream: str) -> Tensor:
        """A random order of the patches of each image, (batch, patches)."""
        rows, columns = encoder_of(self.classifier).patch_embed.grid_size
        return SampleRNG.of_pixels(x).stream(stream, int(self.step)).permutation(rows * columns)

    def encode(self, z: Tensor, visible: Tensor) -> Tensor:
        """Class and register tokens and the visible patches after the backbone, (batch, tokens, channels)."""
        encoder, model = encoder_of(self.classifier), self.classifier
        prefix = encoder.num_prefix_tokens

        def leave_out(tokens: Tensor) -> Tensor:
            kept = visible[..., None].expand(-1, -1, tokens.shape[2]) + prefix
            return torch.cat([tokens[:, :prefix], tokens.gather(1, kept)], 1)

        with hooked(self.classifier, [Edge("norm_pre", encoder.norm_pre, leave_out)]):
            latent: Tensor = encoder.forward_features((z - model.mean) / model.std)
        return latent

    def _targets(self, x: Tensor) -> Tensor:
        height, width = encoder_of(self.classifier).patch_embed.patch_size
        patches = nn.functional.unfold(x, (height, width), stride=(height, width)).mT
        variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
        return (patches - mean) / (variance + 1e-6).sqrt()


def find_autoencoder(model: nn.Module) -> MaskedAutoencoder:
    """The autoencoder inside wrappers of parallel training."""
    found = next((module for module in model.modules() if isinstance(module, MaskedAutoencoder)), None)
    if found is None:
        raise UserError("there is no masked autoencoder to train: write `adapter: {use: masked_autoencoder}`")
    return found
