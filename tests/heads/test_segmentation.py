"""Linear segmentation: scores of hand-made confusions, the head's arithmetic, and learning on shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel import load_model
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.heads.frozen_features import feature_width, token_features
from vitadel.heads.segmentation import IGNORED, Confusion, SegmentationHead, Segmenter, rate_at, train_patch_head
from vitadel.instrument import extra_tokens, frozen
from vits import make_vit, pixels


def row(*values: int) -> Tensor:
    """One image of one line."""
    return torch.tensor(values).view(1, 1, -1)


def counted(classes: int, *pairs: tuple[Tensor, Tensor]) -> Confusion:
    confusion = Confusion(classes)
    for truth, guess in pairs:
        confusion.add(guess, truth)
    return confusion


def test_both_means_by_hand() -> None:
    """Image 1: class 0 has 2 of 3, class 1 has 1 of 2. Image 2: class 0 has 0 of 1, class 1 has 3 of 4."""
    one = (row(0, 0, 0, 1), row(0, 0, 1, 1))
    two = (row(1, 1, 1, 1), row(1, 1, 1, 0))
    confusion = counted(4, one, two)
    assert confusion.matrix[:2, :2].tolist() == [[2, 1], [1, 4]]
    assert confusion.matrix.sum() == 8
    iou = confusion.iou()
    assert iou[:2].tolist() == [pytest.approx(2 / 4), pytest.approx(4 / 6)]
    assert iou[2:].isnan().all()
    assert confusion.mean_iou() == pytest.approx((2 / 4 + 4 / 6) / 2)
    per_image = ((2 / 3 + 1 / 2) / 2 + (0 + 3 / 4) / 2) / 2
    assert confusion.mean_iou_per_image() == pytest.approx(per_image)
    assert confusion.accuracy() == 6 / 8
    together = counted(4, (torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])))
    assert torch.equal(together.matrix, confusion.matrix)
    assert together.mean_iou_per_image() == pytest.approx(per_image)


def test_a_class_in_prediction_only_counts_as_nothing() -> None:
    confusion = counted(3, (row(0, 0, 0, 0), row(0, 0, 0, 2)))
    assert confusion.iou()[2] == 0
    assert confusion.mean_iou() == pytest.approx((3 / 4 + 0) / 2)
    assert confusion.mean_iou_per_image() == pytest.approx((3 / 4 + 0) / 2)


def test_ignored_pixels_and_images_do_not_count() -> None:
    part = (row(0, 1, IGNORED, IGNORED), row(0, 1, 1, 2))
    nothing = (row(IGNORED, IGNORED, IGNORED, IGNORED), row(0, 0, 0, 0))
    confusion = counted(3, part, nothing)
    assert confusion.mean_iou() == confusion.mean_iou_per_image() == confusion.accuracy() == 1.0
    assert confusion.images == 1
    with pytest.raises(UserError, match="no pixel"):
        counted(3, nothing).mean_iou()
    with pytest.raises(UserError, match="no pixel"):
        Confusion(3).mean_iou_per_image()


def test_masks_of_bytes_are_read_too() -> None:
    truth = row(0, 1, IGNORED).to(torch.uint8)
    assert counted(2, (truth, row(0, 0, 0))).accuracy() == 0.5


@pytest.mark.parametrize(
    ("truth", "guess", "message"),
    [
        (row(0, 3), row(0, 0), "masks hold class numbers from 0 to 3; there are 3"),
        (row(0, 1), row(-1, 0), "predictions hold class numbers from -1"),
        (row(0, 1), torch.zeros(1, 3, 1, 2), "argmax"),
    ],
)
def test_wrong_numbers_are_reported(truth: Tensor, guess: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Confusion(3).add(guess, truth)


@pytest.mark.parametrize("classes", [1, 256])
def test_numbers_of_classes_that_cannot_be(classes: int) -> None:
    for make in (Confusion, lambda count: SegmentationHead(4, count)):
        with pytest.raises(UserError, match=f"2 to 255.*got {classes}"):
            make(classes)


def test_the_segmenter_is_norm_convolution_and_bilinear_growth() -> None:
    model, x = make_vit("dinov2_registers", patch_size=4), pixels("dinov2_registers")
    segmenter = Segmenter(model, SegmentationHead(24, 5, seed=1).eval())
    head: Any = segmenter.head
    with torch.no_grad():
        head.norm.running_mean.copy_(torch.linspace(-1, 1, 24))
        head.norm.running_var.copy_(torch.linspace(0.5, 2, 24))
        assert 0.007 < head.conv.weight.std() < 0.013
        assert not head.conv.bias.any()
        patches = token_features(model, x)[0].patch_tokens
        scaled = (patches - head.norm.running_mean) / (head.norm.running_var + 1e-5).sqrt()
        logits = (scaled @ head.conv.weight[:, :, 0, 0].T).view(2, 8, 8, 5).permute(0, 3, 1, 2)
        expected = F.interpolate(logits, scale_factor=4, mode="bilinear", align_corners=False)
        torch.testing.assert_close(segmenter(x), expected, rtol=0, atol=1e-5)
        with extra_tokens(model, torch.randn(3, 24, generator=torch.Generator().manual_seed(0))):
            assert segmenter(x).shape == (2, 5, 32, 32)


def test_images_that_are_not_square() -> None:
    """Rows before columns: a bright left half must light up the left half of the map."""
    model = make_vit("vit", img_size=(16, 32))
    x = torch.zeros(1, 3, 16, 32)
    x[..., :16] = 1.0
    patch_map = Segmenter(model, SegmentationHead(24, 2)).patch_map(x)
    tokens = token_features(model, x)[0].patch_tokens
    assert patch_map.shape == (1, 24, 2, 4)
    assert torch.equal(patch_map[0, :, 1, 2], tokens[0, 1 * 4 + 2])


def test_the_rate_goes_up_and_down_in_lines() -> None:
    assert [rate_at(step, 10, 4) for step in range(10)] == pytest.approx(
        [1 / 4, 2 / 4, 3 / 4, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    )
    assert rate_at(0, 5, 0) == 1.0
    assert rate_at(5, 5, 0) == 0.0


def shapes_batches(count: int, split: str) -> list[tuple[Tensor, Tensor]]:
    data = Shapes(split=split, size=32)
    batches = []
    for first in range(0, count, 32):
        image, _, mask = data.render(range(first, first + 32))
        batches.append((image.float() / 255, (mask > 0).long()))
    return batches


def trained_segmenter(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], classes: int, rate: float = 1e-3, warm_up: float = 0.0
) -> Segmenter:
    segmenter = Segmenter(model, SegmentationHead(feature_width(model), classes))
    with frozen(model), torch.no_grad():
        maps = [(segmenter.patch_map(x), masks) for x, masks in batches]
    train_patch_head(segmenter.head, maps, steps=len(maps), rate=rate, decay=1e-4, warm_up=warm_up)
    return segmenter


@pytest.mark.slow
def test_foreground_is_learned_and_the_model_is_not_touched() -> None:
    """On features of a small model that was made robust; random ones hardly tell a shape from its ground."""
    model = load_model("zoo:shapes-robust").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    segmenter = trained_segmenter(model, 10 * shapes_batches(128, "train"), 2, rate=1e-2, warm_up=0.0375)
    assert not segmenter.head.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert model.training
    model.eval()
    confusion, majority = Confusion(2), Confusion(2)
    with torch.no_grad():
        for x, mask in shapes_batches(64, "val"):
            confusion.add(segmenter(x).argmax(1), mask)
            majority.add(torch.zeros_like(mask), mask)
    share = float(majority.matrix[0].sum() / majority.matrix.sum())
    assert majority.mean_iou() == pytest.approx(share / 2)
    assert confusion.accuracy() > share + 0.08
    assert confusion.mean_iou() > majority.mean_iou() + 0.3
    assert confusion.mean_iou_per_image() > majority.mean_iou_per_image() + 0.3


def test_steps_are_adamw_on_the_pixels_that_count() -> None:
    """Batches with different shares of them: to Adam a loss of another scale is the same, unless the scale changes."""
    model, x = make_vit("vit"), pixels("vit")
    masks = torch.full((2, 2, 32, 32), IGNORED)
    counts = (16, 2)  # lines
    for mask, lines in zip(masks, counts, strict=True):
        mask[:, :lines] = 1
    trained: Any = trained_segmenter(model, [(x, mask) for mask in masks], 3).head
    head: Any = SegmentationHead(24, 3)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=1e-4)
    tokens = token_features(model, x)[0].patch_tokens.detach()
    for lines, rate in zip(counts, (1e-3, 5e-4), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = head(tokens.mT.reshape(2, 24, 4, 4), (32, 32)).permute(0, 2, 3, 1)[:, :lines].reshape(-1, 3)
        F.cross_entropy(logits, torch.ones(len(logits), dtype=torch.int64)).backward()
        optimizer.step()
    for key, value in head.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_all_ignored_leaves_finite_weights() -> None:
    model, x = make_vit("vit"), pixels("vit")
    segmenter = trained_segmenter(model, 2 * [(x, torch.full((2, 32, 32), IGNORED))], 2)
    assert all(math.isfinite(float(value.double().sum())) for value in segmenter.head.state_dict().values())
