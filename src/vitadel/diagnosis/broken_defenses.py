"""Broken defenses: models that only look robust, and common accidents, each with the checks that must be raised.

Each wraps an honest model. They serve to test the diagnosis and to learn from; none is worth deploying.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import fresh_tokens
from vitadel.backbones.anatomy import attentions_of, backbone_of, blocks_of
from vitadel.backbones.load import load_model
from vitadel.instrument.tokens import extra_tokens, token_width

__all__ = ["BROKEN_DEFENSES", "Attention", "BrokenDefense", "quantize_by_attention"]


@dataclass(frozen=True)
class BrokenDefense:
    """`build` makes the defense out of an honest model, by default `base`; it must raise the checks `raises`."""

    name: str
    about: str
    build: Callable[[nn.Module], nn.Module]
    raises: tuple[str, ...]
    base: str = "zoo:shapes-standard"

    def make(self) -> nn.Module:
        """The defense around its default model."""
        return self.build(load_model(self.base))


Change = Callable[[Tensor], Tensor]
Build = Callable[[nn.Module], nn.Module]


class _Around(nn.Module):
    """A module around an honest model, in the mode of that model; `rule` gives its logits."""

    def __init__(
        self, model: nn.Module, rule: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    ) -> None:
        super().__init__()
        self.model = model
        self.rule = rule
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.model, x)


def _around(rule: Callable[[nn.Module, Tensor], Tensor]) -> Build:
    return lambda model: _Around(model, rule)


def _before(change: Change) -> Build:
    return _around(lambda model, x: model(change(x)))


def _after(change: Change) -> Build:
    return _around(lambda model, x: change(model(x)))


# --- hidden or replaced gradients -----------------------------------------------------------------------------------


def _rounded_to(bits: int) -> Change:
    levels = 2**bits - 1
    return lambda x: (x * levels).round() / levels


def _straight_through(x: Tensor) -> Tensor:
    return x + (_rounded_to(4)(x) - x).detach()


def _jpeg(x: Tensor) -> Tensor:
    pictures = []
    for picture in (x.detach().clamp(0, 1) * 255).round().byte().cpu():
        file = io.BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95)
        decoded = Image.open(file).convert("RGB")
        raw = torch.frombuffer(bytearray(decoded.tobytes()), dtype=torch.uint8)
        pictures.append(raw.view(decoded.height, decoded.width, 3).permute(2, 0, 1))
    return torch.stack(pictures).to(x) / 255


def _with_gradient(change: Change) -> Change:
    """The identity, with a change of the gradient in the backward pass."""

    def identity(x: Tensor) -> Tensor:
        z = x.clone()
        if z.requires_grad:
            z.register_hook(change)
        return z

    return identity


def _noisy(grad: Tensor) -> Tensor:
    return grad + 100 * grad.abs().amax() * torch.randn_like(grad)


def _rounded_activations(model: nn.Module) -> nn.Module:
    """Round the output of the first block to quarters."""
    changed = copy.deepcopy(model)
    blocks_of(changed)[0].module.register_forward_hook(lambda _module, _args, tokens: (tokens * 4).round() / 4)
    return changed


def _half_detached(model: nn.Module) -> nn.Module:
    """Stop gradients inside every block's attention, so that they pass by the residual path only."""
    changed = copy.deepcopy(model)
    for part in attentions_of(changed):
        part.module.register_forward_hook(lambda _module, _args, tokens: tokens.detach())
    return changed


def _saturated(model: nn.Module) -> nn.Module:
    """Scale queries by a thousand, so that attention is one-hot."""
    changed: Any = copy.deepcopy(model)
    changed.set_attention_factors([1000.0] * len(attentions_of(changed)))
    return cast(nn.Module, changed)


def _rippled(width: float, steepness: float, anywhere: bool = False) -> Change:
    """Add a sine to the pixels, `width` levels of 255 wide and `steepness` times as steep as the pixels.

    All gradients are correct, and most of them follow the ripple. `anywhere`: the ripple is shifted at every call.
    """
    turns = 2 * math.pi * 255 / width

    def ripple(x: Tensor) -> Tensor:
        shift = 2 * math.pi * torch.rand(len(x), 1, 1, 1).to(x) if anywhere else 0.3
        return x + steepness / turns * torch.sin(turns * x + shift)

    return ripple


# --- logits that mislead --------------------------------------------------------------------------------------------


def _nan_if_noisy(x: Tensor) -> Tensor:
    """NaN for images that look noisy: their prediction is then never seen to change."""
    return x.masked_fill(_looks_noisy(x, 0.006)[:, None, None, None], math.nan)


