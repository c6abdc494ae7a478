"""Sizes that patches do not divide are refused before a pass, but only if the model would fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from command_line import vitadel
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.parse import make
from vitadel.backbones.classifier import check_image_size, check_images_fit, wrap
from vitadel.backbones.load import load_model
from vitadel.data import open_dataset
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import Target
from vits import make_vit

VIT = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 3}
MESSAGE = (
    r"images of 36 x 40 pixels cannot be cut into patches of 8 x 8 by '{}'.*The nearest sizes are 32 x 40 and 40 x 40; "
)


class Normalized(nn.Module):
    def __init__(self, net: nn.Module, size: int | None = None) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.size is None else F.interpolate(x, size=self.size)
        out: Tensor = self.net((x - 0.5) / 0.5)
        return out


def dynamic(**more: Any) -> nn.Module:
    return make_vit("vit", dynamic_img_size=True, **more)


def test_a_multiple_is_needed_with_and_without_tokens() -> None:
    classifier = wrap(dynamic())
    model, x = TokenClassifier(classifier, fresh_tokens(24, 2)), torch.rand(2, 3, 36, 40)
    for each in (classifier, model):
        with pytest.raises(UserError, match=MESSAGE.format("wrapped")):
            each(x)
        with pytest.raises(UserError, match=MESSAGE.format("wrapped")):
            make("features-2")(each, x, torch.zeros(2, dtype=torch.long))
        assert each(x[:, :, :32]).shape == (2, 5)  # 32 x 40: another size, whole patches


def test_too_small_for_one_patch() -> None:
    with pytest.raises(UserError, match=r"The nearest sizes are 8 x 8; "):
        check_image_size(dynamic(), (5, 7), "tiny")


def test_a_model_for_one_size_says_which() -> None:
    with pytest.raises(
        UserError, match=r"images of 48 x 48 pixels were given to 'wrapped', which is built for 32 x 32\."
    ):
        wrap(make_vit("vit"))(torch.rand(1, 3, 48, 48))


def test_what_timm_takes_is_taken() -> None:
    """Padding models take any size, and a model trained with pixels left over is used as it was trained."""
    assert wrap(dynamic(dynamic_img_pad=True))(torch.rand(1, 3, 36, 40)).shape == (1, 5)
    siglip = make_vit("siglip", img_size=36)
    check_image_size(siglip, (36, 36), "siglip at 384, patches of 14, in small")
    assert wrap(siglip)(torch.rand(1, 3, 36, 36)).shape == (1, 5)
    for name in ("xcit", "levit", "pit"):  # convolutions, which know no rest
        check_image_size(make_vit(name), (37, 37), name)


def test_wrapped_models_are_asked_before_they_are_doubted() -> None:
    inside, resizing = wrap(Normalized(dynamic())), wrap(Normalized(dynamic(), size=32))
    with pytest.raises(UserError, match=MESSAGE.format("mine")):
        check_images_fit(inside, (36, 40), "mine")
    check_images_fit(inside, (40, 40), "mine")
    check_images_fit(resizing, (36, 40), "mine")


def test_a_run_fails_before_its_first_image() -> None:
    model = wrap(Normalized(make_vit("vit", patch_size=16, dynamic_img_size=True)), input_size=40)
    target = Target(model, "mine", open_dataset("shapes"), "shapes")
    with pytest.raises(UserError, match=r"40 x 40 pixels .* patches of 16 x 16 by 'mine'.*32 x 32 and 48 x 48"):
        _ = target.preprocess


@pytest.mark.parametrize("options", [{"input_size": 36, "kwargs": SMALL}, {"kwargs": {**SMALL, "img_size": 36}}])
def test_loading_reports_it(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"36 x 36 pixels cannot be cut .* The nearest sizes are 32 x 32 and 40 x 40"):
        load_model(VIT, weights="random", num_classes=3, **options)
    with pytest.raises(UserError, match="at least 1 pixel, input size 0"):
        load_model(VIT, weights="random", num_classes=3, input_size=0, kwargs=SMALL)


FACTORY = """
import timm, torch
class Inside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(img_size=28, patch_size=14, depth=1, dynamic_img_size=True)
        self.net = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    def forward(self, x):
        return self.net(x)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", VIT, "--weights=random", "--num-classes=10", "--input-size=30"], "16 x 16 and 32 x 32"),
        (["audit", "python:mine:Inside", "--attacks=features-2"], "28 x 28 and 42 x 42"),
        (["harden", "tokens/shapes", "model.input_size=30"], "28 x 28 and 32 x 32"),
    ],
    ids=["audit", "wrapped", "harden"],
)
def test_the_command_line_ends_with_two_and_one_message(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    done = vitadel(*words, cwd=tmp_path, code=2)
    assert f"The nearest sizes are {said}" in done.stderr
    assert not (tmp_path / "runs").exists()
