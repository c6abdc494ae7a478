from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import picture, pixels_of

from vitadel.data import open_dataset
from vitadel.data.sources.cifar_c import CIFAR10_CLASSES, CIFAR100_CLASSES, CorruptedArrays
from vitadel.errors import UserError

SHARE = 3  # images per severity; the benchmark has 10,000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    for first, name in ((0, "fog"), (100, "gaussian_noise")):
        np.save(folder / f"{name}.npy", np.stack([picture(first + n, 32, 32) for n in range(5 * SHARE)]))
    np.save(folder / "labels.npy", np.tile([3, 8, 0], 5))
    return tmp_path


def numbers(source: CorruptedArrays) -> list[int]:
    """Which of the written pictures each sample is."""
    known = {picture(n, 32, 32).tobytes(): n for n in (*range(15), *range(100, 115))}
    return [known[pixels_of(image).tobytes()] for image in source.read(range(len(source)))]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cifar10-c", [*range(15), *range(100, 115)]),
        ("cifar10-c/gaussian_noise", list(range(100, 115))),
        ("cifar10-c/gaussian_noise/3", [106, 107, 108]),
        ("cifar10-c/fog/1@test", [0, 1, 2]),
    ],
)
def test_parts_of_the_benchmark(spec: str, expected: list[int], root: Path) -> None:
    source = open_dataset(spec, root=root)
    assert isinstance(source, CorruptedArrays)
    assert numbers(source) == expected
    assert source.labels().tolist() == [3, 8, 0] * (len(expected) // 3)
    assert tuple(source.classes) == CIFAR10_CLASSES


def test_named_stretches_cover_the_whole(root: Path) -> None:
    source = open_dataset("cifar10-c", root=root)
    assert isinstance(source, CorruptedArrays)
    assert list(source.parts) == [f"{name}/{level}" for name in ("fog", "gaussian_noise") for level in range(1, 6)]
    assert [index for stretch in source.parts.values() for index in stretch] == list(range(30))
    alone = open_dataset("cifar10-c/gaussian_noise/4", root=root)
    together = source.read(source.parts["gaussian_noise/4"])
    for one, other in zip(alone.read(range(3)), together, strict=True):
        assert np.array_equal(pixels_of(one), pixels_of(other))
    assert source.name(29) == "gaussian_noise.npy severity 5 row 2"


def test_the_names_of_the_hundred_classes() -> None:
    assert len(CIFAR100_CLASSES) == len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)  # as the set's own meta file has them
    assert len(CIFAR10_CLASSES) == 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar10-c/fogg", "no corruption 'fogg'.*there are: fog, gaussian_noise; did you mean fog"),
        ("cifar10-c/fog/6", "severity '6' must be one of 1, 2, 3, 4, 5"),
        ("cifar10-c/fog/1/2", "severity '1/2'"),
        ("cifar10-c@train", "no split 'train'"),
        ("cifar100-c", r"CIFAR-100-C/labels.npy' does not exist.*--data-root"),
        ("cifar10-c:fog", "takes no path"),
    ],
)
def test_what_is_not_there(spec: str, message: str, root: Path) -> None:
    with pytest.raises(UserError, match=message):
        open_dataset(spec, root=root)


def test_files_of_the_wrong_shape_or_cut_off(root: Path) -> None:
    folder = root / "CIFAR-10-C"
    np.save(folder / "snow.npy", np.zeros((15, 16, 16, 3), dtype=np.uint8))
    with pytest.raises(UserError, match=r"snow.npy' has shape \(15, 16, 16, 3\)"):
        open_dataset("cifar10-c/snow", root=root)
    (folder / "frost.npy").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"frost.npy' cannot be read"):
        open_dataset("cifar10-c/frost", root=root)
    whole = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(whole[:-100])
    images = open_dataset("cifar10-c/fog", root=root).read(range(15))
    assert [isinstance(image, Exception) for image in images] == [False] * 14 + [True]