# --- random outputs -------------------------------------------------------------------------------------------------


def _resized(x: Tensor) -> Tensor:
    """Shrink to a random size and pad at a random place (Xie et al. 2018, arXiv:1711.01991)."""
    side = x.shape[-1]
    small = int(torch.randint(side - side // 16, side, ()))
    left, top = (int(torch.randint(0, side - small + 1, ())) for _ in range(2))
    shrunk = F.interpolate(x, (small, small), mode="bilinear")
    return F.pad(shrunk, (left, side - small - left, top, side - small - top), value=0.5)


def _dropout_left(model: nn.Module) -> nn.Module:
    """Put dropout before the model, in train mode."""
    return nn.Sequential(nn.Dropout2d(0.2), copy.deepcopy(model)).train()


# --- outputs that depend on the batch, on earlier images, on gradient mode --------------------------------------------


def _batch_norm_left(model: nn.Module) -> nn.Module:
    """Put batch norm before the model, in train mode."""
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), copy.deepcopy(model)).train()


def _batch_statistics(model: nn.Module) -> nn.Module:
    """Put batch norm without running statistics before the model: it mixes the images of a batch in eval mode, too."""
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    return nn.Sequential(norm, _before(lambda x: x * 0.25 + 0.5)(model)).eval()


class _Drifting(_Around):
    """Outputs drift with every image."""

    drift: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        seen = logits.detach().mean(0)
        self.drift = seen if self.drift is None else 0.9 * self.drift + 0.1 * seen
        return logits - self.drift


