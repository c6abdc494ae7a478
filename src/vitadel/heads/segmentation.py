"""Linear segmentation on frozen patch tokens, in the manner of DINOv2 (Oquab et al., 2023), and its two mIoU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.errors import UserError
from vitadel.heads.frozen_features import token_features
from vitadel.instrument.tokens import patch_grid
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim

IGNORED = 255
"""The label of pixels that count neither in the loss nor in any score."""

_ROUNDS_AT_ONCE = 256  # of the bootstrap


class SegmentationHead(nn.Module):
    """BatchNorm and a 1x1 convolution on a map of patch tokens; logits are made as large as the image, bilinearly."""

    def __init__(self, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        _check_classes(classes)
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, classes, 1)
        weight = 0.01 * SampleRNG.of_samples(seed, range(classes)).stream("segmentation head").normal(width, 1, 1)
        with torch.no_grad():
            self.conv.weight.copy_(weight)
            self.conv.bias.zero_()  # type: ignore[union-attr]  # Conv2d is made with one

    def forward(self, patch_map: Tensor, size: tuple[int, int]) -> Tensor:
        logits: Tensor = self.conv(self.norm(patch_map.to(self.conv.weight.dtype)))
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """A model and a head on its last block's patch tokens: pixels in [0, 1] to logits (batch, classes, height, width).

    The model is held as it is; its mode and parameters are the caller's.
    """

    def __init__(self, model: nn.Module, head: SegmentationHead) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self._grids: dict[tuple[int, int], tuple[int, int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.patch_map(x), _size(x))
        return logits

    def patch_map(self, x: Tensor) -> Tensor:
        """(batch, channels, rows, columns)."""
        size = _size(x)
        if size not in self._grids:
            self._grids[size] = patch_grid(self.model, x)
        patches = token_features(self.model, x)[-1].patch_tokens
        return patches.mT.reshape(len(x), patches.shape[2], *self._grids[size])


def slide(model: nn.Module, x: Tensor, window: tuple[int, int], stride: int, size: Sequence[int]) -> Tensor:
    """Logits of whole images from overlapping windows, averaged where they overlap, and resized to `size`.

    Windows lie `stride` apart; the last ones end at the border, as in mmsegmentation.
    """
    tops, lefts = (_starts(side, own, stride) for side, own in zip(x.shape[-2:], window, strict=True))
    total: Tensor | None = None
    seen = x.new_zeros(1, 1, *x.shape[-2:])
    for top in tops:
        for left in lefts:
            here = (..., slice(top, top + window[0]), slice(left, left + window[1]))
            logits: Tensor = model(x[here])
            total = x.new_zeros(len(x), logits.shape[1], *x.shape[-2:]) if total is None else total
            total[here] += logits
            seen[here] += 1
    assert total is not None, "there is at least one window"
    return F.interpolate(total / seen, size=tuple(size), mode="bilinear", align_corners=False)


def _starts(side: int, window: int, stride: int) -> list[int]:
    number = max(0, -(-(side - window) // stride)) + 1
    return [min(k * stride, side - window) for k in range(number)]


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """The share of the full rate at a step: linear up to 1 over `warm_up` steps, then linear down, 0 after the last."""
    return (step + 1) / warm_up if step < warm_up else (steps - step) / (steps - warm_up)


def train_patch_head(
    head: SegmentationHead,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    steps: int,
    rate: float,
    decay: float,
    warm_up: float,
) -> None:
    """Train a head in place by AdamW, on `steps` batches of patch maps and of masks of class numbers or `IGNORED`.

    `warm_up` is a share of the steps, below 1. The head ends in eval mode.
    """
    head.train()
    device, optimizer = head.conv.weight.device, torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=decay)
    rising = int(warm_up * steps)
    for step, batch in zip(range(steps), batches, strict=True):
        patch_map, masks = (part.to(device) for part in batch)
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_at(step, steps, rising)
        optimizer.zero_grad()
        with torch.enable_grad():
            _loss(head(patch_map, _size(masks)), masks.long()).backward()
        optimizer.step()
    head.eval().zero_grad()


@dataclass(frozen=True)
class _PixelAim:
    model: nn.Module
    masks: Tensor

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(self.model(z), self.masks, ignore_index=IGNORED, reduction="none")
        counted = (self.masks != IGNORED).sum((1, 2)).clamp(min=1)
        return each.sum((1, 2)) / counted, torch.zeros(len(z), dtype=torch.bool, device=z.device)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, masks=self.masks[chosen])


@dataclass(frozen=True)
class OnPixels:
    """A goal for PGD on a segmenter: the mean cross-entropy of each image's pixels that count.

    Labels are masks. No image is ever called fooled: how much of it is lost is a matter of degree.
    """

    @property
    def forwards(self) -> int:
        return 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _PixelAim(model, y)


@dataclass
class Confusion:
    """Counts pixels by true and predicted class, over all images and image by image."""

    classes: int
    matrix: Tensor = field(init=False)  # (true, predicted), of all images
    counts: Tensor = field(init=False)  # (images, 3, classes): pixels of the class hit, true and predicted

    def __post_init__(self) -> None:
        _check_classes(self.classes)
        self.matrix = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        self.counts = torch.zeros(0, 3, self.classes, dtype=torch.int64)

    @property
    def images(self) -> int:
        """How many had a pixel that counts."""
        return len(self.counts)

    def add(self, predictions: Tensor, masks: Tensor) -> None:
        """Class numbers (n, height, width) of both; pixels of `IGNORED` truth do not count, whatever was predicted."""
        if predictions.shape != masks.shape or masks.dim() != 3:
            raise UserError(
                f"predictions of shape {tuple(predictions.shape)} and masks of shape {tuple(masks.shape)} given; "
                "both must be (images, height, width). Take the argmax of logits over dim 1 first."
            )
        truth, guess = masks.cpu().long(), predictions.cpu().long()
        counts = truth != IGNORED
        for what, values in (("masks", truth[counts]), ("predictions", guess[counts])):
            _check_range(values, self.classes, what)
        image = torch.arange(len(truth)).view(-1, 1, 1).expand_as(truth)
        cell = ((image * self.classes + truth) * self.classes + guess)[counts]
        each = cell.bincount(minlength=len(truth) * self.classes**2).view(-1, self.classes, self.classes)
        each = each[each.sum((1, 2)) > 0]  # an image that is all ignored has no score
        hits = each.diagonal(dim1=1, dim2=2)
        self.take_in(each.sum(0), torch.stack([hits, each.sum(2), each.sum(1)], dim=1))

    def take_in(self, matrix: Tensor, counts: Tensor) -> None:
        """What was counted elsewhere, of other images."""
        self.matrix = self.matrix + matrix
        self.counts = torch.cat([self.counts, counts])

    def iou(self) -> Tensor:
        """Intersection over union per class, over all pixels of the data set; NaN where a class is absent from both."""
        self._refuse_nothing()
        return _iou(self.counts.sum(0))

    def mean_iou(self) -> float:
        """The data set's mIoU: the mean over the classes that occur in truth or prediction."""
        return float(self.iou().nanmean())

    def mean_iou_per_image(self) -> float:
        """The mean over images of each image's own mIoU: the robust evaluation of Robustness Tokens' released code.

        Not comparable with the data set's: a rare class counts only in the images that have it.
        """
        self._refuse_nothing()
        return float(_iou(self.counts).nanmean(1).mean())

    def accuracy(self) -> float:
        """The share of pixels that got their class."""
        self._refuse_nothing()
        return float(self.matrix.diagonal().sum() / self.matrix.sum())

    def intervals(self, seed: int = 0, rounds: int = 2000) -> tuple[tuple[float, float], tuple[float, float]]:
        """95 % intervals of `mean_iou` and `mean_iou_per_image`: percentiles of a bootstrap over images (Efron 1979).

        Pixels of an image are no independent samples; images are taken to be.
        """
        self._refuse_nothing()
        drawn = SampleRNG.of_samples(seed, range(rounds)).stream("bootstrap").integers(self.images, self.images)
        own = _iou(self.counts).nanmean(1)
        data_set = torch.empty(rounds, dtype=torch.float64)
        for first in range(0, rounds, _ROUNDS_AT_ONCE):
            chosen = drawn[first : first + _ROUNDS_AT_ONCE]
            weights = torch.zeros(chosen.shape, dtype=torch.float64)
            weights.scatter_add_(1, chosen, torch.ones_like(weights))
            sums = (weights @ self.counts.double().flatten(1)).view(-1, 3, self.classes)
            data_set[first : first + _ROUNDS_AT_ONCE] = _iou(sums).nanmean(1)
        return _percentiles(data_set), _percentiles(own[drawn].mean(1))

    def _refuse_nothing(self) -> None:
        if self.images == 0:
            raise UserError(
                f"no pixel was counted yet, or all were ignored ({IGNORED}). Add predictions and masks first."
            )


def _iou(counts: Tensor) -> Tensor:
    """From pixels hit, true and predicted, (..., 3, classes), in float64; 0 / 0 is NaN."""
    hit, true, predicted = counts.double().unbind(-2)
    return hit / (true + predicted - hit)


def _percentiles(values: Tensor) -> tuple[float, float]:
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _loss(logits: Tensor, masks: Tensor) -> Tensor:
    """The mean over pixels that count; 0, not NaN, if none does."""
    total = F.cross_entropy(logits, masks, ignore_index=IGNORED, reduction="sum")
    return total / (masks != IGNORED).sum().clamp(min=1)


def _check_classes(classes: int) -> None:
    if not 2 <= classes <= IGNORED:
        raise UserError(
            f"segmentation takes 2 to {IGNORED} classes ({IGNORED} marks pixels to leave out), got {classes}."
        )


def _check_range(values: Tensor, classes: int, what: str) -> None:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= classes):
        raise UserError(
            f"{what} hold class numbers from {int(values.min())} to {int(values.max())}; there are {classes} classes, "
            f"numbered from 0, and {IGNORED} for pixels to leave out."
        )
