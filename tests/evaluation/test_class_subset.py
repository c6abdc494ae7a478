"""ImageNet-A and -R: the largest of 200 logits counts, and all 1000 are reported beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitadel
from vitadel.backbones.classifier import wrap
from vitadel.data import open_dataset
from vitadel.errors import UserError
from vitadel.evaluation.engine.class_mapping import RelabeledSource
from vitadel.evaluation.engine.target import SubsetLogits, apply_class_subset, open_target, relabel_like

# Classes 0, 6 and 99; the last two are of ImageNet-A.
TENCH, STINGRAY, GOOSE = "n01440764", "n01498041", "n01855672"


class Grey(nn.Module):
    """Sure of class 0, then of `dark` for dark images and of `bright` for bright ones."""

    def __init__(self, outputs: int = 1000, dark: int = 6, bright: int = 99) -> None:
        super().__init__()
        self.num_classes, self.dark, self.bright = outputs, dark, bright

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(len(x), self.num_classes)
        logits[:, 0] = 9.0
        logits[:, self.dark] = 2 - 4 * x.mean((1, 2, 3))
        logits[:, self.bright] = 4 * x.mean((1, 2, 3)) - 2
        return logits


def write(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(path)


@pytest.fixture
def root(tmp_path):
    """Two dark stingrays, one bright one, and a bright goose: 3 of 4 right among the 200, none among the 1000."""
    for number, (wnid, level) in enumerate([(STINGRAY, 20), (STINGRAY, 60), (STINGRAY, 250), (GOOSE, 240)]):
        write(tmp_path / "a" / wnid / f"{number}.png", level)
    return tmp_path


def test_an_audit_counts_among_the_200_and_reports_the_1000(root):
    results = vitadel.audit(Grey().eval(), f"imagenet-a:{root}/a", attacks="fgsm", eps=1 / 255, out=root / "run")
    assert results["clean"]["correct"] == 3
    assert results["clean_among_all"]["correct"] == 0
    assert results["clean_among_all"]["classes"] == 1000
    assert results["data"]["classes"] == 200
    assert "stingray" in results["data"]["class_names"]
    assert results["worst_case"]["held"] <= 3
    assert "200 of its 1000 logits" in results["model"]["notes"]["classes"]
    assert json.loads((root / "run" / "results.json").read_text()) == results


def test_all_of_imagenet_is_not_restricted(root):
    results = vitadel.audit(Grey().eval(), f"imagenet:{root}/a", attacks=())
    assert results["clean"]["correct"] == 0
    assert "clean_among_all" not in results


@pytest.mark.parametrize("outputs", [10, 200])
def test_models_without_the_1000_are_refused(root, outputs):
    with pytest.raises(UserError, match=f"has {outputs} outputs, but this benchmark takes 200 of the 1000"):
        vitadel.audit(Grey(outputs, 1, 2).eval(), f"imagenet-a:{root}/a", attacks=())
    silent = nn.Sequential(nn.Flatten(), nn.Linear(192, outputs))  # announces nothing: noticed at the first image
    with pytest.raises(UserError, match=f"has {outputs} outputs"):
        vitadel.audit(silent.eval(), f"imagenet-a:{root}/a", attacks=())


def test_strange_labels_are_refused(root):
    target = open_target(Grey().eval(), f"imagenet-a:{root}/a")
    target.source.targets[1] = 0  # the tench is not one of the 200
    with pytest.raises(UserError, match=r"1\.png is not of one of the 200 classes"):
        apply_class_subset(target)


def test_slicing_keeps_order_and_gradients():
    model = SubsetLogits(wrap(Grey(12, 3, 7)), [3, 7, 11], 12)
    x = torch.rand(5, 3, 4, 4, requires_grad=True)
    logits = model(x)
    assert torch.equal(logits, Grey(12, 3, 7)(x)[:, [3, 7, 11]])
    assert model.record.num_classes == 3
    logits[:, 0].sum().backward()
    assert x.grad is not None
    assert bool((x.grad < 0).all())


def test_other_data_is_numbered_alike(root):
    for wnid in (TENCH, GOOSE):
        write(root / "val" / wnid / "x.png", 9)
    other = open_dataset(f"imagenet:{root}/val")
    source = apply_class_subset(open_target(Grey().eval(), f"imagenet-a:{root}/a")).source
    assert isinstance(source, RelabeledSource)
    again = relabel_like(other, source)
    assert again.labels().tolist() == [-1, source.labels()[-1]]
    assert again.classes[int(again.labels()[1])] == "goose"
    assert relabel_like(other, other) is other


def test_the_lists_are_the_published_ones(root):
    """Sums and overlap of the index lists in the benchmark's own evaluation code."""
    write(root / "r" / STINGRAY / "x.png", 9)
    lists = [open_dataset(f"imagenet-{kind}:{root}/{kind}").among for kind in ("a", "r")]
    assert [len(numbers) for numbers in lists] == [200, 200]
    assert [sum(numbers) for numbers in lists] == [102178, 86135]
    assert len(set(lists[0]) & set(lists[1])) == 86
