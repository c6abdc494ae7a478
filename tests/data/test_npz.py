from __future__ import annotations

import gc
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import picture, pixels_of

from vitadel.data import open_dataset
from vitadel.errors import UserError

IMAGES = np.stack([picture(n) for n in range(5)])
LABELS = np.array([2, 0, 1, 1, 0])
SAVES = [np.savez, np.savez_compressed]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    ("names", "pixels"),
    [
        (("images", "labels"), IMAGES),
        (("x", "y"), IMAGES.transpose(0, 3, 1, 2)),
        (("data", "labels"), (IMAGES / 255).astype(np.float32)),
        (("X", "Y"), (IMAGES.transpose(0, 3, 1, 2) / 255)),
    ],
)
def test_every_layout_comes_back(save: Callable[..., Any], names: tuple[str, str], pixels: Any, tmp_path: Path) -> None:
    save(tmp_path / "set.npz", **{names[0]: np.ascontiguousarray(pixels), names[1]: LABELS})
    source = open_dataset(f"npz:{tmp_path}/set.npz")
    assert (len(source), source.labels().tolist(), tuple(source.classes)) == (5, LABELS.tolist(), ("0", "1", "2"))
    assert source.name(3) == "set.npz row 3"
    for image, number in zip(source.read([4, 0, 0, 2]), (4, 0, 0, 2), strict=True):
        assert np.array_equal(pixels_of(image), picture(number))


def test_gray_images_column_labels_and_class_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=IMAGES[..., 0], labels=LABELS[:, None], classes=["a", "b", "c", "d"])
    source = open_dataset(f"npz:{tmp_path}/set.npz")
    assert tuple(source.classes) == ("a", "b", "c", "d")
    assert np.array_equal(pixels_of(source.read([1])[0]), np.stack([picture(1)[..., 0]] * 3, -1))


@pytest.mark.parametrize("form", ["{split}_images {split}_labels", "x_{split} y_{split}"])
def test_splits_within_one_file(form: str, tmp_path: Path) -> None:
    arrays = {}
    for split, first in (("train", 0), ("test", 3)):
        images, labels = form.format(split=split).split()
        arrays |= {images: IMAGES[first : first + 2], labels: LABELS[first : first + 2]}
    np.savez(tmp_path / "set.npz", **arrays)
    for suffix, first in (("", 3), ("@test", 3), ("@train", 0)):
        source = open_dataset(f"npz:{tmp_path}/set.npz{suffix}")
        assert source.labels().tolist() == LABELS[first : first + 2].tolist()
        assert np.array_equal(pixels_of(source.read([1])[0]), picture(first + 1))
    with pytest.raises(UserError, match="no split 'val'; it has: test, train"):
        open_dataset(f"npz:{tmp_path}/set.npz@val")


def test_the_copy_of_a_compressed_array_goes_with_its_source(temporary: Path, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "set.npz", images=IMAGES, labels=LABELS)
    source = open_dataset(f"npz:{tmp_path}/set.npz")
    assert len(list(temporary.iterdir())) == 1
    del source
    gc.collect()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("save", SAVES)
def test_memory_does_not_grow_with_the_array(save: Callable[..., Any], tmp_path: Path) -> None:
    """24 MB of pixels; opening and reading rows here and there may hold a few of 48 kB."""
    pixels = np.random.default_rng(0).integers(0, 256, (500, 128, 128, 3), dtype=np.uint8)
    save(tmp_path / "set.npz", images=pixels, labels=np.zeros(500, dtype=int))
    tracemalloc.start()
    source = open_dataset(f"npz:{tmp_path}/set.npz")
    for first in range(0, 500, 50):
        assert np.array_equal(pixels_of(source.read([first])[0]), pixels[first])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_float_pixels_out_of_range_are_the_samples_fault(tmp_path: Path) -> None:
    pixels = IMAGES / 255
    pixels[2] = pixels[2] * 2 - 1
    np.savez(tmp_path / "set.npz", images=pixels, labels=LABELS)
    images = open_dataset(f"npz:{tmp_path}/set.npz").read(range(5))
    assert [isinstance(image, Exception) for image in images] == [False, False, True, False, False]
    assert "must be in [0, 1]" in str(images[2])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": IMAGES}, "no array of labels; its arrays: images"),
        ({"images": IMAGES, "x": IMAGES, "y": LABELS}, r"several arrays that could be the images: images, x.*npz:FILE"),
        ({"images": IMAGES, "labels": LABELS[:3]}, "3 labels, but there are 5 images"),
        ({"images": IMAGES, "labels": LABELS.astype(float)}, "expected one whole number per image"),
        ({"images": IMAGES.astype(np.int32), "labels": LABELS}, "type int32; expected"),
        ({"images": IMAGES[..., :2], "labels": LABELS}, r"shape \(5, 6, 5, 2\)"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "is empty"),
        ({"images": IMAGES.T, "labels": LABELS}, "Fortran order"),
    ],
)
def test_archives_that_do_not_fit(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(UserError, match=message):
        open_dataset(f"npz:{tmp_path}/set.npz")


def test_arrays_can_be_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", clean=IMAGES, noisy=IMAGES[::-1], y=LABELS)
    source = open_dataset(f"npz:{tmp_path}/set.npz(images=noisy,labels=y)")
    assert np.array_equal(pixels_of(source.read([0])[0]), picture(4))
    with pytest.raises(UserError, match=r"no array 'noise'.*did you mean noisy"):
        open_dataset(f"npz:{tmp_path}/set.npz(images=noise)")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    trap = np.array([Trap()] * 5, dtype=object)
    for number, arrays in enumerate(({"images": trap, "labels": LABELS}, {"images": IMAGES, "labels": trap})):
        np.savez(tmp_path / f"{number}.npz", **arrays)
        with pytest.raises(UserError):
            open_dataset(f"npz:{tmp_path}/{number}.npz")
    assert not (tmp_path / "sprung").exists()


def test_broken_archives_are_named(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", images=IMAGES, labels=LABELS)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    middle = 200
    (tmp_path / "flipped.npz").write_bytes(whole[:middle] + bytes(40) + whole[middle + 40 :])
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("cut", "flipped", "text"):
        with pytest.raises(UserError, match=f"{name}.npz' cannot be read"):
            open_dataset(f"npz:{tmp_path}/{name}.npz")
    with pytest.raises(UserError, match="does not exist"):
        open_dataset(f"npz:{tmp_path}/missing.npz")
    with pytest.raises(UserError, match="has no splits"):
        open_dataset(f"npz:{tmp_path}/whole.npz@train")


def test_a_file_that_went_away_gives_exceptions(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=IMAGES, labels=LABELS)
    source = open_dataset(f"npz:{tmp_path}/set.npz")
    (tmp_path / "set.npz").unlink()
    assert [type(image) for image in source.read([0, 1])] == [FileNotFoundError, FileNotFoundError]
