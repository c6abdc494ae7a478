from __future__ import annotations

from pathlib import Path

import pytest

from vitadel.data import known_specs, open_dataset
from vitadel.data.sources.shapes import Shapes
from vitadel.data.spec import DATA_KINDS, parse_spec, pick_split
from vitadel.errors import UserError


def parsed(spec: str, split: str | None = None) -> tuple[str, str, dict[str, str], str | None]:
    request = parse_spec(spec, root=Path("data"), split=split, skip_bad=False)
    return request.kind, request.argument, dict(request.settings), request.split


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cifar10", ("cifar10", "", {}, None)),
        ("cifar10@train", ("cifar10", "", {}, "train")),
        ("CIFAR10-C/fog/3@test", ("cifar10-c", "fog/3", {}, "test")),
        ("shapes(size=64, texture=5/255)@val", ("shapes", "", {"size": "64", "texture": "5/255"}, "val")),
        ("folder:C:\\photos", ("folder", "C:\\photos", {}, None)),
        ("folder:/a/b@c/d", ("folder", "/a/b@c/d", {}, None)),
        ("folder:/photos (2)", ("folder", "/photos (2)", {}, None)),
        ("hf:org/name(config=small)@validation", ("hf", "org/name", {"config": "small"}, "validation")),
        ("shards:/d/part-{000..127}.tar@train", ("shards", "/d/part-{000..127}.tar", {}, "train")),
    ],
)
def test_a_spec_taken_apart(spec: str, expected: tuple[object, ...]) -> None:
    assert parsed(spec) == expected


def test_the_split_from_the_spec_and_from_the_call() -> None:
    assert parsed("cifar10", split="train")[3] == "train"
    assert parsed("cifar10@train", split="train")[3] == "train"
    with pytest.raises(UserError, match="says @test, but split 'train'"):
        parsed("cifar10@test", split="train")


@pytest.mark.parametrize(
    ("available", "wanted", "expected"),
    [
        (["train", "test"], None, "test"),
        (["train", "val", "test"], None, "test"),
        (["train", "validation"], None, "validation"),
        (["train", "dev"], "val", "dev"),
        (["validation", "val"], "val", "val"),
        (["extra"], "extra", "extra"),
    ],
)
def test_picking_a_split(available: list[str], wanted: str | None, expected: str) -> None:
    assert pick_split(available, wanted, "it") == expected


def test_shapes_with_settings() -> None:
    assert open_dataset("shapes") == Shapes()
    asked = open_dataset("shapes(size=64,texture=8/255,agreement=1,seed=3)@train")
    assert asked == Shapes(split="train", size=64, texture=8 / 255, agreement=1.0, seed=3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shapes(sise=64)", "no setting 'sise'; it takes size, seed, texture, agreement, faintest; did you mean size"),
        ("shapes(size=big)", r"shapes\(size=big\).*not a number"),
        ("shapes(size=32.5)", "not a whole number"),
        ("shapes(size=4)", "size must be from 8 to 1024"),
        ("shapes(texture=2)", r"texture must be in \[0, 1\], got 2"),
        ("shapes(size=32,size=64)", "sets 'size' twice"),
        ("shapes(size=32,)", "not a setting"),
        ("shapes@extra", "no split 'extra'; it has: train, val, test"),
        ("shapes:here", "takes no path"),
        ("shapes/here", "settings in brackets"),
        ("cifar", "unknown data 'cifar'; did you mean .*cifar10.* Known: shapes, cifar10"),
        ("parket:x.parquet", "did you mean parquet"),
        ("folder", "names no path"),
        ("", "unknown data ''"),
    ],
)
def test_specs_that_do_not_work(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_dataset(spec)


def test_a_bare_path_is_met_with_the_right_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set.parquet").touch()
    (tmp_path / "folder" / "x").mkdir(parents=True)
    for given, meant in ((f"{tmp_path}", "folder:"), (f"{tmp_path}/set.parquet", "parquet:")):
        with pytest.raises(UserError, match=f"did you mean {meant}{given}"):
            open_dataset(given)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="did you mean folder:folder/x"):
        open_dataset("folder/x")


def test_the_list_names_every_kind_once() -> None:
    forms = [form for form, _ in known_specs()]
    assert [form.split(":")[0].split("[")[0] for form in forms] == list(DATA_KINDS)
    assert all(about for _, about in known_specs())
