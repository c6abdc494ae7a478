"""Data that a Python program has in hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from vitadel.data import read_batches
from vitadel.data.batches import Preprocess
from vitadel.data.sources.objects import source_of
from vitadel.data.spec import with_kind
from vitadel.errors import UserError

N, SIDE = 6, 8
PIXELS = torch.rand(N, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(Dataset):
    """What a user writes: images as tensors, labels only inside the items."""

    def __init__(self, x=PIXELS, y=LABELS, keys=None):
        self.x, self.y, self.keys = x, y, keys

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        item = (self.x[index], int(self.y[index]))
        return item if self.keys is None else dict(zip(self.keys, item, strict=True))


def read_all(data, size=SIDE):
    source = source_of(data)
    (batch,) = read_batches(source, [range(len(source))], Preprocess(size))
    return batch.x, batch.y


FORMS = {
    "tensors": lambda: (PIXELS, LABELS),
    "a list": lambda: [PIXELS, LABELS],
    "arrays": lambda: (PIXELS.numpy(), LABELS.numpy()),
    "labels as a list": lambda: (PIXELS, LABELS.tolist()),
    "channels last": lambda: (PIXELS.permute(0, 2, 3, 1).numpy(), LABELS.numpy()),
    "double": lambda: (PIXELS.double(), LABELS.double()),
    "a column of labels": lambda: (PIXELS, LABELS[:, None]),
    "a dataset": Pairs,
    "a dataset of dictionaries": lambda: Pairs(keys=("image", "label")),
    "pixel values": lambda: Pairs(keys=("pixel_values", "labels")),
    "a list of items": lambda: [(PIXELS[k], int(LABELS[k])) for k in range(N)],
    "a tensor dataset": lambda: TensorDataset(PIXELS, LABELS),
    "a loader": lambda: DataLoader(Pairs(), batch_size=4),
    "a loader that shuffles": lambda: DataLoader(TensorDataset(PIXELS, LABELS), batch_size=4, shuffle=True),
    "a loader that drops": lambda: DataLoader(Pairs(), batch_size=4, drop_last=True),
    "a subset": lambda: Subset(
        Pairs(torch.cat([PIXELS.flip(0), PIXELS]), torch.cat([LABELS, LABELS])), range(N, 2 * N)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels_without_rounding(form):
    x, y = read_all(FORMS[form]())
    assert torch.equal(x, PIXELS)
    assert torch.equal(y, LABELS)


def test_bytes_and_pillow_images_are_read_as_from_files():
    levels = (PIXELS * 255).round().to(torch.uint8)
    pillow = [
        (Image.fromarray(each.permute(1, 2, 0).numpy()), int(label)) for each, label in zip(levels, LABELS, strict=True)
    ]
    for data in ((levels, LABELS), (levels.permute(0, 2, 3, 1).numpy(), LABELS.numpy()), pillow):
        x, y = read_all(data)
        assert torch.equal(x, levels / 255)
        assert torch.equal(y, LABELS)
        assert read_all(data, 16)[0].shape == (N, 3, 16, 16)


def test_gray_images_get_three_channels():
    x, _ = read_all((PIXELS[:, :1], LABELS))
    assert torch.equal(x, PIXELS[:, :1].expand(-1, 3, -1, -1))


def test_class_names_of_a_dataset_are_kept():
    named = Pairs()
    named.classes = [("cat", "house cat"), "dog", "cow"]
    assert source_of(named).classes == ("cat, house cat", "dog", "cow")
    assert source_of(Subset(named, [1, 2])).classes == ("cat, house cat", "dog", "cow")


def test_listed_labels_are_used_instead_of_reading_images():
    listed = Pairs()
    listed.targets = LABELS.tolist()
    reads = []
    original = Pairs.__getitem__
    listed_type = type("Listed", (Pairs,), {"__getitem__": lambda self, k: reads.append(k) or original(self, k)})
    listed.__class__ = listed_type
    assert source_of(listed).labels().tolist() == LABELS.tolist()
    assert set(reads) == {0}


def test_tensors_are_distinguished_by_their_content():
    assert repr(source_of((PIXELS, LABELS))) != repr(source_of((1 - PIXELS, LABELS)))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat((PIXELS[0], 0))


class Random(Pairs):
    def __getitem__(self, index):
        return torch.rand(3, SIDE, SIDE), 0


WRONG = {
    "0..255": (lambda: (PIXELS * 255, LABELS), "Divide by 255"),
    "normalized": (lambda: ((PIXELS - 0.5) / 0.25, LABELS), "normalized already"),
    "divided twice": (lambda: (PIXELS / 255, LABELS), "255 twice"),
    "cast to bytes": (lambda: (PIXELS.to(torch.uint8), LABELS), "0 or 1"),
    "integers": (lambda: ((PIXELS * 255).long(), LABELS), "uint8 or floating point"),
    "NaN": (lambda: (PIXELS * float("nan"), LABELS), "NaN"),
    "vectors": (lambda: (PIXELS.flatten(2), LABELS), r"\(n, 3, height, width\)"),
    "six channels": (lambda: (PIXELS.repeat(1, 2, 1, 1), LABELS), "color channels"),
    "one-hot": (lambda: (PIXELS, torch.eye(3)[LABELS]), "argmax"),
    "too few labels": (lambda: (PIXELS, LABELS[:3]), "one label per image"),
    "negative labels": (lambda: (PIXELS, LABELS - 1), "0 or more"),
    "fractions": (lambda: (PIXELS, LABELS + 0.5), "whole numbers"),
    "a normalized dataset": (lambda: Pairs(PIXELS * 2 - 1), "Drop Normalize"),
    "an augmented dataset": (Random, "random transforms"),
    "other keys": (lambda: Pairs(keys=("picture_a", "kind")), r"keys 'picture_a', 'kind'"),
    "features": (lambda: [("text", 0)] * 3, "expected tensors, arrays or Pillow images"),
    "no pairs": (lambda: [PIXELS[0]] * 3, "expected pairs"),
    "empty": (lambda: Pairs(PIXELS[:0], LABELS[:0]), "empty"),
    "endless": (lambda: Endless(), "may never end"),
    "an endless loader": (lambda: DataLoader(Endless(), batch_size=2), "may never end"),
    "a generator": (lambda: iter([(PIXELS, LABELS)]), "may never end"),
    "a sampler": (
        lambda: DataLoader(Pairs(), sampler=WeightedRandomSampler([1.0] * N, N)),
        "WeightedRandomSampler of its own",
    ),
    "a collate function": (lambda: DataLoader(Pairs(), collate_fn=lambda items: items), "collate_fn of its own"),
    "a dictionary": (lambda: {"x": PIXELS, "y": LABELS}, "keys x, y"),
    "a number": (lambda: 3, "type int"),
    "None": (lambda: None, "type NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_one_clear_message(case):
    make, words = WRONG[case]
    with pytest.raises(UserError, match=words):
        source_of(make())


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "cow"])})
    levels = (PIXELS * 255).round().to(torch.uint8)
    images = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in levels]
    data = datasets.Dataset.from_dict({"image": images, "label": LABELS.tolist()}, features=features)
    for given in (data, datasets.DatasetDict({"train": data.select([0]), "test": data}), data.with_format("torch")):
        x, y = read_all(given)
        assert torch.equal(x, levels / 255)
        assert torch.equal(y, LABELS)
        assert source_of(given).classes == ("cat", "dog", "cow")
    with pytest.raises(UserError, match="streaming"):
        source_of(data.to_iterable_dataset())


def test_paths_get_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "table.parquet").write_bytes(b"")
    np.savez(tmp_path / "a.npz", x=np.zeros(1))
    (tmp_path / "shapes").mkdir()
    assert with_kind("photos") == "folder:photos"
    assert with_kind("photos@train") == "folder:photos@train"
    assert with_kind("table.parquet") == "parquet:table.parquet"
    assert with_kind(str(tmp_path / "a.npz")) == f"npz:{tmp_path / 'a.npz'}"
    assert with_kind("shapes") == "shapes"  # a kind of data comes before a folder of its name
    assert with_kind("folder:photos") == "folder:photos"
    assert with_kind("nowhere") == "nowhere"
