"""Which images a step sees: the same for any number of processes, parts and workers, and after a resume."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.training import data_stream
from vitadel.training.data_stream import DataStream, _Pool, make_augment, make_plain
from vitadel.training.recipes.training_sections import Augmentation

NOTHING = Augmentation()


@dataclass(frozen=True)
class Numbered:
    """Image i is of one gray, i modulo 251; its label is i modulo 10, plus `shift`."""

    size: int
    shift: int = 0
    broken: int = -1

    @property
    def classes(self):
        return [str(c) for c in range(10)]

    def __len__(self):
        return self.size

    def labels(self):
        return (torch.arange(self.size) + self.shift) % 10

    def read(self, indices):
        return [OSError("torn") if i == self.broken else Image.new("RGB", (8, 8), (i % 251,) * 3) for i in indices]

    def name(self, index):
        return f"number {index}"


def stream(size=100, batch_size=16, section=NOTHING, **settings):
    preprocess = Preprocess(8)
    return DataStream(
        Numbered(size), torch.arange(size), preprocess, make_augment(section, preprocess), batch_size, **settings
    )


def seen(a_stream, first, last):
    return [torch.cat([part.names for part in parts]) for parts in a_stream.steps(first, last)]


def test_an_epoch_is_a_pass_without_repetition_and_the_next_is_in_another_order():
    ours = stream()
    assert ours.steps_per_epoch == 6
    first, second = torch.cat(seen(ours, 0, 6)), torch.cat(seen(ours, 6, 12))
    assert len(first.unique()) == len(second.unique()) == 96
    assert not torch.equal(first, second)


def test_pixels_and_labels_belong_to_the_names():
    for (part,) in stream().steps(0, 3):
        assert torch.equal(part.x[:, 0, 0, 0], (part.names % 251).to(torch.uint8))
        assert torch.equal(part.y, part.names % 10)


def test_a_resumed_stream_goes_on_where_it_was():
    ours = stream(section=Augmentation(crop="pad", hflip=0.5))
    whole = list(ours.steps(0, 9))
    rest = list(ours.steps(4, 9))
    for (a,), (b,) in zip(whole[4:], rest, strict=True):
        assert torch.equal(a.names, b.names)
        assert torch.equal(a.x, b.x)


@pytest.mark.parametrize(("processes", "parts"), [(2, 1), (1, 4), (2, 2)])
def test_processes_and_parts_share_the_same_batch(processes, parts):
    section = Augmentation(crop="pad", hflip=0.5)
    alone = stream(section=section)
    attacks = [replace(alone, rank=rank, processes=processes, parts=parts) for rank in range(processes)]
    for whole, *shares in zip(alone.steps(0, 5), *(each.steps(0, 5) for each in attacks), strict=True):
        together = [part for share in shares for part in share]
        assert torch.equal(whole[0].names, torch.cat([part.names for part in together]))
        assert torch.equal(whole[0].x, torch.cat([part.x for part in together]))


def test_workers_read_what_the_process_itself_would_read():
    section = Augmentation(crop="resized", hflip=0.5, color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", reprob=0.5)
    ours = stream(section=section)
    for (a,), (b,) in zip(ours.steps(0, 3), replace(ours, workers=1).steps(0, 3), strict=True):
        assert torch.equal(a.x, b.x)


def test_every_epoch_varies_an_image_again():
    section = Augmentation(color_jitter=0.9)
    ours = stream(size=16, section=section)
    (a,), (b,) = next(ours.steps(0, 1)), next(ours.steps(1, 2))
    assert not torch.equal(a.x[a.names.argsort()], b.x[b.names.argsort()])


def test_repeated_augmentation_shows_several_versions_of_fewer_images():
    ours = stream(repeats=3, section=Augmentation(color_jitter=0.9))
    names = torch.cat(seen(ours, 0, 6))
    rows, counts = (names % 2**40).unique(return_counts=True)
    assert (len(rows), int(counts.max())) == (32, 3)
    (part,) = next(ours.steps(0, 1))
    first = part.names % 2**40 == part.names[0] % 2**40
    versions = part.x[first]
    assert len(versions) == 3
    assert not torch.equal(versions[0], versions[1])


def test_repeated_batches_are_seen_again_first_without_augmentation():
    """The thesis' form: three times the steps, each batch three times in a row, the first copy as the images are."""
    section = Augmentation(color_jitter=0.9, repeated_aug=3, repeated_aug_by="batches")
    plain = make_plain(section, Preprocess(8))
    ours, once = stream(repeats=3, plain=plain, section=section), stream()
    assert ours.steps_per_epoch == 3 * once.steps_per_epoch == 18
    parts = [part for (part,) in ours.steps(0, 36)]
    rows = torch.stack([part.names % 2**40 for part in parts])
    assert torch.equal(rows[0:36:3], torch.stack(seen(once, 0, 12)))
    assert torch.equal(rows[0:36:3], rows[1:36:3])
    assert torch.equal(rows[0:36:3], rows[2:36:3])
    assert [part.plain for part in parts[:6]] == [True, False, False] * 2
    for place in range(0, 36, 3):
        first, second, third = parts[place : place + 3]
        assert torch.equal(first.x[:, 0, 0, 0], (first.names % 251).to(torch.uint8))
        assert not torch.equal(second.x, first.x)
        assert not torch.equal(second.x, third.x)
        assert torch.equal(first.y, third.y)
    (resumed,) = next(ours.steps(20, 21))
    assert torch.equal(resumed.x, parts[20].x)
    shares = [next(replace(ours, rank=rank, processes=2, parts=2).steps(19, 20)) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.x for share in shares for part in share]), parts[19].x)
    assert make_plain(replace(section, repeated_aug_by="images"), Preprocess(8)) is None
    with pytest.raises(UserError, match="images of one source only"):
        stream(repeats=3, plain=plain, extra=Numbered(20), extra_rows=torch.arange(20))


