"""Worker processes read what threads read, send bytes, and say which sample they died at."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import torch
from test_batches import CHUNKS, Counted

import vitadel
from command_line import vitadel as vitadel_command
from device_double import DeviceDouble
from small_recipes import recipe
from vitadel.data import Preprocess, read_batches
from vitadel.data.batches import PixelReader, to_unit_range
from vitadel.data.worker_processes import Chunked, Places, usual_workers
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training.run import open_training


class Deadly(Counted):
    """One sample ends the process that reads it."""

    def read(self, indices):
        if 7 in indices:
            os._exit(1)
        return super().read(indices)


def test_all_levels_are_the_quotients_of_numpy():
    levels = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([level / 255 for level in range(256)], dtype=torch.float64).float()
    assert torch.equal(to_unit_range(levels), expected)
    assert torch.equal(to_unit_range(expected), expected)


@pytest.mark.slow
def test_processes_read_what_threads_read():
    source = Counted(broken=frozenset([3, 39]))
    one, other = (list(read_batches(source, CHUNKS, Preprocess(8), skip_bad=True, workers=n)) for n in (0, 2))
    assert len(one) == len(other) == len(CHUNKS)
    for here, there in zip(one, other, strict=True):
        assert torch.equal(here.indices, there.indices)
        assert torch.equal(here.x, there.x)
        assert torch.equal(here.y, there.y)
        assert here.bad == there.bad


def test_pixels_travel_as_bytes():
    """At most 1 / 3.5 of what float32 pixels take, besides a few bytes for each message."""
    part, pixels, faults = Chunked(PixelReader(Counted(broken=frozenset([3])), Preprocess(64)), 1).__getitems__(
        [5, 3, 8]
    )
    assert part == [5, 3, 8]
    assert pixels.dtype == torch.uint8
    assert [str(each) for each in faults.values()] == ["torn"]
    floats = 2 * 3 * 64 * 64 * 4
    assert len(pickle.dumps((part, pixels.numpy(), faults))) <= floats / 3.5


def test_a_batch_goes_to_the_device_as_bytes_and_only_once():
    expected = list(read_batches(Counted(), CHUNKS, Preprocess(8)))
    with DeviceDouble() as double:
        for number, batch in enumerate(read_batches(Counted(), CHUNKS, Preprocess(8), device=double.device)):
            sent = [len(chunk) * each for chunk in CHUNKS[: number + 2] for each in (3 * 8 * 8, 8)]
            assert double.copies == sent, "pixels of one byte and a label for each sample, one batch ahead"
            assert batch.x.device == batch.y.device == double.device
            assert torch.equal(batch.x.cpu(), expected[number].x)
    assert double.waits["item"] == 0


def test_training_sends_bytes():
    stream = open_training(recipe(), Processes(0, 1, torch.device("cpu"))).stream
    ((part,),) = stream.steps(0, 1)
    assert part.x.dtype == torch.uint8
    there = part.to(torch.device("cpu"))
    assert torch.equal(there.x, part.x.float() / 255)


@pytest.mark.slow
def test_a_worker_that_dies_names_its_sample():
    with pytest.raises(UserError, match=r"died at sample 7 \(7.png\).*--workers"):
        list(read_batches(Deadly(), CHUNKS, Preprocess(8), workers=1))


@pytest.mark.slow
def test_a_worker_of_a_training_that_dies_names_its_sample():
    stream = open_training(recipe(), Processes(0, 1, torch.device("cpu"))).stream
    source = Deadly()
    stream = replace(stream, source=source, rows=torch.arange(16), batch_size=16, workers=1)
    with pytest.raises(UserError, match=r"died at sample 7 \(7.png\).*data.workers"):
        list(stream.steps(0, 1))


@pytest.mark.parametrize("number", [-1, 100_000])
def test_a_number_that_cannot_be_meant_is_refused(number):
    with pytest.raises(UserError, match=rf"--workers must be auto or from 0 to 256, got {number}"):
        vitadel.audit("zoo:shapes-standard", "shapes", attacks="fgsm", limit=2, workers=number)
    with pytest.raises(UserError, match=rf"workers must be from 0 to 256, got {number}"):
        recipe(data={"workers": number})


def test_the_usual_number_can_be_asked_for_by_its_name(monkeypatch):
    given = []

    def noted(*_, workers, **__):
        given.append(workers)
        raise UserError("enough")

    monkeypatch.setattr("vitadel.cli.audit.run_attacks", noted)
    for words in ([], ["--workers=auto"], ["--workers=3"]):
        vitadel_command("audit", *words, code=2)
    assert given == [None, None, 3]
    for text in ("many", "1.5", "", "9" * 10):
        said = vitadel_command("audit", f"--workers={text}", code=2).stderr
        assert f"--workers must be auto or from 0 to 256, got '{text}'" in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("DataLoader worker (pid 11) is killed by signal: Killed. ", [5]),
        ("DataLoader worker (pid(s) 11, 12) exited unexpectedly", [5, 6]),
        ("DataLoader worker (pid 99) is killed", []),
    ],
)
def test_places_of_the_dead(text, found):
    places = Places(3)
    places.table[:] = torch.tensor([[11, 5], [12, 6], [-1, -1]])
    assert places.of(RuntimeError(text)) == found


def test_cores_are_shared_between_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [usual_workers(count) for count in (1, 2, 4, 12)] == [11, 5, 2, 0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(96), raising=False)
    assert usual_workers(1) == 16


class Broken:
    """A loader whose connection to its process breaks, as it may before torch finds the process dead."""

    def __iter__(self):
        yield "read"
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_broken_connection_names_the_sample_of_the_process_that_ended(monkeypatch):
    monkeypatch.setattr("vitadel.data.worker_processes._MOMENTS", 1)
    places = Places(1)
    with pytest.raises(ConnectionResetError):  # no process has ended
        list(places.watch(Broken(), str, "use fewer --workers"))
    no_process = 2**40
    places.table[0] = torch.tensor([no_process, 7])
    with pytest.raises(UserError, match=r"died at sample 7 \(7\): .*Connection reset.*use fewer --workers"):
        list(places.watch(Broken(), str, "use fewer --workers"))


class Unreadable:
    """A loader whose worker lives and raises, as torch hands it on."""

    def __iter__(self):
        yield "read"
        raise RuntimeError("Caught RuntimeError in DataLoader worker process 0.")


def test_an_error_that_a_living_worker_raised_is_not_called_a_death():
    with pytest.raises(RuntimeError, match="Caught RuntimeError"):
        list(Places(1).watch(Unreadable(), str, "use fewer --workers"))
