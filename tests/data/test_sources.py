"""What every source promises, over one of each kind that can be made here."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pictures import picture, pixels_of, png, write_png

from vitadel.data import check_labels, open_dataset, read_batches
from vitadel.data.batches import Preprocess
from vitadel.types import Source

COUNT = 30


def folder(root: Path) -> Source:
    for number in range(COUNT):
        write_png(root / f"class{number % 3}" / f"{number}.png", number)
    return open_dataset(f"folder:{root}")


def imagenet_c(root: Path) -> Source:
    for number in range(COUNT):
        write_png(root / "fog" / str(1 + number % 5) / "n01440764" / f"{number}.png", number)
    return open_dataset(f"imagenet-c:{root}")


def parquet(root: Path) -> Source:
    table = pa.table({"img": [png(picture(n)) for n in range(COUNT)], "label": [n % 3 for n in range(COUNT)]})
    pq.write_table(table, root / "x.parquet", row_group_size=4)
    return open_dataset(f"parquet:{root}/x.parquet")


def shards(root: Path) -> Source:
    with tarfile.open(root / "x.tar", "w") as archive:
        for number in range(COUNT):
            for ending, content in (("png", png(picture(number))), ("cls", b"%d" % (number % 3))):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return open_dataset(f"shards:{root}/x.tar")


def npz(root: Path) -> Source:
    arrays = {"images": np.stack([picture(n) for n in range(COUNT)]), "labels": np.arange(COUNT) % 3}
    np.savez_compressed(root / "x.npz", **arrays)
    return open_dataset(f"npz:{root}/x.npz")


def cifar10_c(root: Path) -> Source:
    (root / "CIFAR-10-C").mkdir()
    np.save(root / "CIFAR-10-C" / "fog.npy", np.stack([picture(n, 32, 32) for n in range(COUNT)]))
    np.save(root / "CIFAR-10-C" / "labels.npy", np.arange(COUNT) % 10)
    return open_dataset("cifar10-c", root=root)


def hub(root: Path) -> Source:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": png(picture(n)), "path": None} for n in range(COUNT)], "label": list(range(COUNT))}
    datasets.Dataset.from_dict(rows, features).save_to_disk(root / "saved")
    return open_dataset(f"hf:{root}/saved")


def food101(root: Path) -> Source:
    (root / "food-101" / "meta").mkdir(parents=True)
    names = [f"soup/{number}" for number in range(COUNT)]
    for split in ("train", "test"):
        (root / "food-101" / "meta" / f"{split}.json").write_text(str({"soup": names}).replace("'", '"'))
    for number, name in enumerate(names):
        write_png(root / "food-101" / "images" / f"{name}.jpg", number)
    return open_dataset("food101", root=root)


def shapes(_: Path) -> Source:
    return open_dataset("shapes(size=16)")


@pytest.fixture(params=[folder, imagenet_c, parquet, shards, npz, cifar10_c, hub, food101, shapes], scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    make: Callable[[Path], Source] = request.param
    return make(tmp_path_factory.mktemp(make.__name__))


def bytes_of(source: Source, indices: list[int]) -> list[bytes]:
    return [pixels_of(image).tobytes() for image in source.read(indices)]


def test_labels_and_classes_fit_together(source: Source) -> None:
    labels = source.labels()
    assert labels.dtype == torch.int64
    assert labels.shape == (len(source),)
    assert check_labels(source, len(source.classes)) == ()
    assert all(isinstance(name, str) for name in source.classes)


def test_every_sample_has_a_name_of_its_own(source: Source) -> None:
    assert len({source.name(index) for index in range(COUNT)}) == COUNT


def test_a_sample_is_the_same_in_any_company(source: Source) -> None:
    once = bytes_of(source, list(range(COUNT)))
    assert len(set(once)) == COUNT
    order = [29, 0, 13, 13, 1, 28]
    assert bytes_of(source, order) == [once[index] for index in order]
    assert bytes_of(source, []) == []


def test_threads_read_what_one_alone_reads(source: Source) -> None:
    alone = bytes_of(source, list(range(COUNT)))
    requests = [[(start + 7 * step) % COUNT for step in range(6)] for start in range(60)]
    with ThreadPoolExecutor(6) as pool:
        for request, got in zip(requests, pool.map(lambda asked: bytes_of(source, asked), requests), strict=True):
            assert got == [alone[index] for index in request]


def test_it_can_be_shown_without_flooding_the_screen(source: Source) -> None:
    assert len(repr(source)) < 600


def test_batches_of_it(source: Source) -> None:
    (image,) = source.read([0])
    assert not isinstance(image, Exception)
    preprocess = Preprocess((image.height, image.width))
    (batch,) = read_batches(source, [[2, 0]], preprocess)
    expected = np.stack([pixels_of(image) for image in source.read([2, 0])]).transpose(0, 3, 1, 2)
    assert np.array_equal(batch.x.numpy(), expected.astype(np.float32) / 255)
    assert torch.equal(batch.y, source.labels()[[2, 0]])
