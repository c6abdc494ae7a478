"""Secrets: closed to others from the first byte on, whole or not there, and named without being told."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.secrets import fingerprint, read_secret, write_secret


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_only_the_owner_may_read_whatever_the_umask(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    sync = os.fsync

    def watch(handle: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    write_secret(tmp_path / "key", b"first")
    assert mode_of(tmp_path / "key") == 0o600
    assert len(modes) == 1
    assert modes[0] & 0o077 == 0  # also while it was written
    assert read_secret(tmp_path / "key") == b"first"


def test_folders_are_made_and_an_open_old_file_is_replaced_by_a_closed_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "key"
    write_secret(path, b"old")
    path.chmod(0o644)
    write_secret(str(path), b"new")
    assert mode_of(path) == 0o600
    assert read_secret(str(path)) == b"new"
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_public_files_keep_their_mode(tmp_path: Path) -> None:
    write_atomically(tmp_path / "results.json", b"{}")
    assert mode_of(tmp_path / "results.json") == 0o644


def test_a_failed_write_leaves_the_old_secret_and_no_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_secret(tmp_path / "key", b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"no space left on the disk while writing .*key"):
        write_secret(tmp_path / "key", b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    assert read_secret(tmp_path / "key") == b"old"


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: Any, **_kwargs: Any) -> tuple[int, str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", forbidden)
    with pytest.raises(UserError, match=r"cannot write .*key: Permission denied"):
        write_secret(tmp_path / "key", b"new")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_files_open_to_others_are_refused_unless_allowed(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_secret(path, b"secret")
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"has mode {mode:04o}: .* `chmod 600 .*key`; .* --allow-readable"):
        read_secret(path)
    assert read_secret(path, allow_readable=True) == b"secret"
    path.chmod(0o600)
    assert read_secret(path) == b"secret"
    path.chmod(0o400)
    assert read_secret(path) == b"secret"


def test_the_file_behind_a_link_counts(tmp_path: Path) -> None:
    write_secret(tmp_path / "key", b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    assert read_secret(tmp_path / "link") == b"secret"
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UserError, match="mode 0644"):
        read_secret(tmp_path / "link")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'.*nothing' does not exist"):
        read_secret(tmp_path / "nothing")
    with pytest.raises(UserError, match="is a folder, a file was expected"):
        read_secret(tmp_path)

    def forbidden(*_args: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_secret(tmp_path / "key", b"secret")
    monkeypatch.setattr("vitadel.runtime.secrets.open", forbidden, raising=False)  # root may open everything
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        read_secret(tmp_path / "key")


def test_fingerprints_are_short_salted_and_not_ambiguous() -> None:
    expected = hashlib.sha256((4).to_bytes(8, "little") + b"saltcontent").hexdigest()[:16]
    assert fingerprint(b"content", b"salt") == expected
    others = {fingerprint(b"content", b"Salt"), fingerprint(b"Content", b"salt"), fingerprint(b"tcontent", b"sal")}
    assert len(others | {expected}) == 4
