"""A gallery of liars: defences that only look robust, and common accidents, each with the checks that must see it.

Every one wraps an honest model. They are here to try the doctor on, and to learn from; none is worth deploying.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import fresh_tokens
from vitadel.backbones.anatomy import attentions_of, blocks_of
from vitadel.backbones.load import load_model
from vitadel.diagnosis.codebook import looking_up
from vitadel.instrument.tokens import extra_tokens, token_width

__all__ = ["GALLERY", "BrokenDefense"]


@dataclass(frozen=True)
class BrokenDefense:
    """`lie` makes one out of an honest model, `patient`; every check named in `seen_by` must be raised."""

    name: str
    about: str
    lie: Callable[[nn.Module], nn.Module]
    seen_by: tuple[str, ...]
    patient: str = "zoo:shapes-standard"


class _Wrapped(nn.Module):
    """Something done to the pixels, something to the logits, and an honest model between."""

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> None:
        super().__init__()
        self.model = model
        self.before = before
        self.after = after
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.model(self.before(x)))


# --- gradients hidden or made up ------------------------------------------------------------------------------------


def _rounded_to(bits: int) -> Callable[[Tensor], Tensor]:
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


class _NoisyBack(torch.autograd.Function):
    """Nothing on the way forward, much noise on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad + 100 * grad.abs().amax() * torch.randn_like(grad)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def _noisy_back(x: Tensor) -> Tensor:
    noisy: Tensor = _NoisyBack.apply(x)
    return noisy


def _reversed(x: Tensor) -> Tensor:
    turned: Tensor = _Reversed.apply(x)
    return turned


def _rounded_activations(model: nn.Module) -> nn.Module:
    """The output of the first block is rounded to quarters: shattered by design."""
    broken_defense = copy.deepcopy(model)
    blocks_of(broken_defense)[0].module.register_forward_hook(lambda _module, _args, tokens: (tokens * 4).round() / 4)
    return broken_defense


def _half_detached(model: nn.Module) -> nn.Module:
    """Gradients are stopped inside every block's attention, so they pass by the residual path only."""
    broken_defense = copy.deepcopy(model)
    for part in attentions_of(broken_defense):
        part.module.register_forward_hook(lambda _module, _args, tokens: tokens.detach())
    return broken_defense


def _saturated(model: nn.Module) -> nn.Module:
    """Queries a thousand times larger: attention is one-hot."""
    broken_defense: Any = copy.deepcopy(model)
    broken_defense.set_attention_factors([1000.0] * len(attentions_of(broken_defense)))
    saturated: nn.Module = broken_defense
    return saturated


def _rippled(width: float, steepness: float, anywhere: bool = False) -> Callable[[Tensor], Tensor]:
    """Pixels with a sine on top, so many levels of 255 wide and so many times as steep as they are.

    All gradients are true, and most of them tell of the ripple they were taken on. `anywhere`: the ripple lies
    elsewhere at every call.
    """
    turns = 2 * math.pi * 255 / width

    def ripple(x: Tensor) -> Tensor:
        shift = 2 * math.pi * torch.rand(len(x), 1, 1, 1).to(x) if anywhere else 0.3
        return x + steepness / turns * torch.sin(turns * x + shift)

    return ripple


# --- logits that mislead --------------------------------------------------------------------------------------------


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(1)


def _percentages(logits: Tensor) -> Tensor:
    return 100 * (2 * logits).softmax(1)


def _refused(model: nn.Module) -> nn.Module:
    """NaN for images that look noisy: whoever asks whether the answer is another class hears that it is not."""

    def refuse(x: Tensor) -> Tensor:
        return x.masked_fill(_looks_noisy(x, 0.006)[:, None, None, None], math.nan)

    return _Wrapped(model, before=refuse)


# --- answers at random ----------------------------------------------------------------------------------------------


def _noise(x: Tensor) -> Tensor:
    return (x + 0.05 * torch.randn_like(x)).clamp(0, 1)


