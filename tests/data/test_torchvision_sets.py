from __future__ import annotations

import hashlib
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from pictures import picture, pixels_of, write_png
from PIL import Image

from vitadel.data import open_dataset
from vitadel.data.sources.torchvision_sets import TORCHVISION_SETS
from vitadel.data.spec import DATA_KINDS
from vitadel.errors import UserError


def make_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the layout of the real ones; the checksums that torchvision knows are replaced by theirs."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def put(name: str, content: dict[str, object]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(first: int) -> dict[str, object]:
        rows = [picture(n, 32, 32).transpose(2, 0, 1).ravel() for n in range(first, first + 4)]
        return {"data": np.stack(rows), "labels": [9, 0, 3, 3]}

    meta = put("batches.meta", {"label_names": list("abcdefghij")})
    cls = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cls, "train_list", [["data_batch_1", put("data_batch_1", batch(0))]])
    monkeypatch.setattr(cls, "test_list", [["test_batch", put("test_batch", batch(10))]])
    monkeypatch.setattr(cls, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar10(tmp_path, monkeypatch)
    for spec, first in (("cifar10", 10), ("cifar10@test", 10), ("cifar10@train", 0)):
        source = open_dataset(spec, root=tmp_path)
        assert source.labels().tolist() == [9, 0, 3, 3]
        assert tuple(source.classes) == tuple("abcdefghij")
        assert np.array_equal(pixels_of(source.read([2])[0]), picture(first + 2, 32, 32))
    assert source.name(2) == "cifar10 train 2"
    with pytest.raises(UserError, match="cifar10 has no split 'val'; it has: test, train"):
        open_dataset("cifar10@val", root=tmp_path)


def test_mnist_is_gray_and_becomes_rgb(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    gray = np.stack([picture(n, 28, 28)[..., 0] for n in range(3)])
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, 3, 28, 28) + gray.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, 3) + bytes([7, 1, 0]))
    source = open_dataset("mnist", root=tmp_path)
    assert source.labels().tolist() == [7, 1, 0]
    assert len(source.classes) == 10
    assert np.array_equal(pixels_of(source.read([1])[0]), np.stack([gray[1]] * 3, -1))


def test_food101_reads_its_files_only_when_asked(tmp_path: Path) -> None:
    base = tmp_path / "food-101"
    (base / "meta").mkdir(parents=True)
    for split in ("train", "test"):
        members = {"soup": [f"soup/{split}"], "cake": [f"cake/{split}1", f"cake/{split}2"]}
        (base / "meta" / f"{split}.json").write_text(json.dumps(members))
        write_png(base / "images" / "soup" / f"{split}.jpg", 1)  # PNG inside: lossless, and Pillow looks at the content
        write_png(base / "images" / "cake" / f"{split}1.jpg", 2)
    source = open_dataset("food101", root=tmp_path)
    assert tuple(source.classes) == ("cake", "soup")
    assert source.labels().tolist() == [1, 0, 0]
    first, second, third = source.read([0, 1, 2])
    assert np.array_equal(pixels_of(first), picture(1))
    assert np.array_equal(pixels_of(second), picture(2))
    assert isinstance(third, FileNotFoundError)
    assert source.name(2).endswith("cake/test2.jpg")


def test_oxford_pets_dtd_and_aircraft(tmp_path: Path) -> None:
    pets = tmp_path / "oxford-iiit-pet"
    (pets / "annotations").mkdir(parents=True)
    (pets / "annotations" / "test.txt").write_text("pug_1 2 1 1\ntabby_cat_3 1 1 1\n")
    write_png(pets / "images" / "pug_1.jpg", 1)
    source = open_dataset("oxford-pets", root=tmp_path)
    assert (tuple(source.classes), source.labels().tolist()) == (("Tabby Cat", "Pug"), [1, 0])
    assert np.array_equal(pixels_of(source.read([0])[0]), picture(1))

    textures = tmp_path / "dtd" / "dtd"
    (textures / "labels").mkdir(parents=True)
    (textures / "labels" / "val1.txt").write_text("dotted/a.jpg\nbanded/b.jpg\n")
    write_png(textures / "images" / "banded" / "b.jpg", 2)
    source = open_dataset("dtd@validation", root=tmp_path)
    assert (tuple(source.classes), source.labels().tolist()) == (("banded", "dotted"), [1, 0])
    assert np.array_equal(pixels_of(source.read([1])[0]), picture(2))

    planes = tmp_path / "fgvc-aircraft-2013b" / "data"
    planes.mkdir(parents=True)
    (planes / "variants.txt").write_text("707\n747\n")
    (planes / "images_variant_test.txt").write_text("0001 747\n")
    write_png(planes / "images" / "0001.jpg", 3)
    source = open_dataset("fgvc-aircraft", root=tmp_path)
    assert (tuple(source.classes), source.labels().tolist()) == (("707", "747"), [1])
    assert np.array_equal(pixels_of(source.read([0])[0]), picture(3))


def test_traffic_signs(tmp_path: Path) -> None:
    base = tmp_path / "gtsrb"
    folder = base / "GTSRB" / "Final_Test" / "Images"
    folder.mkdir(parents=True)
    Image.fromarray(picture(4)).save(folder / "00000.ppm")
    (base / "GT-final_test.csv").write_text("Filename;Width;ClassId\n00000.ppm;5;16\n")
    source = open_dataset("gtsrb", root=tmp_path)
    assert source.labels().tolist() == [16]
    assert len(source.classes) == 17
    assert np.array_equal(pixels_of(source.read([0])[0]), picture(4))


@pytest.mark.parametrize("kind", TORCHVISION_SETS)
def test_missing_files_are_reported_and_nothing_is_downloaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("tried to download")

    for name in ("download_url", "download_and_extract_archive"):
        monkeypatch.setattr(f"torchvision.datasets.utils.{name}", forbidden)
    with pytest.raises(UserError, match=rf"^{kind}: no complete copy below '{tmp_path}'.*--data-root.*download=True"):
        open_dataset(kind, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_set_of_the_table_can_be_asked_for() -> None:
    listed = {kind for kind, entry in DATA_KINDS.items() if entry.opener.startswith("torchvision_sets:")}
    assert listed == set(TORCHVISION_SETS)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_scipy(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(torchvision.datasets, "SVHN", needs_scipy)
    with pytest.raises(UserError, match=r"svhn needs scipy.*pip install scipy"):
        open_dataset("svhn", root=tmp_path)


def test_these_sets_take_no_path(tmp_path: Path) -> None:
    for spec in (f"cifar10:{tmp_path}", "cifar10/fog"):
        with pytest.raises(UserError, match="takes no path"):
            open_dataset(spec)
