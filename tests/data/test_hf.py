from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest
from pictures import picture, pixels_of, png

from vitadel.data import open_dataset
from vitadel.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def make(numbers: range, **columns: list[object]):
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog", "emu"]),
        **{name: datasets.Value("int64") for name in columns},
    }
    rows = {
        "image": [{"bytes": png(picture(n)), "path": None} for n in numbers],
        "label": [n % 3 for n in numbers],
        **columns,
    }
    return datasets.Dataset.from_dict(rows, datasets.Features(features))


def test_a_saved_dictionary_of_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": make(range(5)), "test": make(range(5, 9), group=[1, 2, 3, 4])})
    both.save_to_disk(tmp_path / "saved")
    for suffix, numbers in (("", range(5, 9)), ("@train", range(5))):
        source = open_dataset(f"hf:{tmp_path}/saved{suffix}")
        assert tuple(source.classes) == ("cat", "dog", "emu")
        assert source.labels().tolist() == [n % 3 for n in numbers]
        order = [3, 0, 0, 2]
        for image, place in zip(source.read(order), order, strict=True):
            assert np.array_equal(pixels_of(image), picture(numbers[place]))
    with pytest.raises(UserError, match="no split 'val'; it has: train, test"):
        open_dataset(f"hf:{tmp_path}/saved@val")


def test_one_saved_set_has_no_splits_to_choose_from(tmp_path: Path) -> None:
    make(range(2)).save_to_disk(tmp_path / "saved")
    source = open_dataset(f"hf:{tmp_path}/saved")
    assert len(source) == 2
    assert source.name(1) == f"{tmp_path}/saved@test row 1"


def test_a_folder_as_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    make(range(3)).to_parquet(tmp_path / "repository" / "test.parquet")
    source = open_dataset(f"hf:{tmp_path}/repository")
    assert tuple(source.classes) == ("cat", "dog", "emu")
    assert np.array_equal(pixels_of(source.read([2])[0]), picture(2))


def test_pictures_kept_as_files_and_rows_without_one(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(picture(7)))
    features = datasets.Features({"img": datasets.Image(), "target": datasets.Value("string")})
    rows = {"img": [{"bytes": None, "path": str(tmp_path / "x.png")}, None], "target": ["b", "a"]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "saved")
    source = open_dataset(f"hf:{tmp_path}/saved")
    assert (tuple(source.classes), source.labels().tolist()) == (("a", "b"), [1, 0])
    first, second = source.read([0, 1])
    assert np.array_equal(pixels_of(first), picture(7))
    assert "no image" in str(second)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not be loaded.*ORG/NAME"):
        open_dataset("hf:no-such-organisation/no-such-set")
    with pytest.raises(UserError, match="names no data set"):
        open_dataset("hf:")
    datasets.Dataset.from_dict({"a": [1], "b": [2]}).save_to_disk(tmp_path / "plain")
    with pytest.raises(UserError, match="no column that could be the image"):
        open_dataset(f"hf:{tmp_path}/plain")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_datasets(name: str, *args: object, **keywords: object) -> object:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(UserError, match=r"pip install 'vitadel\[hf\]'"):
        open_dataset("hf:org/name")