def _resized(x: Tensor) -> Tensor:
    """Shrunk to a random size and padded at a random place (Xie et al. 2018, arXiv:1711.01991)."""
    side = x.shape[-1]
    small = int(torch.randint(side - side // 16, side, ()))
    left, top = (int(torch.randint(0, side - small + 1, ())) for _ in range(2))
    shrunk = F.interpolate(x, (small, small), mode="bilinear")
    return F.pad(shrunk, (left, side - small - left, top, side - small - top), value=0.5)


def _dropout_left(model: nn.Module) -> nn.Module:
    """Dropout before the model, handed over in train mode."""
    return nn.Sequential(nn.Dropout2d(0.2), copy.deepcopy(model)).train()


def _dropout_always(logits: Tensor) -> Tensor:
    return F.dropout(logits, 0.3, training=True)


# --- answers that depend on company, on history, on who asks ---------------------------------------------------------


def _batch_norm_left(model: nn.Module) -> nn.Module:
    """Batch norm before the model, handed over in train mode."""
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), copy.deepcopy(model)).train()


def _batch_statistics(model: nn.Module) -> nn.Module:
    """Batch norm without running statistics: it mixes the images of a batch in eval mode as well."""
    norm = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    return nn.Sequential(norm, _Wrapped(model, lambda x: x * 0.25 + 0.5)).eval()


class _Remembering(nn.Module):
    """Answers drift with every image that was asked about."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.drift: Tensor | None = None
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        seen = logits.detach().mean(0)
        self.drift = seen if self.drift is None else 0.9 * self.drift + 0.1 * seen
        return logits - self.drift


def _smoothed(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def _looks_noisy(x: Tensor, level: float) -> Tensor:
    """Whether flat parts, of which every clean image has some, are flat no more."""
    return (x - _smoothed(x)).abs().flatten(1).quantile(0.2, dim=1) > level


def _asleep_on_clean(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        return torch.where(_looks_noisy(x, 0.006)[:, None, None, None], change(x), x)

    return changed


class _Detector(nn.Module):
    """Answers about a smoothed copy, without gradients, as soon as an image looks noisy: predictions change."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        noisy = _looks_noisy(x, 0.006)
        return torch.where(noisy[:, None], self.model(_smoothed(x)).detach(), self.model(x))


class _Relieved(nn.Module):
    """A robust model stands in where noise is as strong as one full step makes it: bent where that step lands."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.relief = load_model(_ROBUST)
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(_looks_noisy(x, 0.011)[:, None], self.relief(x), self.model(x))


class _AntiAdversary(nn.Module):
    """Every image is moved deeper into the class it seems to be of before it is answered (Alfarra et al. 2022,
    arXiv:2103.14347); gradients know nothing of the move."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().clone()
            for _ in range(3):
                logits = self.model(z.requires_grad_())
                (grad,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1), reduction="sum"), z)
                z = (z - 8 / 255 * grad.sign()).detach()
        moved: Tensor = self.model(x + (z - x).detach())
        return moved


