from __future__ import annotations

import io
import threading
from collections.abc import Iterator

import pytest

from vitadel.data.sources.row_group_cache import RowGroupCache
from vitadel.errors import UserError


def content(group: int, row: int) -> bytes:
    return f"{group}:{row};".encode() * (row + 1)


def test_rows_of_any_group_in_any_order_and_nothing_is_loaded_twice() -> None:
    loads: list[int] = []

    def load(group: int) -> Iterator[bytes | None]:
        loads.append(group)
        yield from (None if row == 1 else content(group, row) for row in range(4))

    cache = RowGroupCache(load)
    for group, row in ((2, 3), (0, 0), (2, 0), (1, 2), (0, 3), (2, 3)):
        assert cache.row(group, row) == content(group, row)
    assert cache.row(0, 1) is None
    assert loads == [2, 0, 1]


def test_a_full_cache_starts_again_with_correct_rows() -> None:
    loads: list[int] = []

    def load(group: int) -> Iterator[bytes]:
        loads.append(group)
        yield from (content(group, row) for row in range(3))

    cache = RowGroupCache(load, capacity=30)
    for group in (0, 1, 2, 0, 1, 2):
        for row in range(3):
            assert cache.row(group, row) == content(group, row)
    assert len(loads) > 3


def test_rows_before_a_broken_place_are_kept_and_the_block_is_not_tried_again() -> None:
    loads: list[int] = []

    def load(group: int) -> Iterator[bytes]:
        loads.append(group)
        yield content(group, 0)
        raise OSError("broken page")

    cache = RowGroupCache(load)
    for _ in range(3):
        assert cache.row(0, 0) == content(0, 0)
        with pytest.raises(OSError, match="broken page"):
            cache.row(0, 1)
    assert loads == [0]


def test_threads_see_the_same_rows() -> None:
    cache = RowGroupCache(lambda group: (content(group, row) for row in range(20)), capacity=2000)
    wrong: list[tuple[int, int]] = []

    def reader(offset: int) -> None:
        for step in range(300):
            group, row = (step + offset) % 7, (step * 3 + offset) % 20
            if cache.row(group, row) != content(group, row):
                wrong.append((group, row))

    threads = [threading.Thread(target=reader, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_full_disk_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitadel.data.sources.row_group_cache.tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(UserError, match=r"No space left on device.*TMPDIR"):
        RowGroupCache(lambda group: [content(group, 0)]).row(0, 0)