def _smoothed(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def _looks_noisy(x: Tensor, level: float) -> Tensor:
    """Whether flat parts, of which every clean image has some, are no longer flat."""
    return (x - _smoothed(x)).abs().flatten(1).quantile(0.2, dim=1) > level


def _on_noisy_only(change: Change) -> Change:
    def changed(x: Tensor) -> Tensor:
        return torch.where(_looks_noisy(x, 0.006)[:, None, None, None], change(x), x)

    return changed


def _detector(model: nn.Module, x: Tensor) -> Tensor:
    """Classify a smoothed copy, without gradients, if an image looks noisy."""
    return torch.where(_looks_noisy(x, 0.006)[:, None], model(_smoothed(x)).detach(), model(x))


class _BentAtOneStep(_Around):
    """A robust model answers where noise is as strong as one full step makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.robust = load_model(_ROBUST)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(_looks_noisy(x, 0.011)[:, None], self.robust(x), self.model(x))


def _anti_adversary(model: nn.Module, x: Tensor) -> Tensor:
    """Move every image deeper into its predicted class first (Alfarra et al. 2022, arXiv:2103.14347); gradients ignore
    the move."""
    with torch.enable_grad():
        z = x.detach().clone()
        for _ in range(3):
            logits = model(z.requires_grad_())
            (grad,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1), reduction="sum"), z)
            z = (z - 8 / 255 * grad.sign()).detach()
    return cast(Tensor, model(x + (z - x).detach()))


class _SecretTokens(_Around):
    """Uses tokens only in passes without gradients, so that attacks see a model that is not deployed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("tokens", 20 * fresh_tokens(token_width(model), 10, seed=0))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return cast(Tensor, self.model(x))
        tokens = self.get_buffer("tokens").to(next(self.model.parameters()).dtype)
        with extra_tokens(self.model, tokens):
            return cast(Tensor, self.model(x))


# --- attention that hides pixels ------------------------------------------------------------------------------------


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


# --- the list -------------------------------------------------------------------------------------------------------


_ROBUST = "zoo:shapes-robust"  # for defenses that would cost the standard model its clean accuracy

BROKEN_DEFENSES: tuple[BrokenDefense, ...] = (
    BrokenDefense(
        "logits x 1000",
        "the last layer scaled up",
        _after(lambda z: 1000 * z),
        ("zero-gradients", "loss-sensitivity", "unbounded-attack"),
    ),
    BrokenDefense(
        "softmax output", "probabilities instead of logits", _after(lambda z: z.softmax(1)), ("probability-outputs",)
    ),
    BrokenDefense(
        "percentages",
        "probabilities of logits x 2, times 100",
        _after(lambda z: 100 * (2 * z).softmax(1)),
        ("probability-outputs", "zero-gradients", "small-gradients", "loss-sensitivity"),
    ),
    BrokenDefense(
        "NaN as an answer", "images that look noisy are refused", _before(_nan_if_noisy), ("non-finite-outputs",)
    ),
    BrokenDefense("another order", "the classes of another list", _after(lambda z: z.roll(1, 1)), ("clean-accuracy",)),
    BrokenDefense(
        "bit depth",
        "pixels rounded to 3 bits",
        _before(_rounded_to(3)),
        ("staircase", "zero-gradients", "random-noise", "black-box"),
    ),
    BrokenDefense(
        "bit depth, straight through",
        "to 4 bits, with a made-up gradient",
        _before(_straight_through),
        ("staircase", "wrong-gradients"),
    ),
    BrokenDefense("JPEG", "compressed and decompressed", _before(_jpeg), ("staircase", "zero-gradients"), _ROBUST),
    BrokenDefense("stop-gradient", "pixels detached", _before(Tensor.detach), ("zero-gradients", "wrong-gradients")),
    BrokenDefense(
        "stop-gradient in attention", "gradients by the residual path only", _half_detached, ("wrong-gradients",)
    ),
    BrokenDefense("rounded activations", "the first block's output in quarters", _rounded_activations, ("staircase",)),
    BrokenDefense(
        "gradient noise",
        "noise on the way back",
        _before(_with_gradient(_noisy)),
        ("random-gradients", "wrong-gradients", "uninformative-gradients"),
    ),
    BrokenDefense(
        "gradient reversed",
        "the sign turned on the way back",
        _before(_with_gradient(torch.neg)),
        ("wrong-gradients",),
    ),
    BrokenDefense(
        "narrow ripples",
        "pixels with a ripple, 1.5/255 wide",
        _before(_rippled(1.5, 4)),
        ("step-sensitivity", "restart-sensitivity"),
    ),
    BrokenDefense("wide ripples", "the same, 4/255 wide", _before(_rippled(4, 10)), ("step-sensitivity",)),
    BrokenDefense("saturated attention", "queries of all blocks times 1000", _saturated, ("attention-saturation",)),
    BrokenDefense(
        "saturated codebook",
        "pixels look up one of 16 shades by attention, queries times 1000",
        lambda model: quantize_by_attention(model, shades=16, gap=1000.0),
        (
            "attention-saturation",
            "attention-scaling",
            "small-gradients",
            "transfer",
        ),
    ),
    BrokenDefense(
        "random noise",
        "noise added to pixels",
        _before(lambda x: (x + 0.05 * torch.randn_like(x)).clamp(0, 1)),
        ("random-outputs",),
    ),
    BrokenDefense("random resizing", "shrunk and padded at random", _before(_resized), ("random-outputs",), _ROBUST),
    BrokenDefense(
        "wandering ripples",
        "pixels with a ripple, 4/255 wide, elsewhere at every call",
        _before(_rippled(4, 10, anywhere=True)),
        ("random-outputs", "eot"),
    ),
    BrokenDefense(
        "sleeping ripples",
        "the same, but only where an image looks noisy",
        _before(_on_noisy_only(_rippled(4, 10, anywhere=True))),
        ("random-outputs",),
    ),
    BrokenDefense("dropout left in train mode", "model.eval() forgotten", _dropout_left, ("train-mode",)),
    BrokenDefense(
        "dropout always on",
        "logits dropped in eval mode, too",
        _after(lambda z: F.dropout(z, 0.3, training=True)),
        ("random-outputs", "zero-budget"),
    ),
    BrokenDefense("batch norm left in train mode", "model.eval() forgotten", _batch_norm_left, ("train-mode",)),
    BrokenDefense("batch statistics", "no running statistics", _batch_statistics, ("batch-dependence",)),
    BrokenDefense("memory", "answers drift with what was asked before", _Drifting, ("random-outputs",)),
    BrokenDefense(
        "detector",
        "noisy images are smoothed and detached",
        _around(_detector),
        ("zero-gradients", "wrong-gradients"),
        _ROBUST,
    ),
    BrokenDefense(
        "relieved",
        "a robust model answers where one full step has been taken",
        _BentAtOneStep,
        ("single-step",),
    ),
    BrokenDefense(
        "anti-adversary",
        "images are moved away from other classes first",
        _around(_anti_adversary),
        ("test-time-optimization", "wrong-gradients"),
        _ROBUST,
    ),
    BrokenDefense("secret tokens", "tokens that gradients never see", _SecretTokens, ("gradient-mode",)),
    BrokenDefense(
        "normalised twice",
        "normalised outside and inside",
        _before(lambda x: (x - 0.5) / 0.5),
        ("normalization",),
    ),
    BrokenDefense(
        "normalization outside",
        "expects normalized pixels, and is given pixels",
        _before(lambda x: 0.5 * x + 0.5),
        ("normalization",),
        _ROBUST,
    ),
    BrokenDefense("bytes expected", "divides by 255 itself", _before(lambda x: x / 255), ("normalization",)),
)