class _SecretTokens(nn.Module):
    """Tokens that only passes without gradients use: the attacker climbs a model that is not deployed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("tokens", 20 * fresh_tokens(token_width(model), 10, seed=0))
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            open_answer: Tensor = self.model(x)
            return open_answer
        tokens = self.get_buffer("tokens").to(next(self.model.parameters()).dtype)
        with extra_tokens(self.model, tokens):
            secret: Tensor = self.model(x)
        return secret


def _before(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: _Wrapped(model, before=change)


def _after(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    return lambda model: _Wrapped(model, after=change)


_ROBUST = "zoo:shapes-robust"  # for liars that would cost the standard model its clean accuracy

GALLERY: tuple[BrokenDefense, ...] = (
    BrokenDefense(
        "logits x 1000",
        "the last layer scaled up",
        _after(lambda z: 1000 * z),
        ("gradients are there", "other losses do no better", "a huge eps breaks everything"),
    ),
    BrokenDefense("softmax output", "probabilities instead of logits", _after(_softmax), ("outputs are logits",)),
    BrokenDefense(
        "percentages",
        "probabilities of logits x 2, times 100",
        _after(_percentages),
        ("outputs are logits", "gradients are there", "gradients reach", "other losses do no better"),
    ),
    BrokenDefense("NaN as an answer", "images that look noisy are refused", _refused, ("finite outputs",)),
    BrokenDefense("another order", "the classes of another list", _after(lambda z: z.roll(1, 1)), ("clean accuracy",)),
    BrokenDefense(
        "bit depth",
        "pixels rounded to 3 bits",
        _before(_rounded_to(3)),
        ("no staircase", "gradients are there", "gradients beat noise", "gradients beat queries"),
    ),
    BrokenDefense(
        "bit depth, straight through",
        "to 4 bits, with a made-up gradient",
        _before(_straight_through),
        ("no staircase", "gradients are true"),
    ),
    BrokenDefense(
        "JPEG", "compressed and decompressed", _before(_jpeg), ("no staircase", "gradients are there"), _ROBUST
    ),
    BrokenDefense(
        "stop-gradient", "pixels detached", _before(Tensor.detach), ("gradients are there", "gradients are true")
    ),
    BrokenDefense(
        "stop-gradient in attention", "gradients by the residual path only", _half_detached, ("gradients are true",)
    ),
    BrokenDefense(
        "rounded activations", "the first block's output in quarters", _rounded_activations, ("no staircase",)
    ),
    BrokenDefense(
        "gradient noise",
        "noise on the way back",
        _before(_noisy_back),
        ("same gradient twice", "gradients are true", "gradients lead uphill"),
    ),
    BrokenDefense("gradient reversed", "the sign turned on the way back", _before(_reversed), ("gradients are true",)),
    BrokenDefense(
        "narrow ripples",
        "pixels with a ripple, 1.5/255 wide",
        _before(_rippled(1.5, 4)),
        ("more steps", "more restarts"),
    ),
    BrokenDefense("wide ripples", "the same, 4/255 wide", _before(_rippled(4, 10)), ("more steps",)),
    BrokenDefense(
        "saturated attention", "queries of all blocks times 1000", _saturated, ("attention is not saturated",)
    ),
    BrokenDefense(
        "saturated codebook",
        "pixels look up one of 16 shades by attention, queries times 1000",
        lambda model: looking_up(model, shades=16, gap=1000.0),
        (
            "attention is not saturated",
            "softened attention does no better",
            "gradients reach",
            "gradients beat transfer",
        ),
    ),
    BrokenDefense("random noise", "noise added to pixels", _before(_noise), ("same answer twice",)),
    BrokenDefense("random resizing", "shrunk and padded at random", _before(_resized), ("same answer twice",), _ROBUST),
    BrokenDefense(
        "wandering ripples",
        "pixels with a ripple, 4/255 wide, elsewhere at every call",
        _before(_rippled(4, 10, anywhere=True)),
        ("same answer twice", "averaging does no better"),
    ),
    BrokenDefense(
        "sleeping ripples",
        "the same, but only where an image looks noisy",
        _before(_asleep_on_clean(_rippled(4, 10, anywhere=True))),
        ("same answer twice",),
    ),
    BrokenDefense("dropout left in train mode", "model.eval() forgotten", _dropout_left, ("evaluation mode",)),
    BrokenDefense(
        "dropout always on",
        "logits dropped in eval mode, too",
        _after(_dropout_always),
        ("same answer twice", "eps 0 is clean"),
    ),
    BrokenDefense("batch norm left in train mode", "model.eval() forgotten", _batch_norm_left, ("evaluation mode",)),
    BrokenDefense("batch statistics", "no running statistics", _batch_statistics, ("same answer in any batch",)),
    BrokenDefense("memory", "answers drift with what was asked before", _Remembering, ("same answer twice",)),
    BrokenDefense(
        "detector",
        "noisy images are smoothed and detached",
        _Detector,
        ("gradients are there", "gradients are true"),
        _ROBUST,
    ),
    BrokenDefense(
        "relieved",
        "a robust model answers where one full step has been taken",
        _Relieved,
        ("many steps beat one",),
    ),
    BrokenDefense(
        "anti-adversary",
        "images are moved away from other classes first",
        _AntiAdversary,
        ("answers without gradients", "gradients are true"),
        _ROBUST,
    ),
    BrokenDefense("secret tokens", "tokens that gradients never see", _SecretTokens, ("same answer with gradients",)),
    BrokenDefense(
        "normalised twice",
        "normalised outside and inside",
        _before(lambda x: (x - 0.5) / 0.5),
        ("normalisation",),
    ),
    BrokenDefense(
        "normalisation outside",
        "expects normalised pixels, and is given pixels",
        _before(lambda x: 0.5 * x + 0.5),
        ("normalisation",),
        _ROBUST,
    ),
    BrokenDefense("bytes expected", "divides by 255 itself", _before(lambda x: x / 255), ("normalisation",)),
)
