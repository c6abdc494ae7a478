"""Data in object storage, by fsspec's file systems in memory and on disk."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from vitadel.data import object_storage
from vitadel.data.object_storage import local_copy
from vitadel.data.spec import open_dataset
from vitadel.errors import UserError


@pytest.fixture
def memory():
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    yield storage
    storage.store.clear()


def picture(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), level, dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def archive(level: int) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, images=np.full((3, 4, 4, 3), level, dtype=np.uint8), labels=np.array([0, 1, 0]))
    return buffer.getvalue()


def level_of(source) -> int:
    return int(np.asarray(source.read([0])[0])[0, 0, 0])


def test_an_archive_is_copied_once_and_again_when_it_changes(memory, tmp_path: Path, capsys):
    memory.pipe("/bucket/test.npz", archive(7))
    source = open_dataset("npz:memory://bucket/test.npz", root=tmp_path)
    assert (len(source), level_of(source)) == (3, 7)
    assert "copying" in capsys.readouterr().err
    open_dataset("npz:memory://bucket/test.npz", root=tmp_path)
    assert not capsys.readouterr().err
    memory.rm("/bucket/test.npz")
    memory.pipe("/bucket/test.npz", archive(9))
    assert level_of(open_dataset("npz:memory://bucket/test.npz", root=tmp_path)) == 9


def test_what_the_storage_no_longer_has_is_not_read(memory, tmp_path: Path):
    for name in ("cat/a.png", "cat/b.png", "dog/c.png"):
        memory.pipe(f"/photos/{name}", picture(1))
    assert len(open_dataset("folder:memory://photos", root=tmp_path)) == 3
    memory.rm("/photos/cat/b.png")
    assert len(open_dataset("folder:memory://photos", root=tmp_path)) == 2


def test_a_folder_of_classes_is_the_same_as_on_disk(memory, tmp_path: Path):
    for name, level in (("cat/a.png", 10), ("cat/b.png", 20), ("dog/c.png", 30)):
        memory.pipe(f"/photos/{name}", picture(level))
    source = open_dataset("folder:memory://photos", root=tmp_path)
    assert list(source.classes) == ["cat", "dog"]
    assert source.labels().tolist() == [0, 0, 1]


def test_braces_and_globs_keep_their_meaning(memory, tmp_path: Path):
    for number in range(3):
        memory.pipe(f"/b/part-{number:02d}.tar", b"x" * number)
    memory.pipe("/b/other.tar", b"")
    assert local_copy("memory://b/part-{00..01}.tar", tmp_path).endswith("memory/b/part-{00..01}.tar")
    copied = sorted(path.name for path in (tmp_path / "remote" / "memory" / "b").iterdir())
    assert copied == ["part-00.tar", "part-01.tar"]
    local_copy("memory://b/part-*.tar", tmp_path)
    assert (tmp_path / "remote" / "memory" / "b" / "part-02.tar").read_bytes() == b"xx"


def test_the_local_file_system_works_by_url(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "test.npz").write_bytes(archive(5))
    source = open_dataset(f"npz:file://{tmp_path}/there/test.npz", root=tmp_path / "data")
    assert level_of(source) == 5


def test_a_copy_that_breaks_off_leaves_nothing(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory.pipe("/b/test.npz", archive(1))

    def broken(path: str, copy: str) -> None:
        Path(copy).write_bytes(b"half")
        raise ConnectionResetError("connection lost")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "get_file", broken)
        with pytest.raises(UserError, match=r"cannot be read \(ConnectionResetError: connection lost\)"):
            open_dataset("npz:memory://b/test.npz", root=tmp_path)
    assert not [path for path in (tmp_path / "remote" / "memory").rglob("*") if path.is_file()]
    assert level_of(open_dataset("npz:memory://b/test.npz", root=tmp_path)) == 1


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://b/absent.npz", "nothing matches 'memory://b/absent.npz'"),
        ("memory://b/../../x.npz", "is not a URL of files"),
        ("memory://", "is not a URL of files"),
        ("floppy://b/x.npz", "the protocol 'floppy' is not known"),
    ],
)
def test_wrong_urls_are_refused(memory, tmp_path: Path, url: str, reason: str):
    with pytest.raises(UserError, match=reason):
        open_dataset(f"npz:{url}", root=tmp_path)


def test_a_storage_whose_package_is_missing_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(object_storage.fsspec, "filesystem", missing)
    with pytest.raises(UserError, match="pip install s3fs"):
        local_copy("s3://bucket/x.npz", tmp_path)


def test_what_is_on_this_machine_is_not_copied(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "test.npz").write_bytes(archive(5))
    assert local_copy(f"file://{tmp_path}/there/*.npz", tmp_path / "data") == f"{tmp_path}/there/*.npz"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("silent", ["exists", "find", "get_file"])
def test_a_storage_that_does_not_answer_is_given_up(
    memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: str
):
    memory.pipe("/b/test.npz", archive(1))
    ended = threading.Event()
    monkeypatch.setattr(memory, silent, lambda *given: ended.wait(600))
    monkeypatch.setattr(object_storage, "_FIRST_ANSWER", 0.05)
    monkeypatch.setattr(object_storage, "_SILENCE", 0.05)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"TimeoutError: no answer within 0.05 seconds"):
        local_copy("memory://b/test.npz", tmp_path)
    assert time.monotonic() - start < 300  # a slow machine is no silent storage
    ended.set()
    assert not [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]


class Clock:
    """A clock that stands unless it is moved on."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, threading.Event()

    def monotonic(self) -> float:
        self.asked.set()
        return self.now


def test_a_slow_copy_that_goes_on_is_not_given_up(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory.pipe("/b/test.npz", archive(1))
    clock = Clock()

    def slow(path: str, copy: str) -> None:
        for _ in range(4):
            with open(copy, "ab") as file:
                file.write(b"part")
            clock.now += 0.15
            clock.asked.clear()
            assert clock.asked.wait(300)

    monkeypatch.setattr(memory, "get_file", slow)
    monkeypatch.setattr(object_storage, "time", clock)
    monkeypatch.setattr(object_storage, "_SILENCE", 0.2)
    assert Path(local_copy("memory://b/test.npz", tmp_path)).read_bytes() == b"part" * 4


def test_a_name_that_leads_out_of_the_copies_is_refused(memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "find", lambda path: ["/b/../../../x.npz"])
    with pytest.raises(UserError, match="whose copy would be in another folder"):
        local_copy("memory://b/test.npz", tmp_path)
