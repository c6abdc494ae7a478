"""Broken defenses inside a transformer: saturated attention, sparse and rounded activations."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of, backbone_of, blocks_of
from vitadel.backbones.families.meansparse import MeanSparse
from vitadel.backbones.load import load_model
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess, read_batches
from vitadel.diagnosis.gallery.entry import BrokenDefense, Build, Transform, sweep

_SHADES, _GAP = 16, 1000.0  # of the saturated codebook


class Attention(nn.Module):
    """Softmax attention in which every pixel looks up its shade: pixels are queries, shades are keys and values.

    In the blocks of a transformer saturated attention still passes gradients, by the values of the tokens that it
    picks. Here the values are fixed, so that pixels reach the model through the softmax alone. With sharp scores that
    is rounding to so many shades, with a gradient that is correct, and zero to the last bit for nearly all pixels.

    Pixels are in [-1, 1]. A pixel on a shade has a score of `gap` above those of the next ones. The class name is one
    that the anatomy of ViTs lists as softmax attention.
    """

    num_heads = 1

    def __init__(self, shades: int, gap: float) -> None:
        super().__init__()
        book = torch.linspace(-1, 1, shades)
        self.sharpness = gap / float(book[1] - book[0]) ** 2
        # Closeness of a pixel to a shade, -(pixel - shade)^2, without the pixel's square, which is the same for all.
        self.register_buffer("keys", torch.stack([2 * book, -book.square()])[None, None])
        self.register_buffer("values", book[None, None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        queries = self.sharpness * torch.stack([pixels, torch.ones_like(pixels)], 2)[:, None]
        shades = (queries @ self.get_buffer("keys")).softmax(-1) @ self.get_buffer("values")
        return shades.view_as(x)


def quantize_by_attention(model: nn.Module, shades: int, gap: float) -> nn.Module:
    """Copy a ViT that normalizes to [-1, 1], with pixels replaced by the shades that they look up."""
    changed = copy.deepcopy(model)
    embedding: Any = backbone_of(changed).patch_embed
    embedding.book = Attention(shades, gap).train(embedding.training)
    embedding.register_forward_pre_hook(lambda module, args: (module.book(args[0]), *args[1:]))
    return changed


def saturated_codebook() -> nn.Module:
    """Build the saturated codebook: a model to audit, as python:vitadel.diagnosis.gallery:saturated_codebook."""
    return quantize_by_attention(load_model("zoo:shapes-standard"), _SHADES, _GAP)


def _saturated(factor: float) -> Build:
    """Scale queries, so that attention is one-hot."""

    def build(model: nn.Module) -> nn.Module:
        changed: Any = copy.deepcopy(model)
        changed.set_attention_factors([factor] * len(attentions_of(changed)))
        return cast(nn.Module, changed)

    return build


_ATTENTION = (
    BrokenDefense(
        "saturated attention",
        "queries of all blocks times 1000",
        _saturated(1000.0),
        ("attention-saturation",),
        family="attention",
    ),
    BrokenDefense(
        "saturated codebook",
        f"pixels look up one of {_SHADES} shades by attention, queries times 1000",
        lambda model: quantize_by_attention(model, _SHADES, _GAP),
        ("attention-saturation", "attention-scaling", "small-gradients", "transfer"),
        family="attention",
    ),
    *sweep(
        "attention",
        "saturated attention by factor",
        "queries of all blocks times the strength",
        _saturated,
        (10, 100),
    ),
    *sweep(
        "attention",
        "codebook by sharpness",
        "pixels look up one of 64 shades by attention with this gap of scores",
        lambda gap: lambda model: quantize_by_attention(model, shades=64, gap=gap),
        (10, 30, 300),
    ),
)


def k_winners(share: float) -> Transform:
    """Keep the largest activations of every token, this share of them, and set the others to zero (Xiao et al. 2020,
    arXiv:1905.10510)."""

    def sparse(hidden: Tensor) -> Tensor:
        kept = max(1, round(share * hidden.shape[-1]))
        level = hidden.topk(kept, dim=-1).values[..., -1:]
        return torch.where(hidden >= level, hidden, 0 * hidden)

    return Transform(sparse)


def after_activations(make: Any) -> Build:
    """Put what `make()` returns after the activation of every block's MLP."""

    def build(model: nn.Module) -> nn.Module:
        changed = copy.deepcopy(model)
        for part in blocks_of(changed):
            mlp: Any = part.module.mlp
            mlp.act = nn.Sequential(mlp.act, make()).train(mlp.act.training)
        return changed

    return build


@cache
def _training_images(count: int = 32) -> Tensor:
    (batch,) = read_batches(open_dataset("shapes@train"), [list(range(count))], Preprocess(32))
    return batch.x


def _mean_sparse(width: float) -> Build:
    """Put MeanSparse (Amini et al. 2024, arXiv:2406.05927) before the activation of every block's MLP."""

    def build(model: nn.Module) -> nn.Module:
        changed = copy.deepcopy(model)
        images = _training_images()
        for part in blocks_of(changed):
            mlp: Any = part.module.mlp
            hidden = _outputs_of(mlp.fc1, changed, images).flatten(0, -2)
            sparse = MeanSparse(hidden.shape[1])
            sparse.running_mean, sparse.running_var = hidden.mean(0), hidden.var(0)
            sparse.threshold = torch.tensor(width)
            mlp.act = nn.Sequential(sparse, mlp.act).train(mlp.act.training)
        return changed

    return build


@torch.no_grad()
def _outputs_of(part: nn.Module, model: nn.Module, images: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = part.register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(images)
    handle.remove()
    return seen[0]


def _rounded_tokens(step: float) -> Build:
    """Round the output of the first block to multiples of `step`."""

    def build(model: nn.Module) -> nn.Module:
        changed = copy.deepcopy(model)
        blocks_of(changed)[0].module.register_forward_hook(
            lambda _module, _args, tokens: (tokens / step).round() * step
        )
        return changed

    return build


_ACTIVATIONS = (
    BrokenDefense(
        "rounded activations",
        "the first block's output in quarters",
        _rounded_tokens(0.25),
        ("staircase",),
        family="activations",
    ),
    *sweep(
        "activations",
        "rounded activations by step",
        "the first block's output rounded to multiples of the strength",
        _rounded_tokens,
        (0.001,),
    ),
    *sweep(
        "activations",
        "k-winners",
        "only this share of each token's hidden activations is kept",
        lambda share: after_activations(lambda: k_winners(share)),
        (0.05, 0.1, 0.2, 0.4),
    ),
    *sweep(
        "activations",
        "MeanSparse",
        "hidden features within so many standard deviations of their mean are set to it",
        _mean_sparse,
        (0.25, 0.5, 1),
    ),
)

INSIDE = _ATTENTION + _ACTIVATIONS
