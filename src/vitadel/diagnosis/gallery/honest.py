"""Honest models with kinks, ties, steps and other oddities that must raise no check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.load import load_model
from vitadel.data import open_dataset
from vitadel.data.batches import Preprocess, read_batches
from vitadel.diagnosis.gallery.entry import ROBUST, STANDARD, Change, Defended, HonestModel, Transform, smoothed
from vitadel.diagnosis.gallery.pixels import in_blocks, low_frequencies, median_of

_ZOO = ("standard", "ordinary", "robust", "pgd-at", "trades", "trades-awp", "mart", "tora")


def _around(change: Change, base: str = ROBUST, after: Change | None = None) -> Callable[[], nn.Module]:
    """A model of the zoo behind a differentiable change of the pixels, and before one of the logits."""
    return lambda: Defended(load_model(base), Transform(change), None if after is None else Transform(after)).eval()


# --- kinks ------------------------------------------------------------------------------------------------------------


def _largest(x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2, 1)


def _trimmed_mean(x: Tensor) -> Tensor:
    """The mean of the five middle ones of every nine pixels."""
    windows = F.pad(x, (1, 1, 1, 1), mode="replicate").unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
    return windows.sort(4).values[..., 2:7].mean(4)


def _sorted_colors(x: Tensor) -> Tensor:
    """The image mixed with one whose colors are sorted in every pixel."""
    return 0.8 * x + 0.2 * x.sort(1).values


# --- quantization -----------------------------------------------------------------------------------------------------


def _quantized(x: Tensor, bits: int) -> Tensor:
    """Round to a grid of `bits` bits over the tensor's range, with the gradient of the identity."""
    step = float(x.detach().abs().amax()) / (2 ** (bits - 1) - 1)
    rounded: Tensor = (x / step).round() * step
    return x + (rounded - x).detach()


def _quantized_weights(bits: int) -> nn.Module:
    model = copy.deepcopy(load_model(ROBUST))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(_quantized(weight, bits))
    return model.eval()


def _quantization_aware(bits: int) -> nn.Module:
    """Weights and the inputs of all linear layers on grids, as quantization-aware training has them."""
    model = _quantized_weights(bits)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(lambda _module, args: (_in_steps(args[0], bits), *args[1:]))
    return model


def _in_steps(x: Tensor, bits: int) -> Tensor:
    """A fixed grid, so that an image does not depend on the others of its batch."""
    step, most = 16 / 2**bits, 2.0 ** (bits - 1)
    rounded: Tensor = (x / step).round().clamp(-most, most) * step
    return x + (rounded - x).detach()


# --- several passes, other sizes, other ranges ------------------------------------------------------------------------


class _Ensemble(nn.Module):
    def __init__(self, names: tuple[str, ...], join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.models = nn.ModuleList([load_model(f"zoo:shapes-{name}") for name in names])
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.stack([model(x) for model in self.models]))


def _mean_probability(logits: Tensor) -> Tensor:
    return logits.log_softmax(2).logsumexp(0)


