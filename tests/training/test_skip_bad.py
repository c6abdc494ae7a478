"""Training images that cannot be read: found at the start, or replaced by others, counted and listed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitadel
from small_recipes import document
from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.training.data_stream import DataStream

SHAPE = (8, 8)


class Numbered:
    """Images whose gray level is their row; some cannot be read."""

    classes = tuple("abcdefghij")

    def __init__(self, bad=()):
        self.bad = frozenset(bad)

    def __len__(self):
        return 40

    def labels(self):
        return torch.arange(40) % 10

    def name(self, row):
        return f"image-{row}"

    def read(self, rows):
        return [OSError("truncated") if row in self.bad else Image.new("RGB", SHAPE, (row,) * 3) for row in rows]


def stream(bad=(), **more):
    source = Numbered(bad)
    pixels = lambda image, seed: torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)  # noqa: E731
    return DataStream(source, torch.arange(40), Preprocess(SHAPE, 1.0, "bilinear"), pixels, 8, seed=3, **more)


def rows_of(part):
    return part.x[:, 0, 0, 0].long()


def test_other_images_take_the_place_of_unreadable_ones():
    bad = (3, 17, 18)
    whole = [part for (part,) in stream(bad, skip_bad=True).steps(0, 10)]
    sound = [part for (part,) in stream().steps(0, 10)]
    for ours, theirs in zip(whole, sound, strict=True):
        assert torch.equal(ours.names, theirs.names)
        hit = torch.isin(rows_of(theirs), torch.tensor(bad))
        assert torch.equal(rows_of(ours)[~hit], rows_of(theirs)[~hit]), "the other images stay"
        assert not torch.isin(rows_of(ours), torch.tensor(bad)).any()
        assert torch.equal(ours.y, rows_of(ours) % 10), "the label is that of the image that is there"
        assert sorted(sample.index for sample in ours.bad) == sorted(rows_of(theirs)[hit].tolist())
    later = [part for (part,) in stream(bad, skip_bad=True).steps(6, 10)]
    for ours, again in zip(whole[6:], later, strict=True):
        assert torch.equal(ours.x, again.x), "the same after a resume"
    in_two = stream(bad, skip_bad=True, processes=2, rank=1).steps(0, 10)
    for ours, (half,) in zip(whole, in_two, strict=True):
        assert torch.equal(ours.x[4:], half.x), "the same with two processes"


def test_without_the_flag_the_message_names_it():
    with pytest.raises(UserError, match=r"training image 3 \(image-3\) cannot be read: truncated.*data.skip_bad=true"):
        list(stream((3,)).steps(0, 5))


def test_a_source_without_readable_images_ends():
    with pytest.raises(UserError, match="100 training images in a row cannot be read"):
        list(stream(range(40), skip_bad=True).steps(0, 1))


@pytest.fixture
def photos(tmp_path):
    noise = np.random.default_rng(0)
    for row in range(60):
        file = tmp_path / "train" / "ab"[row % 2] / f"{row:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file)
    return tmp_path / "train"


def recipe_of(photos, **data):
    return document(
        data={"train": f"folder:{photos}", "test": None, "held_out": 8, "limit": None, **data},
        train={"epochs": 2},
        model={"num_classes": None},
    )


def test_a_training_counts_and_lists_what_it_could_not_read(photos, tmp_path):
    import yaml

    for name in ("a/10.png", "b/31.png"):
        (photos / name).write_bytes(b"no image")
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(recipe_of(photos, skip_bad=True)))
    results = vitadel.harden(file, out=tmp_path / "run", device="cpu")
    listed = results["training"]["left_out_names"]
    assert results["training"]["left_out"] == 2, "two passes read every image"
    assert sorted(line[:8] for line in listed) == ["a/10.png", "b/31.png"]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["training"]["left_out"] == 2
    assert not (tmp_path / "run" / "partial").exists()


def test_a_wrong_folder_is_found_before_the_training(photos, tmp_path):
    import yaml

    for file in photos.rglob("*.png"):
        file.write_bytes(b"no image")
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(recipe_of(photos, skip_bad=True)))
    with pytest.raises(UserError, match="held-out images can be read"):
        vitadel.harden(mine, {"model.input_size": 16}, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
