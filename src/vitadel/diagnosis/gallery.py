"""A gallery of liars: defences that only look robust, and common accidents, each with the checks that must see it.

Every one wraps an honest model. They are here to try the doctor on, and to learn from; none is worth deploying.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.robustness_tokens import fresh_tokens
from vitadel.backbones.anatomy import attentions_of, blocks_of
from vitadel.instrument.tokens import extra_tokens, token_width

__all__ = ["GALLERY", "Liar"]


@dataclass(frozen=True)
class Liar:
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


def _fewer_bits(x: Tensor) -> Tensor:
    return (x * 15).round() / 15


def _straight_through(x: Tensor) -> Tensor:
    return x + (_fewer_bits(x) - x).detach()


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
    liar = copy.deepcopy(model)
    blocks_of(liar)[0].module.register_forward_hook(lambda _module, _args, tokens: (tokens * 4).round() / 4)
    return liar


def _half_detached(model: nn.Module) -> nn.Module:
    """Gradients are stopped inside every block's attention, so they pass by the residual path only."""
    liar = copy.deepcopy(model)
    for part in attentions_of(liar):
        part.module.register_forward_hook(lambda _module, _args, tokens: tokens.detach())
    return liar


def _saturated(model: nn.Module) -> nn.Module:
    """Queries a thousand times larger: attention is one-hot."""
    liar: Any = copy.deepcopy(model)
    liar.set_attention_factors([1000.0] * len(attentions_of(liar)))
    saturated: nn.Module = liar
    return saturated


# --- logits that mislead --------------------------------------------------------------------------------------------


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(1)


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


class _Detector(nn.Module):
    """Answers about a smoothed copy, without gradients, as soon as an image looks noisy: predictions change."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        smooth = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
        # Flat parts, of which every clean image has some, are flat no more.
        noisy = (x - smooth).abs().flatten(1).quantile(0.2, dim=1) > 0.006
        return torch.where(noisy[:, None], self.model(smooth).detach(), self.model(x))


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

GALLERY: tuple[Liar, ...] = (
    Liar(
        "logits x 1000",
        "the last layer scaled up",
        _after(lambda z: 1000 * z),
        ("gradients are there", "other losses do no better", "a huge eps breaks everything"),
    ),
    Liar("softmax output", "probabilities instead of logits", _after(_softmax), ("outputs are logits",)),
    Liar("bit depth", "pixels rounded to 4 bits", _before(_fewer_bits), ("no staircase", "gradients are there")),
    Liar(
        "bit depth, straight through",
        "the same with a made-up gradient",
        _before(_straight_through),
        ("no staircase", "gradients are true"),
    ),
    Liar("JPEG", "compressed and decompressed", _before(_jpeg), ("no staircase", "gradients are there"), _ROBUST),
    Liar("stop-gradient", "pixels detached", _before(Tensor.detach), ("gradients are there", "gradients are true")),
    Liar("stop-gradient in attention", "gradients by the residual path only", _half_detached, ("gradients are true",)),
    Liar("rounded activations", "the first block's output in quarters", _rounded_activations, ("no staircase",)),
    Liar(
        "gradient noise",
        "noise on the way back",
        _before(_noisy_back),
        ("same gradient twice", "gradients are true", "gradients lead uphill"),
    ),
    Liar("gradient reversed", "the sign turned on the way back", _before(_reversed), ("gradients are true",)),
    Liar("saturated attention", "queries times 1000", _saturated, ("attention is not saturated",)),
    Liar("random noise", "noise added to pixels", _before(_noise), ("same answer twice",)),
    Liar("random resizing", "shrunk and padded at random", _before(_resized), ("same answer twice",), _ROBUST),
    Liar("dropout left in train mode", "model.eval() forgotten", _dropout_left, ("evaluation mode",)),
    Liar("dropout always on", "logits dropped in eval mode, too", _after(_dropout_always), ("same answer twice",)),
    Liar("batch norm left in train mode", "model.eval() forgotten", _batch_norm_left, ("evaluation mode",)),
    Liar("batch statistics", "no running statistics", _batch_statistics, ("same answer in any batch",)),
    Liar("memory", "answers drift with what was asked before", _Remembering, ("same answer twice",)),
    Liar(
        "detector",
        "noisy images are smoothed and detached",
        _Detector,
        ("gradients are there", "gradients are true"),
        _ROBUST,
    ),
    Liar("secret tokens", "tokens that gradients never see", _SecretTokens, ("same answer with gradients",)),
    Liar(
        "normalised twice",
        "normalised outside and inside",
        _before(lambda x: (x - 0.5) / 0.5),
        ("normalisation",),
        _ROBUST,
    ),
    Liar(
        "normalisation outside",
        "expects normalised pixels, and is given pixels",
        _before(lambda x: 0.5 * x + 0.5),
        ("normalisation",),
        _ROBUST,
    ),
    Liar("bytes expected", "divides by 255 itself", _before(lambda x: x / 255), ("normalisation",)),
)
