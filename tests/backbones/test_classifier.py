"""Pixels in [0, 1] in, logits out: normalization, precision, outputs of all kinds, and what is noticed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitadel.backbones.classifier import (
    Classifier,
    check_logits,
    check_pixels,
    logits_of,
    looks_like_probabilities,
    modules_in_train_mode,
    wrap,
)
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ChannelMeans(nn.Module):
    """Logits are the mean of each channel, so that normalization can be computed by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class Answers(nn.Module):
    """Returns whatever it was given, around the true logits."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(x.mean(dim=(2, 3)))


def images(batch: int = 4) -> Tensor:
    return torch.rand(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_normalizes_each_channel_by_hand() -> None:
    x = images()
    got = wrap(ChannelMeans(), MEAN, STD)(x)
    for channel in range(3):
        expected = (x[:, channel].mean(dim=(1, 2)) - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(got[:, channel], expected, rtol=1e-5, atol=1e-6)


def test_identity_normalization_hands_over_the_very_pixels() -> None:
    seen: list[Tensor] = []
    model = wrap(Answers(lambda logits: logits))
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = images()
    model(x)
    assert seen[0] is x


def test_gradient_reaches_the_pixels_through_the_normalization() -> None:
    x = images(1).requires_grad_()
    (grad,) = torch.autograd.grad(wrap(ChannelMeans(), MEAN, STD)(x)[0, 1], x)
    torch.testing.assert_close(grad[0, 1], torch.full((8, 8), 1 / (64 * STD[1])))
    assert grad[0, 0].abs().max() == 0


@pytest.mark.parametrize(
    "shape",
    [
        lambda logits: logits,
        lambda logits: SimpleNamespace(logits=logits, hidden_states=None),
        lambda logits: {"loss": None, "logits": logits},
        lambda logits: (logits, logits * 0),
    ],
    ids=["tensor", "hugging face", "dict", "tuple"],
)
def test_finds_the_logits_in_what_a_model_returns(shape: Any) -> None:
    x = images()
    torch.testing.assert_close(wrap(Answers(shape))(x), x.mean(dim=(2, 3)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ({"features": 1}, "a dict with keys 'features'"),
        ({}, "a dict with keys none"),
        ([torch.zeros(1)], "a list of Tensor"),
        ((None, 3), "a tuple of NoneType, int"),
        ((), "a tuple of nothing"),
        (None, "NoneType"),
        (SimpleNamespace(logits="text"), "SimpleNamespace"),
    ],
)
def test_other_outputs_are_named(output: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        logits_of(output)
    assert f"returned {said};" in str(caught.value)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(x.mean(dim=(2, 3))))


def test_moving_to_bf16_keeps_the_normalization_exact_and_gives_float32_logits() -> None:
    model = wrap(Linear(), MEAN, STD).bfloat16()
    assert model.backbone.get_parameter("layer.weight").dtype == torch.bfloat16
    assert model.mean.dtype == model.std.dtype == torch.float32
    assert model.mean.flatten().tolist() == torch.tensor(MEAN).tolist()
    assert model(images()).dtype == torch.float32


def test_float64_control_stays_float64_for_float32_pixels() -> None:
    single, x = wrap(Linear(), MEAN, STD), images()
    double = copy.deepcopy(single).double()
    assert double(x).dtype == torch.float64
    torch.testing.assert_close(double(x).float(), single(x), rtol=1e-5, atol=1e-6)


def test_autocast_gives_float32_logits() -> None:
    model = wrap(Linear(), MEAN, STD)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.backbone(images()).dtype == torch.bfloat16
        assert model(images()).dtype == torch.float32


def test_normalization_is_no_part_of_the_state() -> None:
    assert list(wrap(Linear(), MEAN, STD).state_dict()) == ["backbone.layer.weight", "backbone.layer.bias"]


def test_wrapping_leaves_every_mode_as_it_was() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten()).eval()
    module[1].train()
    model = wrap(module)
    assert not model.training
    assert modules_in_train_mode(model) == ["backbone.1"]
    assert modules_in_train_mode(model.train()) == ["(model)", "backbone", "backbone.0", "backbone.1", "backbone.2"]
    assert modules_in_train_mode(model.eval()) == []


def test_wrap_records_its_arguments_and_the_classes_of_the_module() -> None:
    module = ChannelMeans()
    assert wrap(module).record == ModelRecord("wrapped")
    record = wrap(module, (0.5,), (0.25,), input_size=8, num_classes=3).record
    assert (record.mean, record.std, record.input_size, record.num_classes) == ((0.5,) * 3, (0.25,) * 3, (8, 8), 3)
    module.num_classes = 7  # type: ignore[assignment]
    assert wrap(module).record.num_classes == 7
    module.num_classes = None  # type: ignore[assignment]
    module.config = SimpleNamespace(num_labels=9)  # type: ignore[assignment]
    assert wrap(module).record.num_classes == 9


def test_wrapping_a_timm_model_with_another_normalization_is_noted() -> None:
    module = ChannelMeans()
    module.pretrained_cfg = {"mean": MEAN, "std": STD}  # type: ignore[assignment]
    assert "0.485" in wrap(module).record.notes["normalisation"]
    assert wrap(module, MEAN, STD).record.notes == {}


def test_wrap_refuses_nonsense() -> None:
    with pytest.raises(UserError, match=r"takes an nn.Module, got function"):
        wrap(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mean must be three numbers"):
        wrap(ChannelMeans(), mean=(0.5, 0.5))
    with pytest.raises(UserError, match="std must be three positive numbers"):
        wrap(ChannelMeans(), std=(0.5, 0.0, 0.5))


def test_a_classifier_is_not_normalized_twice() -> None:
    model = wrap(ChannelMeans(), MEAN, STD)
    assert wrap(model) is model
    with pytest.raises(UserError, match=r"Classifier already.*`.backbone`"):
        wrap(model, MEAN, STD)


def test_a_copy_keeps_record_and_answers() -> None:
    model = wrap(Linear(), MEAN, STD)
    twin = copy.deepcopy(model)
    assert isinstance(twin, Classifier)
    assert twin.record == model.record
    assert torch.equal(twin(images()), model(images()))


def test_pixels_in_the_box_pass() -> None:
    check_pixels(images())
    check_pixels(torch.tensor([[0.0, 1.0]]))
    check_pixels(torch.zeros(0, 3, 8, 8))
    check_pixels(images().bfloat16())


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ((images() - 0.5) / 0.25, r"pixels in \[0, 1\], got range \[-.*Drop Normalize from the transform"),
        (images() * 255, r"got range \[.*\]. Divide by 255"),
        ((images() * 255).to(torch.uint8), r"got uint8. Convert them: x.float\(\) / 255"),
        (images().masked_fill(images() < 0.5, torch.nan), r"values that are NaN"),
        (images().permute(0, 2, 3, 1), r"got \(4, 8, 8, 3\).*permute\(0, 3, 1, 2\)"),
    ],
    ids=["normalised", "0..255", "bytes", "NaN", "channels last"],
)
def test_other_pixels_are_refused_with_advice(x: Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_pixels(x)


def test_good_logits_pass() -> None:
    check_logits(torch.randn(4, 10), num_classes=10)


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (torch.zeros(4, 7, 16), r"got \(4, 7, 16\).*not a backbone"),
        (torch.zeros(4, 1), "returns 1 class; at least 2"),
        (torch.zeros(4, 3), "returns 3 classes, 10 were announced"),
        (torch.zeros(4, 10).index_fill(0, torch.tensor([1, 3]), torch.nan), "for 2 of 4 images"),
        (torch.zeros(4, 10).index_fill(1, torch.tensor([0]), torch.inf), "for 4 of 4 images"),
    ],
)
def test_bad_logits_are_refused(logits: Tensor, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_logits(logits, num_classes=10)


def test_probabilities_are_distinguished_from_logits() -> None:
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    assert looks_like_probabilities(logits.softmax(1))
    assert not looks_like_probabilities(logits)
    assert not looks_like_probabilities(logits.sigmoid())  # inside [0, 1], but the rows do not add up to 1
    assert not looks_like_probabilities(logits - logits.sum(1, keepdim=True) / 5 + 0.2)  # adds up to 1, but not inside
    one_row_off = logits.softmax(1)
    one_row_off[3] *= 1.001
    assert not looks_like_probabilities(one_row_off)
    assert not looks_like_probabilities(torch.zeros(0, 5))
