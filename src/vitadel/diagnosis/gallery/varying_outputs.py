"""Broken defenses whose output depends on more than the image: randomness, state, the batch, gradient mode."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import fresh_tokens
from vitadel.diagnosis.gallery.entry import (
    ROBUST,
    Around,
    BrokenDefense,
    Change,
    after,
    around,
    before,
    sweep,
)
from vitadel.diagnosis.gallery.pixels import on_noisy_only, rippled
from vitadel.instrument.tokens import extra_tokens, token_width


def _noisy(size: float) -> Change:
    return lambda x: (x + size * torch.randn_like(x)).clamp(0, 1)


def _resized(x: Tensor) -> Tensor:
    """Shrink to a random size and pad at a random place (Xie et al. 2018, arXiv:1711.01991)."""
    side = x.shape[-1]
    small = int(torch.randint(side - side // 16, side, ()))
    left, top = (int(torch.randint(0, side - small + 1, ())) for _ in range(2))
    shrunk = F.interpolate(x, (small, small), mode="bilinear")
    return F.pad(shrunk, (left, side - small - left, top, side - small - top), value=0.5)


def _seeded_by_image(size: float) -> Change:
    """Noise that the pixels themselves decide: always the same for an image, and another one for its neighbor."""

    def shifted(x: Tensor) -> Tensor:
        places = torch.arange(1, x[0].numel() + 1, device=x.device, dtype=torch.float64).view_as(x[0])
        seed = (x.detach().double() * 255 * places.sqrt()).flatten(1).sum(1).view(-1, 1, 1, 1)
        noise = torch.sin(seed * 7.1 + places * 12.9898).mul(43758.5453).remainder(1) - 0.5
        return x + 2 * size * noise.to(x)

    return shifted


_RANDOMNESS = (
    BrokenDefense(
        "random noise",
        "noise added to pixels",
        before(_noisy(0.05)),
        ("random-outputs",),
        family="randomness",
    ),
    BrokenDefense(
        "random resizing",
        "shrunk and padded at random",
        before(_resized),
        ("random-outputs",),
        ROBUST,
        "randomness",
    ),
    BrokenDefense(
        "wandering ripples",
        "pixels with a ripple, 4/255 wide, elsewhere at every call",
        before(rippled(4, 10, anywhere=True)),
        ("random-outputs", "eot"),
        family="randomness",
    ),
    BrokenDefense(
        "sleeping ripples",
        "the same, but only where an image looks noisy",
        before(on_noisy_only(rippled(4, 10, anywhere=True))),
        ("random-outputs",),
        family="randomness",
    ),
    BrokenDefense(
        "dropout always on",
        "logits dropped in eval mode, too",
        after(lambda z: F.dropout(z, 0.3, training=True)),
        ("random-outputs", "zero-budget"),
        family="randomness",
    ),
    *sweep(
        "randomness",
        "random noise by size",
        "noise of this standard deviation added to pixels",
        lambda size: before(_noisy(size)),
        (0.001, 0.02),
    ),
    *sweep(
        "randomness",
        "noise seeded by the image",
        "noise of this size that the pixels decide: fixed for an image, another for its neighbor",
        lambda size: before(_seeded_by_image(size / 255)),
        (1, 8),
    ),
)


class _Drifting(Around):
    """Outputs drift with every image."""

    drift: Tensor | None = None

    def __init__(self, model: nn.Module, pace: float = 0.1) -> None:
        super().__init__(model)
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        seen = logits.detach().mean(0)
        self.drift = seen if self.drift is None else (1 - self.pace) * self.drift + self.pace * seen
        return logits - self.drift


class _Remembering(Around):
    """An image close to one that was seen before gets the answer of that one, as a defense against many queries."""

    def __init__(self, model: nn.Module, within: float) -> None:
        super().__init__(model)
        self.within = within
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        for images, answers in self.seen:
            far = (x.detach()[:, None] - images.to(x)[None]).abs().flatten(2).amax(2)
            nearest = far.min(1)
            logits = torch.where((nearest.values < self.within)[:, None], answers.to(x)[nearest.indices], logits)
        if sum(len(images) for images, _ in self.seen) < 512:
            self.seen.append((x.detach().clone(), logits.detach().clone()))
        return logits


_STATE = (
    BrokenDefense("memory", "answers drift with what was asked before", _Drifting, ("random-outputs",), family="state"),
    *sweep(
        "state",
        "memory by pace",
        "answers drift with what was asked before, at this pace",
        lambda pace: lambda model: _Drifting(model, pace),
        (0.01,),
    ),
    *sweep(
        "state",
        "remembered answers",
        "images within so many levels of 255 of an earlier one get its answer",
        lambda within: lambda model: _Remembering(model, within / 255),
        (20,),
    ),
)


def _batch_statistics(model: nn.Module) -> nn.Module:
    """Put batch norm without running statistics before the model: it mixes the images of a batch in eval mode, too."""
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    return nn.Sequential(norm, before(lambda x: x * 0.25 + 0.5)(model)).eval()


_BATCHES = (
    BrokenDefense(
        "batch statistics", "no running statistics", _batch_statistics, ("batch-dependence",), family="batches"
    ),
    *sweep(
        "batches",
        "batch mean",
        "this share of the batch's mean logits is taken off",
        lambda share: after(lambda z: z - share * z.mean(0, keepdim=True).detach()),
        (0.02, 0.2),
    ),
    *sweep(
        "batches",
        "batch range",
        "pixels are clipped to the batch's range, less the strength on either side",
        lambda cut: around(lambda model, x: model(x.clamp(float(x.min()) + cut, float(x.max()) - cut))),
        (0.2,),
    ),
)


class _SecretTokens(Around):
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


_GRADIENT_MODE = (
    BrokenDefense(
        "secret tokens",
        "tokens that gradients never see",
        _SecretTokens,
        ("gradient-mode",),
        family="gradient mode",
    ),
    *sweep(
        "gradient mode",
        "another image with gradients",
        "with gradients enabled, the model sees the image moved by so many pixels",
        lambda pixels: before(lambda x: x.roll(int(pixels), 3) if torch.is_grad_enabled() else x),
        (4,),
    ),
)

RANDOMNESS = _RANDOMNESS + _STATE + _BATCHES + _GRADIENT_MODE
