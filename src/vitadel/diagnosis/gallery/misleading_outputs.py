"""Broken defenses in the logits, in the gradients on the way back, and in the precision of numbers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.backbones.anatomy import attentions_of, blocks_of
from vitadel.diagnosis.gallery.entry import BrokenDefense, Build, Change, after, before, sweep

# --- logits that mislead ----------------------------------------------------------------------------------------------


def _squashed(size: float) -> Change:
    return lambda z: size * torch.tanh(z / size)


def _rounded(step: float) -> Change:
    return lambda z: (z / step).round() * step


_OUTPUTS = (
    BrokenDefense(
        "logits x 1000",
        "the last layer scaled up",
        after(lambda z: 1000 * z),
        ("zero-gradients", "loss-sensitivity", "unbounded-attack"),
        family="outputs",
    ),
    BrokenDefense(
        "softmax output",
        "probabilities instead of logits",
        after(lambda z: z.softmax(1)),
        ("probability-outputs",),
        family="outputs",
    ),
    BrokenDefense(
        "percentages",
        "probabilities of logits x 2, times 100",
        after(lambda z: 100 * (2 * z).softmax(1)),
        ("probability-outputs", "zero-gradients", "small-gradients", "loss-sensitivity"),
        family="outputs",
    ),
    BrokenDefense(
        "labels only",
        "one for the predicted class, no gradient",
        after(lambda z: F.one_hot(z.argmax(1), z.shape[1]) + 0.0 * z),
        family="outputs",
    ),
    *sweep(
        "outputs",
        "scaled logits",
        "the last layer scaled up by this factor",
        lambda factor: after(lambda z: factor * z),
        (30, 1e4),
    ),
    *sweep(
        "outputs",
        "squashed logits",
        "logits squashed by a tanh to at most the strength",
        lambda size: after(_squashed(size)),
        (4, 1),
    ),
    *sweep(
        "outputs",
        "rounded logits",
        "logits rounded to multiples of the strength",
        lambda step: after(_rounded(step)),
        (0.001, 0.5),
    ),
)


# --- gradients that are hidden or replaced ----------------------------------------------------------------------------


def _with_gradient(change: Change) -> Change:
    """The identity, with a change of the gradient in the backward pass."""

    def identity(x: Tensor) -> Tensor:
        z = x.clone()
        if z.requires_grad:
            z.register_hook(change)
        return z

    return identity


def _noisy(size: float) -> Change:
    return lambda grad: grad + size * grad.abs().amax() * torch.randn_like(grad)


def _partly_detached(share: float) -> Change:
    """Pixels are detached, but for a sparse lattice of them."""

    def detached(x: Tensor) -> Tensor:
        places = torch.arange(x[0].numel(), device=x.device) * 0.61803398875 % 1
        return torch.where((places < share).view_as(x[0]), x.detach(), x)

    return detached


def _half_detached(model: nn.Module) -> nn.Module:
    """Stop gradients inside every block's attention, so that they pass by the residual path only."""
    changed = copy.deepcopy(model)
    for part in attentions_of(changed):
        part.module.register_forward_hook(lambda _module, _args, tokens: tokens.detach())
    return changed


_GRADIENTS = (
    BrokenDefense(
        "stop-gradient",
        "pixels detached",
        before(Tensor.detach),
        ("zero-gradients", "wrong-gradients"),
        family="gradients",
    ),
    BrokenDefense(
        "stop-gradient in attention",
        "gradients by the residual path only",
        _half_detached,
        ("wrong-gradients",),
        family="gradients",
    ),
    BrokenDefense(
        "gradient noise",
        "noise on the way back",
        before(_with_gradient(_noisy(100))),
        ("random-gradients", "wrong-gradients", "uninformative-gradients"),
        family="gradients",
    ),
    BrokenDefense(
        "gradient reversed",
        "the sign turned on the way back",
        before(_with_gradient(torch.neg)),
        ("wrong-gradients",),
        family="gradients",
    ),
    *sweep(
        "gradients",
        "gradient noise by size",
        "noise on the way back, so many times the largest gradient",
        lambda size: before(_with_gradient(_noisy(size))),
        (0.3, 3),
    ),
    *sweep(
        "gradients",
        "pixels partly detached",
        "this share of the pixels detached",
        lambda share: before(_partly_detached(share)),
        (0.5, 0.99),
    ),
    *sweep(
        "gradients",
        "gradient displaced",
        "gradients moved by so many pixels on the way back",
        lambda pixels: before(_with_gradient(lambda grad: grad.roll(int(pixels), 3))),
        (1,),
    ),
    *sweep(
        "gradients",
        "gradient underflow",
        "gradients multiplied by the strength on the way back",
        lambda factor: before(_with_gradient(lambda grad: grad * factor)),
        (1e-45,),
    ),
)


# --- precision --------------------------------------------------------------------------------------------------------


def _mantissa(bits: int) -> Change:
    """Round numbers to so many bits of mantissa; there is no gradient."""

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.detach())
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x)

    return rounded


def _in_every_block(change: Change) -> Build:
    def build(model: nn.Module) -> nn.Module:
        changed = copy.deepcopy(model)
        for part in blocks_of(changed):
            part.module.register_forward_hook(lambda _module, _args, tokens: change(tokens))
        return changed

    return build


_PRECISION = (
    *sweep(
        "precision",
        "bits of pixels",
        "pixels rounded to so many bits of mantissa",
        lambda bits: before(_mantissa(int(bits))),
        (10, 4),
    ),
    *sweep(
        "precision",
        "bits of logits",
        "logits rounded to so many bits of mantissa",
        lambda bits: after(_mantissa(int(bits))),
        (6,),
    ),
    *sweep(
        "precision",
        "bits of tokens, with gradients",
        "the output of every block rounded to so many bits of mantissa; gradients pass",
        lambda bits: _in_every_block(lambda x: x + (_mantissa(int(bits))(x) - x).detach()),
        (3,),
    ),
)

OUTPUTS = _OUTPUTS + _GRADIENTS + _PRECISION
