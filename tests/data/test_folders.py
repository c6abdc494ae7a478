from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pictures import picture, pixels_of, write_png

from vitadel.data import open_dataset, skipped
from vitadel.errors import UserError


def make_classes(root: Path) -> None:
    """'Z' comes before 'a' by code point; 'a' has a nested folder, whose '/' sorts before letters and after '-'."""
    write_png(root / "a" / "b.png", 0)
    write_png(root / "a" / "b" / "z.png", 1)
    write_png(root / "a" / "b-c.png", 2)
    write_png(root / "Z" / "ä.png", 3)
    write_png(root / "Z" / "z.PNG", 4)
    (root / "Z" / "notes.txt").write_text("not a picture")
    (root / "Z" / ".hidden.png").write_bytes(b"a resource fork")
    (root / ".cache").mkdir()


def test_order_labels_names_and_pixels(tmp_path: Path) -> None:
    make_classes(tmp_path)
    source = open_dataset(f"folder:{tmp_path}")
    assert tuple(source.classes) == ("Z", "a")
    assert [source.name(i) for i in range(len(source))] == ["Z/z.PNG", "Z/ä.png", "a/b-c.png", "a/b.png", "a/b/z.png"]
    assert source.labels().tolist() == [0, 0, 1, 1, 1]
    images = source.read([4, 0, 2, 0])
    for image, number in zip(images, (1, 4, 2, 4), strict=True):
        assert np.array_equal(pixels_of(image), picture(number))


def test_the_split_is_a_sub_folder_and_test_is_the_default(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val", "test")):
        write_png(tmp_path / split / "cat" / "x.png", number)
    for spec, number in (("", 2), ("@test", 2), ("@val", 1), ("@validation", 1), ("@train", 0)):
        source = open_dataset(f"folder:{tmp_path}{spec}")
        assert np.array_equal(pixels_of(source.read([0])[0]), picture(number)), spec
    assert np.array_equal(pixels_of(open_dataset(f"folder:{tmp_path}", split="train").read([0])[0]), picture(0))


def test_validation_stands_in_for_test_but_train_never_does(tmp_path: Path) -> None:
    write_png(tmp_path / "train" / "cat" / "x.png", 0)
    with pytest.raises(UserError, match=r"no split to test on.*train"):
        open_dataset(f"folder:{tmp_path}")
    write_png(tmp_path / "validation" / "cat" / "x.png", 1)
    assert np.array_equal(pixels_of(open_dataset(f"folder:{tmp_path}").read([0])[0]), picture(1))


def test_a_class_called_like_a_split_stays_a_class(tmp_path: Path) -> None:
    write_png(tmp_path / "test" / "x.png", 0)
    write_png(tmp_path / "exam" / "x.png", 1)
    assert tuple(open_dataset(f"folder:{tmp_path}").classes) == ("exam", "test")


def test_an_empty_class_is_named_or_keeps_its_number(tmp_path: Path) -> None:
    write_png(tmp_path / "cat" / "x.png", 0)
    write_png(tmp_path / "zebra" / "x.png", 1)
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match=r"class 'dog' is empty.*--skip-bad"):
        open_dataset(f"folder:{tmp_path}", skip_bad=False)
    with pytest.raises(UserError, match=r"is empty.*if it is not a class$"):  # a training has no such flag
        open_dataset(f"folder:{tmp_path}")
    source = open_dataset(f"folder:{tmp_path}", skip_bad=True)
    assert tuple(source.classes) == ("cat", "dog", "zebra")
    assert source.labels().tolist() == [0, 2]
    assert skipped(source) == ("class 'dog' is empty",)


def test_a_corrupt_file_gives_its_exception_and_the_others_their_pixels(tmp_path: Path) -> None:
    write_png(tmp_path / "cat" / "a.png", 0)
    write_png(tmp_path / "cat" / "c.png", 2)
    (tmp_path / "cat" / "b.png").write_bytes((tmp_path / "cat" / "a.png").read_bytes()[:40])
    first, second, third = open_dataset(f"folder:{tmp_path}").read([0, 1, 2])
    assert np.array_equal(pixels_of(first), picture(0))
    assert isinstance(second, Exception)
    assert np.array_equal(pixels_of(third), picture(2))


def test_paths_with_an_at_sign_brackets_or_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set@train", "set (a=b)", "plain"):
        write_png(tmp_path / name / "cat" / "x.png", 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in (f"folder:{tmp_path}/set@train", f"folder:{tmp_path}/set (a=b)", "folder:~/plain"):
        assert len(open_dataset(spec)) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("folder:{}/missing", "does not exist.*one sub-folder per class"),
        ("folder:{}/file.png", "is a file; folder expects a folder"),
        ("folder:{}/flat", "has no sub-folders"),
        ("folder:{}/bare", "2 sub-folders, but no image"),
        ("folder:{}/bare@val", "no sub-folder 'val'"),
        ("folder:", "names no path"),
        ("folder:{}/bare(size=3)", "no setting 'size'"),
    ],
)
def test_errors_name_the_path_that_cannot_be_opened(spec: str, message: str, tmp_path: Path) -> None:
    write_png(tmp_path / "file.png", 0)
    write_png(tmp_path / "flat" / "x.png", 0)
    for name in ("a", "b"):
        (tmp_path / "bare" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        open_dataset(spec.format(tmp_path))