def test_a_second_source_fills_its_share_of_every_batch_and_starts_over_when_it_ends():
    extra = Numbered(20, shift=5)
    ours = stream(extra=extra, extra_rows=torch.arange(20), extra_share=0.25)
    assert ours.steps_per_epoch == 100 // 12
    of_extra = []
    for (part,) in ours.steps(0, 10):
        second = part.names >= 2**40
        assert int(second.sum()) == 4
        assert torch.equal(part.y[second], (part.names[second] % 2**40 + 5) % 10)
        assert torch.equal(part.y[~second], part.names[~second] % 10)
        of_extra.append(part.names[second] % 2**40)
    passes = torch.cat(of_extra).view(2, 20)
    assert all(len(each.unique()) == 20 for each in passes)


def test_a_second_source_that_is_seen_several_times_in_an_epoch_is_varied_again():
    ours = stream(extra=Numbered(4), extra_rows=torch.arange(4), extra_share=0.5)
    names = []
    for (part,) in ours.steps(0, 5):
        second = part.names // 2**40 % 2**4 == 1
        assert torch.equal(part.y[second], part.names[second] % 2**40)
        names += part.names[second].tolist()
    assert len(names) == len(set(names)) == 40  # by which images are varied and attacks are started
    assert {name % 2**40 for name in names} == {0, 1, 2, 3}


def test_user_errors_are_reported():
    with pytest.raises(UserError, match="only 100"):
        stream(batch_size=128)
    with pytest.raises(UserError, match="multiple of 6"):
        stream(parts=3, processes=2)
    broken = replace(stream(), source=Numbered(100, broken=7))
    with pytest.raises(UserError, match=r"number 7.*torn"):
        list(broken.steps(0, 6))
    with pytest.raises(UserError, match=r"number 7.*torn"):
        list(replace(broken, workers=1).steps(0, 6))


def test_the_first_epochs_may_see_easier_images_under_the_same_names():
    """Broken images stand for easier ones: an epoch that reads them fails."""
    ours = replace(stream(), easier=Numbered(100, broken=7), easier_epochs=1)
    plain = stream()
    with pytest.raises(UserError, match="number 7"):
        list(ours.steps(0, 6))
    for (a,), (b,) in zip(ours.steps(6, 12), plain.steps(6, 12), strict=True):
        assert torch.equal(a.names, b.names)
        assert torch.equal(a.x, b.x)


@pytest.mark.slow
def test_transforms_draw_as_if_everything_was_seeded(monkeypatch):
    """Seeding every device for each image took longer than its transforms, and grew a list of calls without a GPU."""
    section = Augmentation(crop="pad", padding=4, hflip=0.5, auto_augment="rand-m9-mstd0.5-inc1", reprob=0.5)
    augment, picture = make_augment(section, Preprocess(8)), Image.effect_noise((8, 8), 80).convert("RGB")
    drawn = [augment(picture, seed) for seed in range(8)]
    monkeypatch.setattr(torch, "manual_seed", None)
    assert all(torch.equal(augment(picture, seed), each) for seed, each in enumerate(drawn))
    monkeypatch.undo()
    monkeypatch.setattr(data_stream, "_seed_transforms", _seed_all)
    assert all(torch.equal(augment(picture, seed), each) for seed, each in enumerate(drawn))


def _seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@pytest.mark.parametrize("buffer", [1, 7, 20, 1000])
def test_a_shuffle_buffer_reads_almost_in_order(buffer):
    """Every row once, each epoch in its own order, and never rows from more than three blocks at a time."""
    rows, pools = torch.arange(3, 103), [_Pool(torch.arange(3, 103), buffer) for _ in range(2)]
    orders = [pools[0].take(100 * epoch, 100, 5, "order") for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, rows)
        block = (order - 3) // min(buffer, 100)
        for first in range(0, 100, max(1, buffer)):
            assert len(block[first : first + buffer].unique()) <= 3
    assert torch.equal(pools[1].take(150, 50, 5, "order"), orders[1][50:])  # without reading what came before
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], _Pool(rows, buffer).take(0, 100, 6, "order"))
    if buffer > 1:
        assert not torch.equal(orders[0], rows)
