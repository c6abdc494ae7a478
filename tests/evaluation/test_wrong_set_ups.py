"""The table of docs/wrong-set-ups.md: each set-up is refused or named, and none ends in 'ok'."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import vitadel
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "wrong-set-ups.md"
ROWS = dict(re.findall(r"^\| ([^|]+?) \| (refused|`[a-z-]+`) \|$", PAGE.read_text(), re.MULTILINE))

N = 100
COLORS = torch.rand(10, 3, generator=torch.Generator().manual_seed(4))
LABELS = torch.arange(N) % 10
NOISE = 0.02 * torch.rand(N, 3, 8, 8, generator=torch.Generator().manual_seed(1))
IMAGES = (COLORS[LABELS][:, :, None, None] * 0.9 + 0.05 + NOISE).clamp(0, 1)
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
TINY = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2}


class Colors(nn.Module):
    """Knows ten colors, as they are after a normalization: always right if the set-up is."""

    def __init__(self, mean=(0.0,) * 3, std=(1.0,) * 3, outputs: int = 10) -> None:
        super().__init__()
        self.num_classes = outputs
        far = torch.full((outputs - 10, 3), 50.0)
        codes = (COLORS * 0.9 + 0.06 - torch.tensor(mean)) / torch.tensor(std)
        self.register_buffer("codes", torch.cat([codes, far]))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return -10 * torch.cdist(x.mean((2, 3)), self.codes)


class Then(nn.Module):
    """Another module after the colors."""

    def __init__(self, change: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.inner, self.change, self.before = Colors(), change, before
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(self.before(x)))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat((IMAGES[0], 0))


def audit(model: Any, data: Any = (IMAGES, LABELS), **more: Any) -> dict[str, Any]:
    return vitadel.audit(model, data, **{"attacks": ["fgsm"], "eps": 1 / 255, **more})


def folder(place: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (place / name).mkdir(parents=True)
        for k in range(4):
            pixels = (IMAGES[number + 10 * k] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(place / name / f"{k}.png")
    return place


def named(model: nn.Module, names: list[str]) -> Classifier:
    return Classifier(model, replace(wrap(model).record, classes=tuple(names), classes_from="a list"))


def trained(clean: float, **record: Any) -> Classifier:
    """A model of the zoo that states the accuracy of its training."""
    model = vitadel.load_model("zoo:shapes-robust")
    training = {"clean": clean, "n": 500, "data": "shapes@val", "trained_on": "shapes@train"}
    return Classifier(model.backbone, replace(model.record, training=training, **record))


def known_colors(clean: float) -> Classifier:
    training = {"clean": clean, "n": 500, "data": "val", "trained_on": "train"}
    return Classifier(Colors(), replace(wrap(Colors()).record, training=training))


def another_variant(place: Path) -> dict[str, Any]:
    place.mkdir(parents=True)
    save_file(timm.create_model("vit_small_patch16_224", **TINY).state_dict(), place / "small.safetensors")
    options = {"weights": place / "small.safetensors", "kwargs": {**TINY, "depth": 2}}
    return audit("vit_tiny_patch16_224", "shapes", limit=20, model_options=options)


WORDS = [f"kind {letter}" for letter in "abcdefghij"]
PERMUTED = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
SWAPPED = torch.tensor([0, 1, 7, 3, 4, 5, 6, 2, 8, 9])
PARTLY_WRONG = torch.where(torch.arange(N) % 3 == 0, (7 * LABELS + torch.arange(N) // 10) % 10, LABELS)
SHUFFLED = torch.randperm(N, generator=torch.Generator().manual_seed(0))

SET_UPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "wrong head: more outputs than classes, names unknown": lambda place: audit(
        Colors(outputs=20), folder(place, WORDS)
    ),
    "wrong head: fewer outputs than classes": lambda place: audit(Colors(), folder(place, [*WORDS, "kind k"])),
    "two classes swapped": lambda place: audit(Colors(), (IMAGES, SWAPPED[LABELS])),
    "class order permuted": lambda place: audit(Colors(), (IMAGES, PERMUTED[LABELS])),
    "class names that the model does not know": lambda place: audit(
        named(Colors(), list("abcdefghij")), folder(place, WORDS)
    ),
    "one folder name that fits two classes": lambda place: audit(
        named(Colors(), [*WORDS[:8], "crane (n02012849)", "crane (n03126707)"]), folder(place, ["crane", *WORDS[:4]])
    ),
    "labels from 1, and as many outputs as classes": lambda place: audit(Colors(), (IMAGES, LABELS + 1)),
    "labels from 1, and more outputs than classes": lambda place: audit(Colors(outputs=20), (IMAGES, LABELS + 1)),
    "labels shuffled": lambda place: audit(Colors(), (IMAGES, LABELS[SHUFFLED])),
    "labels one-hot": lambda place: audit(Colors(), (IMAGES, torch.eye(10)[LABELS])),
    "no normalization": lambda place: audit(Colors(**IMAGENET)),
    "normalization of another model": lambda place: audit(wrap(Colors(**IMAGENET), **HALF)),
    "normalization twice": lambda place: audit(wrap(nn.Sequential(wrap(Colors(**HALF), **HALF)).eval(), **HALF)),
    "normalization outside of the model": lambda place: audit(Colors(**HALF), ((IMAGES - 0.5) / 0.5, LABELS)),
    "a bare timm model": lambda place: audit(
        timm.create_model("vit_tiny_patch16_224", num_classes=10, **TINY).eval(), "shapes", limit=20
    ),
    "pixels in 0..255": lambda place: audit(Colors(), (IMAGES * 255, LABELS)),
    "pixels divided by 255 twice": lambda place: audit(Colors(), (IMAGES / 255, LABELS)),
    "BGR images": lambda place: audit(Colors(), (IMAGES.flip(1), LABELS)),
    "channels in another order inside the model": lambda place: audit(Then(lambda z: z, lambda x: x.flip(1))),
    "wrong crop": lambda place: audit(trained(0.95, crop_pct=0.25), "shapes(size=64)", limit=100),
    "wrong size": lambda place: audit(at_size(16, trained(0.95)), "shapes", limit=100),
    "size that no patch fits": lambda place: audit("zoo:shapes-robust", limit=20, model_options={"input_size": 30}),
    "weights of another variant": another_variant,
    "random weights": lambda place: audit(
        "vit_tiny_patch16_224", limit=60, model_options={"weights": "random", "num_classes": 10, "kwargs": TINY}
    ),
    "train mode": lambda place: audit(Colors().train()),
    "probabilities instead of logits": lambda place: audit(Then(lambda z: z.softmax(1))),
    "log-probabilities instead of logits": lambda place: audit(Then(lambda z: z.log_softmax(1))),
    "random outputs": lambda place: audit(Then(lambda z: z + torch.rand_like(z))),
    "one class for all images": lambda place: audit(Then(lambda z: z * 0 + torch.eye(10)[3])),
    "far below the accuracy of its training": lambda place: audit(known_colors(0.97), (IMAGES, PARTLY_WRONG)),
    "images of the training": lambda place: audit("zoo:shapes-robust", "shapes@train", limit=20),
    "augmentation in the data": lambda place: audit(Colors(), [Flickering() for _ in range(3)]),
    "an endless data loader": lambda place: audit(Colors(), Endless()),
}


class Flickering(tuple):
    """An item whose image differs at every access, as under augmentation."""

    def __new__(cls):
        return super().__new__(cls, (None, 0))

    def __getitem__(self, index):
        return torch.rand(3, 8, 8) if index == 0 else 0


def at_size(size: int, model: Classifier) -> Classifier:
    """The model for images of another size than it was trained for."""
    larger = vitadel.load_model("zoo:shapes-robust", input_size=size)
    return Classifier(larger.backbone, replace(larger.record, training=model.record.training))


def test_the_page_and_the_tests_have_the_same_rows():
    assert list(ROWS) == list(SET_UPS)
    assert len(ROWS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("row", SET_UPS)
def test_a_wrong_set_up_is_refused_or_named(row, tmp_path):
    if ROWS[row] == "refused":
        with pytest.raises(UserError):
            SET_UPS[row](tmp_path / "data")
        return
    (tmp_path / "data").mkdir()
    findings = SET_UPS[row](tmp_path / "data")["findings"]
    raised = {each["check"] for each in findings if each["verdict"] in ("suspicious", "broken")}
    assert ROWS[row].strip("`") in raised, findings


@pytest.mark.slow
def test_the_right_set_ups_beside_them_raise_nothing(tmp_path):
    for model in (Colors(), wrap(Colors(**HALF), **HALF), wrap(Colors(**IMAGENET), **IMAGENET)):
        results = audit(model)
        assert results["findings"] == []
        assert results["clean"]["accuracy"] == 1
    results = audit(named(Colors(outputs=20), [*WORDS, *map(str, range(10))]), folder(tmp_path / "photos", WORDS))
    assert results["findings"] == []
    assert results["clean"]["accuracy"] == 1
    assert audit(trained(0.95), "shapes", limit=60)["findings"] == []
