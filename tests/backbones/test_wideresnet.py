"""WideResNet: the published size, and the shapes on its way."""

from __future__ import annotations

import pytest
import torch

from vitadel.backbones.load import load_model
from vitadel.errors import UserError


def test_it_has_as_many_parameters_as_published() -> None:
    """36.5 M for 28-10 with 10 classes (table 4 of the paper); the exact number by counting its layers."""
    model = load_model("wideresnet_28_10", weights="random")
    convolutions = 3 * 16 * 9
    norms, width = 0, 16
    for out in (160, 320, 640):
        for place in range(4):
            convolutions += 9 * (width * out + out * out) + (width * out if place == 0 else 0)
            norms += 2 * (width + out)
            width = out
    expected = convolutions + norms + 2 * 640 + 641 * 10
    assert sum(each.numel() for each in model.parameters()) == expected == 36_479_194
    assert model.record.input_size == (32, 32)


def test_small_one_trains_and_takes_other_classes() -> None:
    model = load_model("wideresnet_28_10", weights="random", num_classes=7, kwargs={"depth": 10, "widen": 1})
    x = torch.rand(2, 3, 32, 32, requires_grad=True)
    logits = model(x)
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    maps = model.backbone.blocks(model.backbone.stem(x))  # type: ignore[operator]
    assert maps.shape == (2, 64, 8, 8)
    with pytest.raises(UserError, match=r"depth must be 6 n \+ 4"):
        load_model("wideresnet_28_10", weights="random", kwargs={"depth": 12})
