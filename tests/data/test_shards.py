from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from pictures import picture, pixels_of, png

from vitadel.data import open_dataset, skipped
from vitadel.errors import UserError


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def pair(number: int, label: int | str, folder: str = "") -> list[tuple[str, bytes]]:
    return [(f"{folder}{number:04}.cls", str(label).encode()), (f"{folder}{number:04}.png", png(picture(number)))]


def test_samples_in_the_order_of_shards_and_keys(tmp_path: Path) -> None:
    write_tar(tmp_path / "set-1.tar", pair(3, 1) + pair(2, 0))
    write_tar(tmp_path / "set-0.tar", pair(0, 2) + pair(1, 1, "folder.v1/"))
    for pattern in ("set-{0..1}.tar", "set-*.tar", "*.tar", ""):
        source = open_dataset(f"shards:{tmp_path}/{pattern}")
        assert source.labels().tolist() == [2, 1, 1, 0]
        assert tuple(source.classes) == ("0", "1", "2")
        assert source.name(1) == "set-0.tar/folder.v1/0001.png"
        for image, number in zip(source.read([2, 0, 3, 1]), (3, 0, 2, 1), strict=True):
            assert np.array_equal(pixels_of(image), picture(number))
    # Braces keep the order in which they are written.
    assert open_dataset(f"shards:{tmp_path}/set-{{1,0}}.tar").labels().tolist() == [1, 0, 2, 1]


def test_what_the_webdataset_package_writes(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(4):
            writer.write({"__key__": f"sample{number}", "png": picture(number), "cls": number % 3})
        writer.write({"__key__": "sample4", "ppm": picture(4), "json": {"label": 2, "caption": "x"}})
    source = open_dataset(f"shards:{tmp_path}/a.tar")
    assert source.labels().tolist() == [0, 1, 2, 0, 2]
    for number, image in enumerate(source.read(range(5))):
        assert np.array_equal(pixels_of(image), picture(number))


def test_labels_as_words_and_a_file_of_class_names(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", pair(0, "dog") + pair(1, "cat"))
    assert open_dataset(f"shards:{tmp_path}/a.tar").labels().tolist() == [1, 0]
    (tmp_path / "names").write_text("dog\n\nemu\ncat\n")
    source = open_dataset(f"shards:{tmp_path}/a.tar(classes={tmp_path}/names)")
    assert (tuple(source.classes), source.labels().tolist()) == (("dog", "emu", "cat"), [0, 2])
    (tmp_path / "classes.txt").write_text("ant\ndog\n")
    source = open_dataset(f"shards:{tmp_path}/a.tar")
    assert (tuple(source.classes), source.labels().tolist()) == (("ant", "dog"), [1, -1])


def test_samples_without_a_label_or_an_image_keep_their_place(tmp_path: Path) -> None:
    members = [*pair(0, 1), ("0001.png", png(picture(1))), ("0002.cls", b"0"), ("0003.json", b"{]"), *pair(4, 0)]
    write_tar(tmp_path / "a.tar", members)
    source = open_dataset(f"shards:{tmp_path}/a.tar")
    assert source.labels().tolist() == [1, -1, 0, -1, 0]
    images = source.read(range(5))
    assert [isinstance(image, Exception) for image in images] == [False, False, True, True, False]
    assert "no image" in str(images[2])
    assert source.name(2) == "a.tar/0002"
    assert np.array_equal(pixels_of(images[4]), picture(4))


def test_splits_by_name(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", pair(0, 0) + pair(1, 0))
    write_tar(tmp_path / "val-0.tar", pair(2, 0))
    assert [len(open_dataset(f"shards:{tmp_path}{suffix}")) for suffix in ("", "@val", "@train")] == [1, 1, 2]


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", pair(0, 0) + pair(1, 1) + pair(2, 0))
    write_tar(tmp_path / "b.tar", pair(3, 1))
    whole = (tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        place = archive.getmember("0002.png").offset_data
    (tmp_path / "a.tar").write_bytes(whole[: place + 20])
    with pytest.raises(UserError, match=r"a.tar' cannot be read beyond its first 2 samples.*--skip-bad"):
        open_dataset(f"shards:{tmp_path}/*.tar", skip_bad=False)
    source = open_dataset(f"shards:{tmp_path}/*.tar", skip_bad=True)
    assert source.labels().tolist() == [0, 1, 1]
    assert np.array_equal(pixels_of(source.read([2])[0]), picture(3))
    assert len(skipped(source)) == 1
    assert "a.tar" in skipped(source)[0]


def test_what_cannot_be_used(tmp_path: Path) -> None:
    write_tar(tmp_path / "packed.tar.gz", pair(0, 0), "w:gz")
    write_tar(tmp_path / "nothing.tar", [])
    write_tar(tmp_path / "unlabelled.tar", [("0.png", png(picture(0)))])
    for name, message in (
        ("packed.tar.gz", "unpack .tar.gz first"),
        ("nothing.tar", "holds no samples"),
        ("unlabelled.tar", r"no sample has a label; expected a member such as 0.cls"),
        ("missing-{0..3}.tar", "nothing matches '.*missing-0.tar'"),
        ("unlabelled.tar(classes=none.txt)", "'none.txt' does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(f"shards:{tmp_path}/{name}")


def test_json_labels_of_several_forms(tmp_path: Path) -> None:
    members = []
    for number, record in enumerate(({"label": 3}, {"cls": "1"}, 2, {"label": True}, {"text": "x"}, {"label": [1]})):
        members += [(f"{number}.json", json.dumps(record).encode()), (f"{number}.png", png(picture(number)))]
    write_tar(tmp_path / "a.tar", members)
    assert open_dataset(f"shards:{tmp_path}/a.tar").labels().tolist() == [3, 1, 2, -1, -1, -1]
