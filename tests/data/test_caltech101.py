"""Caltech-101: which images are for training, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitadel.data import open_dataset
from vitadel.errors import UserError

COUNTS = {"BACKGROUND_Google": 47, "Faces": 60, "accordion": 31}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, count in COUNTS.items():
        folder = tmp_path / "caltech101" / "101_ObjectCategories" / name
        folder.mkdir(parents=True)
        for number in range(1, count + 1):
            (folder / f"image_{number:04}.jpg").touch()  # never read here
    (tmp_path / "caltech101" / "101_ObjectCategories" / "BACKGROUND_Google" / "tmp").touch()
    return tmp_path


def test_thirty_images_of_each_class_are_for_training_and_the_others_for_testing(root: Path) -> None:
    train, test = (open_dataset(f"caltech101@{split}", root=root) for split in ("train", "test"))
    assert train.classes == test.classes == tuple(sorted(COUNTS))
    assert train.labels().bincount().tolist() == [30, 30, 30]
    assert test.labels().bincount().tolist() == [17, 30, 1]
    names = [{source.name(place) for place in range(len(source))} for source in (train, test)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == sum(COUNTS.values())
    for source in (train, test):
        folders = [source.name(place).partition("/")[0] for place in range(len(source))]
        assert [source.classes[label] for label in source.labels()] == folders
    first = [train.name(place) for place in range(30)]
    assert first == sorted(first)
    assert first != [f"BACKGROUND_Google/image_{number:04}.jpg" for number in range(1, 31)]  # drawn, not the first ones


def test_the_draw_of_a_class_does_not_depend_on_the_place(root: Path) -> None:
    train = open_dataset("caltech101@train", root=root)
    again = open_dataset("caltech101@train", root=root / "caltech101")
    assert train.files == again.files
    assert open_dataset("caltech101", root=root).files == open_dataset("caltech101@test", root=root).files


def test_what_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*101_ObjectCategories.* --data-root"):
        open_dataset("caltech101", root=tmp_path / "elsewhere")
    with pytest.raises(UserError, match="caltech101 has no split 'val'; it has: test, train"):
        open_dataset("caltech101@val", root=root)
    (root / "caltech101" / "101_ObjectCategories" / "accordion" / "image_0007.jpg").unlink()
    with pytest.raises(UserError, match="accordion' has 30 images, and 30 of a class are for training"):
        open_dataset("caltech101@train", root=root)
