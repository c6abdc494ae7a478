"""AugMix copies: where they are, that they are those of torchvision, and that a training can take them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import AugMix

from command_line import vitadel
from vitadel.data import open_dataset
from vitadel.data.batches import check_same_classes
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.augmix_copy import AugmixCopyRequest, distorted, write_augmix_copy
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG

ALONE = Processes(0, 1, torch.device("cpu"))


def write(out, processes=ALONE, resume=False, **settings):
    request = AugmixCopyRequest(**{"limit": 12, "batch_size": 5} | settings)
    return write_augmix_copy(Shapes("train", size=16), "shapes@train", request, processes, out=out, resume=resume)


def files_of(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.png"))}


def test_copies_by_class_that_a_training_can_take(tmp_path):
    results, _, _ = write(tmp_path / "a")
    source, copy = Shapes("train", size=16), open_dataset(f"folder:{tmp_path}/a")
    assert len(copy) == 24
    check_same_classes(copy, source, "data.extra")
    labels = source.labels()
    for name in files_of(tmp_path / "a"):
        folder, file = name.split("/")
        assert int(labels[int(file[:8])]) == int(folder)
    assert results["augmix"]["note"].startswith("AugMix, a substitute for DeepAugment")
    assert results["data"]["n"] == 12


def test_the_command_ends_with_its_page(tmp_path):
    done = vitadel(
        "corrupt", "--data", "shapes(size=16)@train", "--augmix", "1", "--limit", "2", "--out", str(tmp_path / "a")
    )
    assert done.stdout.strip().endswith(str(tmp_path / "a"))
    assert len(files_of(tmp_path / "a")) == 2


def test_versions_are_torchvisions_and_belong_to_seed_sample_and_copy():
    (image,) = Shapes("train", size=16).read([7])
    before = torch.random.get_rng_state()
    first, second = distorted(image, 7, 2, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    key = int(SampleRNG.of_samples(0, [7]).stream("augmix").bits(2)[0, 1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        assert np.array_equal(second, np.asarray(AugMix()(image)))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, next(distorted(image, 7, 1, seed=1)))
    assert not np.array_equal(first, np.asarray(image))


def test_broken_off_and_in_parts_it_writes_the_same_files(tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "other", batch_size=3)
    whole = files_of(tmp_path / "whole")
    assert files_of(tmp_path / "other") == whole
    lost = sorted((tmp_path / "other").rglob("*.png"))[5]
    lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "other").rglob("*.png")}
    (tmp_path / "other" / "results.json").unlink()
    write(tmp_path / "other", batch_size=3, resume=True)
    assert files_of(tmp_path / "other") == whole
    changed = [path.name[:8] for path, time in kept.items() if path.stat().st_mtime_ns != time]
    assert set(changed) <= {lost.name[:8]}  # only the other copy of this sample is written again


def test_pictures_that_cannot_be_read(tmp_path):
    for number in range(3):
        place = tmp_path / "data" / "a" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (50 * number, 9, 9)).save(place)
    (tmp_path / "data" / "a" / "1.png").write_bytes(b"no picture")
    source = open_dataset(f"folder:{tmp_path}/data")
    with pytest.raises(UserError, match=r"1.png\) cannot be read: .* skip and count such samples with --skip-bad"):
        write_augmix_copy(source, "folder", AugmixCopyRequest(), ALONE, out=tmp_path / "x")
    results, _, _ = write_augmix_copy(source, "folder", AugmixCopyRequest(skip_bad=True), ALONE, out=tmp_path / "y")
    assert (results["data"]["n"], results["data"]["left_out"]) == (2, 1)
    (first, *_) = (tmp_path / "y").rglob("*.png")
    with Image.open(first) as picture:
        assert picture.size == (9, 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--augmix", "0"], "--augmix is the number of copies of each image, from 1 to 99; got 0"),
        (["--augmix", "2", "--corruptions", "fog"], "--augmix writes images of their own size without corruptions"),
        (["--augmix", "2", "--format", "npy"], "unknown format 'npy'"),
    ],
)
def test_settings_without_sense(words, said, tmp_path):
    found = vitadel("corrupt", *words, "--data", "shapes", "--out", str(tmp_path / "c"), code=2)
    assert said in " ".join(found.stderr.split())
