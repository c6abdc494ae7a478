"""Linear segmentation on frozen patch tokens, in the manner of DINOv2 (Oquab et al., 2023), and its two mIoU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.errors import Mistake
from vitadel.evaluation.frozen_features import feature_width, token_features
from vitadel.instrument.grid import patch_grid
from vitadel.instrument.hooks import frozen
from vitadel.runtime.draws import Draws

__all__ = ["IGNORED", "Confusion", "SegmentationHead", "Segmenter", "rate_at", "train_segmentation"]

IGNORED = 255
"""The label of pixels that count neither in the loss nor in any score."""


class SegmentationHead(nn.Module):
    """BatchNorm and a 1x1 convolution on a map of patch tokens; logits are made as large as the image, bilinearly."""

    def __init__(self, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        _check_classes(classes)
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, classes, 1)
        weight = 0.01 * Draws.of_samples(seed, range(classes)).stream("segmentation head").normal(width, 1, 1)
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


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """The share of the full rate at a step: linear up to 1 over `warm_up` steps, then linear down, 0 after the last."""
    return (step + 1) / warm_up if step < warm_up else (steps - step) / (steps - warm_up)


def train_segmentation(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    *,
    steps: int = 40_000,
    rate: float = 1e-3,
    decay: float = 1e-4,
    warm_up: float = 0.0375,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Segmenter:
    """A head trained by AdamW on what the frozen model gives; the segmenter's head is in eval mode.

    `batches` gives pixels (n, 3, height, width) in [0, 1] and masks (n, height, width) of class numbers or `IGNORED`.
    It is gone through again and again until `steps` are done: give a list, an object that can be iterated repeatedly,
    or an endless iterator. `warm_up` is a share of the steps: 1500 of 40,000. The model must be on `device` already.
    """
    if steps < 1 or not 0 <= warm_up < 1:
        raise Mistake(
            f"train_segmentation: steps={steps} and warm_up={warm_up:g}; give 1 or more, and a share below 1."
        )
    head = SegmentationHead(feature_width(model), classes, seed).to(device).train()
    segmenter = Segmenter(model, head)
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=decay)
    rising, source = int(warm_up * steps), _endless(batches)
    with frozen(model):
        for step in range(steps):
            pixels, masks = (part.to(device) for part in next(source))
            _check_masks(pixels, masks, classes)
            with torch.no_grad():
                patch_map = segmenter.patch_map(pixels)
            for group in optimiser.param_groups:
                group["lr"] = rate * rate_at(step, steps, rising)
            optimiser.zero_grad()
            _loss(head(patch_map, _size(pixels)), masks.long()).backward()
            optimiser.step()
    head.eval().zero_grad()
    segmenter.training = model.training
    return segmenter


@dataclass
class Confusion:
    """Counts pixels by true and predicted class, over all images and image by image."""

    classes: int
    matrix: Tensor = field(init=False)  # (true, predicted)
    images: int = field(default=0, init=False)
    _sum_of_images: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        _check_classes(self.classes)
        self.matrix = torch.zeros(self.classes, self.classes, dtype=torch.int64)

    def add(self, predictions: Tensor, masks: Tensor) -> None:
        """Class numbers (n, height, width) of both; pixels of `IGNORED` truth do not count, whatever was predicted."""
        if predictions.shape != masks.shape or masks.dim() != 3:
            raise Mistake(
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
        self.matrix += each.sum(0)
        each = each[each.sum((1, 2)) > 0]  # an image that is all ignored has no score
        self.images += len(each)
        self._sum_of_images += float(_iou(each).nanmean(1).sum())

    def iou(self) -> Tensor:
        """Intersection over union per class, over all pixels of the data set; NaN where a class is absent from both."""
        self._refuse_nothing()
        return _iou(self.matrix)

    def mean_iou(self) -> float:
        """The data set's mIoU: the mean over the classes that occur in truth or prediction."""
        return float(self.iou().nanmean())

    def mean_iou_per_image(self) -> float:
        """The mean over images of each image's own mIoU: the robust evaluation of Robustness Tokens' released code.

        Not comparable with the data set's: a rare class counts only in the images that have it.
        """
        self._refuse_nothing()
        return self._sum_of_images / self.images

    def accuracy(self) -> float:
        """The share of pixels that got their class."""
        self._refuse_nothing()
        return float(self.matrix.diagonal().sum() / self.matrix.sum())

    def _refuse_nothing(self) -> None:
        if self.images == 0:
            raise Mistake(
                f"no pixel was counted yet, or all were ignored ({IGNORED}). Add predictions and masks first."
            )


def _iou(matrix: Tensor) -> Tensor:
    """Along the last two axes, in float64; 0 / 0 is NaN."""
    matrix = matrix.double()
    hit = matrix.diagonal(dim1=-2, dim2=-1)
    return hit / (matrix.sum(-1) + matrix.sum(-2) - hit)


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[-2], x.shape[-1]


def _endless(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        before = None
        for before in batches:
            yield before
        if before is None:
            raise Mistake("train_segmentation ran out of batches. Give a list, or an iterator with one for every step.")


def _loss(logits: Tensor, masks: Tensor) -> Tensor:
    """The mean over pixels that count; 0, not NaN, if none does."""
    total = F.cross_entropy(logits, masks, ignore_index=IGNORED, reduction="sum")
    return total / (masks != IGNORED).sum().clamp(min=1)


def _check_masks(pixels: Tensor, masks: Tensor, classes: int) -> None:
    if masks.shape != (len(pixels), *_size(pixels)) or masks.is_floating_point():
        raise Mistake(
            f"masks of shape {tuple(masks.shape)} and type {str(masks.dtype).removeprefix('torch.')} given for pixels "
            f"of shape {tuple(pixels.shape)}; give whole numbers of shape (images, height, width)."
        )
    _check_range(masks[masks != IGNORED], classes, "masks")


def _check_classes(classes: int) -> None:
    if not 2 <= classes <= IGNORED:
        raise Mistake(
            f"segmentation takes 2 to {IGNORED} classes ({IGNORED} marks pixels to leave out), got {classes}."
        )


def _check_range(values: Tensor, classes: int, what: str) -> None:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= classes):
        raise Mistake(
            f"{what} hold class numbers from {int(values.min())} to {int(values.max())}; there are {classes} classes, "
            f"numbered from 0, and {IGNORED} for pixels to leave out."
        )
