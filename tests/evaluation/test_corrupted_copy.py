"""Corrupted copies on disk: where files go, that their pixels are right, and that a killed run goes on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitadel.corruptions import corrupt
from vitadel.data import open_dataset
from vitadel.data.sources.shapes import CLASSES, Shapes
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.corruptions import corrupted_copy
from vitadel.evaluation.corruptions.corrupted_copy import CorruptedCopyRequest, write_copy
from vitadel.evaluation.corruptions.sizes import benchmark_preprocess
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG

ALONE = Processes(0, 1, torch.device("cpu"))


def write(out, source=None, processes=ALONE, resume=False, **settings):
    request = CorruptedCopyRequest(
        **{"corruptions": ("shot_noise",), "severities": (2, 4), "limit": 20, "batch_size": 6} | settings
    )
    return write_copy(source or Shapes("test", size=16), "shapes", request, processes, out=out, resume=resume)


def expected(index: int, level: int, size: int = 16) -> np.ndarray:
    pixels, _, _ = Shapes("test", size=size).render(torch.tensor([index]))
    z = corrupt(pixels.float() / 255, "shot_noise", level, SampleRNG.of_samples(0, [index]))
    return (z[0] * 255).round().byte().permute(1, 2, 0).numpy()


def pictures(root):
    return {name: content for name, content in files_of(root).items() if name.endswith(".png")}


def files_of(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_pictures_hold_the_pixels_and_folders_the_classes(tmp_path):
    results, _, _ = write(tmp_path / "c")
    found = pictures(tmp_path / "c")
    assert len(found) == 2 * 20
    for name, content in list(found.items())[::7]:
        corruption, level, folder, file = name.split("/")
        index = int(file.removesuffix(".png"))
        label = int(Shapes("test", size=16).labels()[index])
        assert (corruption, folder) == ("shot_noise", f"{label}-{CLASSES[label]}")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), expected(index, int(level)))
    assert results["complete"]
    assert results["copy"]["size"] == [16, 16]
    again = open_dataset(f"folder:{tmp_path}/c/shot_noise/4")
    assert again.labels().bincount().tolist() == [2] * 10  # the classes keep their numbers


def test_jpeg_is_what_pillow_makes_of_the_pixels(tmp_path):
    write(tmp_path / "c", format="jpeg", severities=(2,), limit=10)
    (path, *_) = sorted((tmp_path / "c").rglob("*.JPEG"))
    buffer = io.BytesIO()
    Image.fromarray(expected(int(path.stem), 2)).save(buffer, "JPEG", quality=85, optimize=True)
    assert path.read_bytes() == buffer.getvalue()


def test_arrays_have_severities_one_after_the_other(tmp_path):
    write(tmp_path / "c", format="npy", severities=(1, 2, 3, 4, 5))
    rows = np.load(tmp_path / "c" / "shot_noise.npy", allow_pickle=False)
    labels = np.load(tmp_path / "c" / "labels.npy", allow_pickle=False)
    assert rows.shape == (100, 16, 16, 3)
    assert rows.dtype == np.uint8
    assert np.array_equal(labels, np.tile(labels[:20], 5))
    chosen = [int(path.stem) for path in sorted(_chosen(tmp_path))]
    for level in (1, 3, 5):
        assert np.array_equal(rows[(level - 1) * 20 + 13], expected(sorted(chosen)[13], level))


def _chosen(tmp_path):
    write(tmp_path / "same", severities=(1,))
    return (tmp_path / "same").rglob("*.png")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "npy"])
def test_stopped_and_resumed_it_is_the_same_copy(tmp_path, monkeypatch, kind):
    settings = {"format": kind, "corruptions": ("shot_noise", "contrast"), "severities": (1, 2, 3, 4, 5)}
    write(tmp_path / "whole", **settings)
    made, turns = corrupted_copy.corrupt, iter(range(1000))

    def stopping(x, name, *more):
        if next(turns) > 25:  # one call asks whether each corruption can be had, then five for each of four batches
            raise KeyboardInterrupt
        return made(x, name, *more)

    monkeypatch.setattr(corrupted_copy, "corrupt", stopping)
    with pytest.raises(Interrupted):
        write(tmp_path / "stopped", **settings)
    assert not (tmp_path / "stopped" / "results.json").exists()
    calls = []
    monkeypatch.setattr(corrupted_copy, "corrupt", lambda x, name, *more: (calls.append(name), made(x, name, *more))[1])
    write(tmp_path / "stopped", resume=True, **settings)
    assert calls.count("shot_noise") == 1  # only the question whether it can be had
    whole, stopped = (
        {name: content for name, content in files_of(tmp_path / each).items() if name != "command.json"}
        for each in ("whole", "stopped")
    )
    assert stopped == whole


def test_batch_size_and_processes_change_no_file(tmp_path):
    write(tmp_path / "one", batch_size=20)
    whole = pictures(tmp_path / "one")
    write(tmp_path / "two")
    assert pictures(tmp_path / "two") == whole
    copies = tmp_path / "shared"
    part = Processes(1, 2, torch.device("cpu"))
    second = corrupted_copy._Copy(
        Shapes("test", size=16),
        CorruptedCopyRequest(corruptions=("shot_noise",), severities=(2, 4), limit=20, batch_size=6),
        torch.tensor(sorted({int(name[-12:-4]) for name in whole})),
        benchmark_preprocess(Shapes("test", size=16)),
        copies,
        part,
        False,
    )
    second.pictures("shot_noise")
    mine = pictures(copies)
    assert len(mine) == 2 * (6 + 2)  # the second and the fourth batch
    assert mine.items() <= whole.items()


def test_large_pictures_are_prepared_as_imagenet_c_was(tmp_path):
    across = np.linspace(0, 255, 320).astype(np.uint8)
    pixels = np.repeat(np.tile(across, (300, 1))[:, :, None], 3, 2)
    (tmp_path / "in" / "ramp").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in" / "ramp" / "a.png")
    write(tmp_path / "c", open_dataset(f"folder:{tmp_path}/in"), corruptions=("contrast",), severities=(1,), limit=None)
    image = Image.open(tmp_path / "c" / "contrast" / "1" / "ramp" / "a.png")
    assert image.size == (224, 224)
    resized = Image.fromarray(pixels).resize((273, 256), Image.Resampling.BILINEAR)
    left, top = round((273 - 224) / 2), 16
    clean = np.asarray(resized)[top : top + 224, left : left + 224] / 255
    by_hand = (clean - clean.mean((0, 1))) * 0.4 + clean.mean((0, 1))
    assert np.abs(np.asarray(image) - by_hand * 255).max() <= 1.01  # rounded down to whole levels


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"format": "gif"}, "unknown format 'gif'"),
        ({"format": "npy"}, "all five severities"),
        ({"severities": (0,)}, "got 0"),
        ({"corruptions": ("rain",)}, "unknown corruption 'rain'"),
        ({"corruptions": ()}, "no corruption is requested"),
        ({"batch_size": 0}, "at least 1"),
    ],
    ids=str,
)
def test_user_errors_are_reported_before_anything_is_written(settings, reported, tmp_path):
    with pytest.raises(UserError) as caught:
        write(tmp_path / "c", **settings)
    assert reported in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_another_copy_is_not_mixed_in(tmp_path):
    write(tmp_path / "c")
    with pytest.raises(UserError, match="already holds a finished run"):
        write(tmp_path / "c")
    with pytest.raises(UserError, match="started with different settings"):
        write(tmp_path / "c", resume=True, seed=1)


def gray_pictures(root: Path, *names: str) -> str:
    for number, name in enumerate(names):
        path = root / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 90, 160)).save(path)
    return f"folder:{root}/in"


def test_pictures_that_differ_by_their_endings_alone_are_not_written_over_each_other(tmp_path):
    spec = gray_pictures(tmp_path, "cat/1.bmp", "cat/1.png", "cat/2.png", "dog/1.png")
    with pytest.raises(UserError, match=r"cat/1\.bmp and cat/1\.png would both be written to cat/1\.png; rename"):
        write(tmp_path / "c", open_dataset(spec), limit=None)
    assert not (tmp_path / "c").exists()
    (tmp_path / "in" / "cat" / "1.bmp").unlink()
    write(tmp_path / "c", open_dataset(spec), limit=None)
    assert len(pictures(tmp_path / "c")) == 2 * 3


def test_images_that_cannot_be_read_are_reported_and_not_counted(tmp_path):
    spec = gray_pictures(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    (tmp_path / "in" / "cat" / "2.png").write_bytes(b"no picture")
    for resume in (False, True):
        results, _, _ = write(
            tmp_path / "c", open_dataset(spec), limit=None, skip_bad=True, batch_size=1, resume=resume
        )
        assert (results["data"]["n"], results["data"]["left_out"]) == (3, 1)
        assert results["data"]["left_out_names"] == ["cat/2.png"]
        assert len(pictures(tmp_path / "c")) == 2 * 3
    for name in ("cat/1", "dog/1", "dog/2"):
        (tmp_path / "in" / f"{name}.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match="no image of the data can be read"):
        write(tmp_path / "none", open_dataset(spec), limit=None, skip_bad=True)
    with pytest.raises(UserError, match="no sample could be read, so the copy is empty"):
        write(tmp_path / "none", open_dataset(spec), limit=None, skip_bad=True, size=16)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_reported_and_arrays_go_on_when_there_is_space(tmp_path, monkeypatch):
    settings = {"format": "npy", "severities": (1, 2, 3, 4, 5), "corruptions": ("contrast",)}
    write(tmp_path / "whole", **settings)

    def stopped(self, name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corrupted_copy._Copy, "arrays", stopped)
        with pytest.raises(Interrupted):
            write(tmp_path / "c", **settings)
    (tmp_path / "c" / "contrast.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"no space left on the disk while writing .*contrast\.npy"):
        write(tmp_path / "c", resume=True, **settings)
    assert sorted(files_of(tmp_path / "c")) == ["command.json", "environment.json"]
    write(tmp_path / "c", resume=True, **settings)
    arrays = [(tmp_path / each / "contrast.npy").read_bytes() for each in ("whole", "c")]
    assert arrays[0] == arrays[1]
