from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import picture, write_png
from PIL import Image

from vitadel.data import BadSample, Preprocess, open_dataset, read_batches
from vitadel.errors import UserError


@dataclass(eq=False)
class Counted:
    """Pictures made on demand, that notes what is asked for; those in `broken` cannot be read."""

    size: int = 40
    broken: frozenset[int] = frozenset()
    classes: tuple[str, ...] = ("even", "odd")
    asked: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def labels(self) -> torch.Tensor:
        return torch.arange(self.size) % 2

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        self.asked += indices
        return [OSError("torn") if i in self.broken else Image.fromarray(picture(i, 8, 8)) for i in indices]

    def name(self, index: int) -> str:
        return f"{index}.png"


CHUNKS = [[5, 3, 8], [0], [39, 2, 1, 7, 6]]


def pixels(index: int) -> torch.Tensor:
    return torch.from_numpy(picture(index, 8, 8)).permute(2, 0, 1).float() / 255


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vitadel-read")]


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_batches_are_the_chunks_in_order(threads: int) -> None:
    got = list(read_batches(Counted(), CHUNKS, Preprocess(8), threads=threads))
    assert [batch.indices.tolist() for batch in got] == CHUNKS
    for batch in got:
        assert batch.x.dtype == torch.float32
        assert torch.equal(batch.x, torch.stack([pixels(i) for i in batch.indices.tolist()]))
        assert batch.y.tolist() == [i % 2 for i in batch.indices.tolist()]
        assert batch.bad == ()
    assert readers() == []


def test_a_batch_does_not_depend_on_the_size_of_the_chunk() -> None:
    whole = next(read_batches(Counted(), [range(20)], Preprocess(6, 0.9)))
    parts = list(read_batches(Counted(), [range(7), range(7, 20)], Preprocess(6, 0.9)))
    assert torch.equal(whole.x, torch.cat([part.x for part in parts]))


def test_one_batch_is_read_ahead_and_no_more() -> None:
    source = Counted()
    stream = read_batches(source, [[i] for i in range(10)], Preprocess(8))
    for number in range(4):
        next(stream)
        deadline = time.monotonic() + 60
        while len(source.asked) < number + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert sorted(source.asked) == list(range(number + 2))
    stream.close()  # type: ignore[attr-defined]


def test_reading_goes_on_while_the_caller_works() -> None:
    """The caller's work cannot end before the next batch has been read, so in turns this would never finish."""
    read = [threading.Event() for _ in range(4)]

    class Announcing(Counted):
        def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
            images = super().read(indices)
            read[indices[0]].set()
            return images

    for batch in read_batches(Announcing(), [[0], [1], [2], [3]], Preprocess(8)):
        assert read[min(int(batch.indices[0]) + 1, 3)].wait(timeout=60)


def test_the_chunks_may_be_endless_and_stopping_leaves_no_thread() -> None:
    def endless():
        while True:
            yield [1, 2]

    for number, batch in enumerate(read_batches(Counted(), endless(), Preprocess(8))):
        assert batch.indices.tolist() == [1, 2]
        if number == 3:
            break
    assert readers() == []


def test_an_exception_of_the_caller_leaves_no_thread() -> None:
    def use() -> None:
        for _ in read_batches(Counted(), CHUNKS, Preprocess(8)):
            raise RuntimeError("the caller's")

    with pytest.raises(RuntimeError, match="the caller's"):
        use()
    assert readers() == []


def test_a_bad_sample_is_a_user_error_that_names_it() -> None:
    stream = read_batches(Counted(broken=frozenset({39})), CHUNKS, Preprocess(8), skip_bad=False)
    assert next(stream).indices.tolist() == CHUNKS[0]
    assert next(stream).indices.tolist() == CHUNKS[1]
    with pytest.raises(UserError, match=r"sample 39 \(39.png\) cannot be read: torn.*--skip-bad"):
        next(stream)
    assert readers() == []


def test_bad_samples_can_be_left_out_and_are_listed() -> None:
    first, second, third = read_batches(Counted(broken=frozenset({3, 0, 6})), CHUNKS, Preprocess(8), skip_bad=True)
    assert first.indices.tolist() == [5, 8]
    assert first.bad == (BadSample(3, "3.png", "torn"),)
    assert torch.equal(first.x, torch.stack([pixels(5), pixels(8)]))
    assert first.y.tolist() == [1, 0]
    assert (second.x.shape, second.y.tolist(), len(second.bad)) == ((0, 3, 8, 8), [], 1)
    assert third.indices.tolist() == [39, 2, 1, 7]


def test_a_picture_that_cannot_be_resized_is_bad_too() -> None:
    class Thin(Counted):
        def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
            return [Image.new("RGB", (0, 3)) for _ in indices]

    (batch,) = read_batches(Thin(), [[4]], Preprocess(8), skip_bad=True)
    assert [bad.index for bad in batch.bad] == [4]


def test_a_user_error_within_reading_reaches_the_caller() -> None:
    class Full(Counted):
        def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
            raise UserError("no room for temporary files")

    with pytest.raises(UserError, match="no room"):
        list(read_batches(Full(), CHUNKS, Preprocess(8), skip_bad=True))
    assert readers() == []


def test_threads_must_be_positive_and_this_is_checked_at_once() -> None:
    with pytest.raises(UserError, match="at least 1, got 0"):
        read_batches(Counted(), CHUNKS, Preprocess(8), threads=0)


def test_from_a_folder_with_a_torn_file(tmp_path: Path) -> None:
    for number in range(4):
        write_png(tmp_path / "cat" / f"{number}.png", number)
    (tmp_path / "cat" / "2.png").write_bytes(b"torn")
    source = open_dataset(f"folder:{tmp_path}")
    with pytest.raises(UserError, match=r"cat/2.png\) cannot be read: not an image"):
        list(read_batches(source, [[0, 1], [2, 3]], Preprocess((6, 5))))
    got = list(read_batches(source, [[0, 1], [2, 3]], Preprocess((6, 5)), skip_bad=True))
    assert torch.cat([batch.indices for batch in got]).tolist() == [0, 1, 3]
    expected = np.stack([picture(n) for n in (0, 1, 3)]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    assert np.array_equal(torch.cat([batch.x for batch in got]).numpy(), expected)


def test_moving_a_batch_keeps_its_indices() -> None:
    batch = next(read_batches(Counted(), CHUNKS, Preprocess(8)))
    moved = batch.to("meta")
    assert (moved.x.device.type, moved.y.device.type, moved.indices.device.type) == ("meta", "meta", "cpu")