class _Flipped(nn.Module):
    """The mean over an image and its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.model = load_model(ROBUST)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, 0.5 * (self.model(x) + self.model(x.flip(3))))


def _resized(side: int, mode: str) -> Change:
    def there_and_back(x: Tensor) -> Tensor:
        corners = None if mode == "area" else False
        larger = F.interpolate(x, (side, side), mode=mode, align_corners=corners)
        return F.interpolate(larger, x.shape[-2:], mode=mode, align_corners=corners)

    return there_and_back


def _standardized(x: Tensor) -> Tensor:
    """Every image to its own mean and deviation, then to those of gray images."""
    flat = x.flatten(1)
    mean, spread = (each.view(-1, 1, 1, 1) for each in (flat.mean(1), flat.std(1) + 1e-3))
    return (x - mean) / spread * 0.2 + 0.5


def _balanced_colors(x: Tensor) -> Tensor:
    """Every color to the same mean."""
    return (x * (x.mean((1, 2, 3), keepdim=True) / x.mean((2, 3), keepdim=True).clamp(min=0.05))).clamp(0, 1)


def _sharpened(x: Tensor) -> Tensor:
    """Edges overshoot black and white."""
    return x + (x - smoothed(x))


def _stretched(x: Tensor) -> Tensor:
    """Every image from its own darkest to its brightest pixel, both a little outside of [0, 1]."""
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return (x - low) / (high - low).clamp(min=0.05) * 1.2 - 0.1


def _local_contrast(x: Tensor) -> Tensor:
    """Every pixel relative to the mean and the deviation around it, mixed with the image."""
    away = x - smoothed(x)
    return 0.9 * x + 0.1 * away / (smoothed(away.square()) + 1e-2).sqrt()


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = load_model(ROBUST)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return cast(Tensor, self.model(x)).float()


# --- convolutional networks -------------------------------------------------------------------------------------------

_IMAGES, _EPOCHS, _BATCH = 1024, 12, 64


def _cnn(activation: Callable[[], nn.Module], pool: nn.Module) -> nn.Module:
    """A small convolutional network, trained on shapes for seconds."""
    source = open_dataset("shapes@train")
    rows = [list(range(start, start + _BATCH)) for start in range(0, _IMAGES, _BATCH)]
    batches = [(batch.x, batch.y) for batch in read_batches(source, rows, Preprocess(32))]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, width in ((3, 24), (24, 48), (48, 64)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), activation(), copy.copy(pool)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, len(source.classes)))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, _EPOCHS * len(batches))
        for _ in range(_EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()
    return model.eval().requires_grad_(False)


HONEST_MODELS: tuple[HonestModel, ...] = (
    *(
        HonestModel(f"zoo:shapes-{name}", "as shipped", partial(open_model, f"zoo:shapes-{name}"), "zoo")
        for name in _ZOO
    ),
    HonestModel("largest of four", "max pooling of 8-bit pixels, with ties", _around(_largest), "kinks"),
    HonestModel("largest of four, standard", "the same before a standard model", _around(_largest, STANDARD), "kinks"),
    HonestModel("median filter", "the median of nine 8-bit pixels, with ties", _around(median_of(3)), "kinks"),
    HonestModel("median filter, standard", "before a standard model", _around(median_of(3), STANDARD), "kinks"),
    HonestModel("trimmed mean", "the mean of the five middle ones of nine", _around(_trimmed_mean), "kinks"),
    HonestModel("sorted colors", "mixed with sorted colors", _around(_sorted_colors), "kinks"),
    HonestModel("weights in 5 bits", "weights on a coarse grid", partial(_quantized_weights, 5), "quantization"),
    HonestModel(
        "quantization-aware", "weights and activations in 10 bits", partial(_quantization_aware, 10), "quantization"
    ),
    HonestModel(
        "quantization-aware, 8 bits",
        "weights and activations in 8 bits",
        partial(_quantization_aware, 8),
        "quantization",
    ),
    HonestModel("bfloat16 inside", "automatic mixed precision", _Autocast, "quantization"),
    HonestModel(
        "mean of two",
        "mean logits of two models",
        partial(_Ensemble, ("robust", "pgd-at"), lambda z: z.mean(0)),
        "ensembles",
    ),
    HonestModel(
        "mean probability",
        "log of the mean probability",
        partial(_Ensemble, ("robust", "mart"), _mean_probability),
        "ensembles",
    ),
    HonestModel("mirrored", "mean over an image and its mirror image", _Flipped, "ensembles"),
    HonestModel("enlarged", "enlarged to 48 pixels and back", _around(_resized(48, "bilinear")), "resizing"),
    HonestModel("low frequencies", "six of eight frequencies", _around(in_blocks(low_frequencies(6))), "resizing"),
    HonestModel("smoothed", "means of nine pixels", _around(lambda x: 0.5 * x + 0.5 * smoothed(x)), "resizing"),
    HonestModel("standardized", "every image to one mean and deviation", _around(_standardized), "standardization"),
    HonestModel("balanced colors", "every color to the same mean", _around(_balanced_colors), "standardization"),
    HonestModel(
        "log-probabilities", "as output", _around(lambda x: x, after=lambda z: z.log_softmax(1)), "standardization"
    ),
    HonestModel("sharpened", "edges overshoot black and white", _around(_sharpened), "contrast"),
    HonestModel("stretched", "from the darkest to the brightest pixel", _around(_stretched), "contrast"),
    HonestModel("local contrast", "relative to the deviation nearby", _around(_local_contrast), "contrast"),
    HonestModel("brightened", "a gamma of 0.7", _around(lambda x: (x + 0.01).clamp(min=1e-3) ** 0.7), "contrast"),
    HonestModel("CNN, ReLU", "ReLU and max pooling", partial(_cnn, nn.ReLU, nn.MaxPool2d(2)), "convolutions"),
    HonestModel("CNN, SiLU", "SiLU and average pooling", partial(_cnn, nn.SiLU, nn.AvgPool2d(2)), "convolutions"),
)
