from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import picture, pixels_of, png

from vitadel.data import open_dataset
from vitadel.data.sources.parquet import ParquetImages
from vitadel.errors import UserError

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def cells(numbers: range) -> pa.Array:
    return pa.array([{"bytes": png(picture(n)), "path": f"{n}.png"} for n in numbers], IMAGE)


def write(path: Path, columns: dict[str, pa.Array], names: list[str] | None = None, group: int = 3) -> None:
    table = pa.table(columns)
    if names:
        features = {"img": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


def test_rows_labels_names_and_classes(tmp_path: Path) -> None:
    write(tmp_path / "set.parquet", {"img": cells(range(8)), "label": pa.array([0, 1] * 4)}, ["cat", "dog"])
    source = open_dataset(f"parquet:{tmp_path}/set.parquet")
    assert tuple(source.classes) == ("cat", "dog")
    assert source.labels().tolist() == [0, 1] * 4
    assert source.name(7) == "set.parquet row 7"
    order = [7, 0, 3, 3, 5]
    for image, number in zip(source.read(order), order, strict=True):
        assert np.array_equal(pixels_of(image), picture(number))


def test_several_files_are_one_set_in_the_order_of_their_names(tmp_path: Path) -> None:
    for part, numbers in (("b", range(4, 9)), ("a", range(4))):
        write(tmp_path / f"{part}.parquet", {"image": cells(numbers), "label": pa.array([0] * len(numbers))})
    for spec in (f"parquet:{tmp_path}/*.parquet", f"parquet:{tmp_path}", f"parquet:{tmp_path}/{{a,b}}.parquet"):
        source = open_dataset(spec)
        for number, image in enumerate(source.read(range(9))):
            assert np.array_equal(pixels_of(image), picture(number))
        assert source.name(4) == "b.parquet row 0"


def test_splits_by_the_names_of_the_files(tmp_path: Path) -> None:
    for split, numbers in (("train", range(3)), ("test", range(3, 5)), ("validation", range(5, 6))):
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write(path, {"img": cells(numbers), "label": pa.array([0] * len(numbers))})
    for suffix, size in (("", 2), ("@train", 3), ("@val", 1), ("@test", 2)):
        assert len(open_dataset(f"parquet:{tmp_path}{suffix}")) == size
    with pytest.raises(UserError, match=r"no split 'train'.*it has: test"):
        open_dataset(f"parquet:{tmp_path}/data/test-00000-of-00001.parquet@train")
    write(tmp_path / "x.parquet", {"img": cells(range(1)), "label": pa.array([0])})
    with pytest.raises(UserError, match="do not begin with the name of a split"):
        open_dataset(f"parquet:{tmp_path}/x.parquet@train")


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_raw_bytes_and_labels_as_words(kind: pa.DataType, tmp_path: Path) -> None:
    columns = {
        "image": pa.array([png(picture(n)) for n in range(3)], kind),
        "fine_label": pa.array(["dog", "cat", "dog"]),
        "coarse_label": pa.array(["pet", "pet", "pet"]),
    }
    write(tmp_path / "set.parquet", columns)
    source = open_dataset(f"parquet:{tmp_path}/set.parquet")
    assert (tuple(source.classes), source.labels().tolist()) == (("cat", "dog"), [1, 0, 1])
    assert np.array_equal(pixels_of(source.read([2])[0]), picture(2))
    coarse = open_dataset(f"parquet:{tmp_path}/set.parquet(label=coarse_label)")
    assert coarse.labels().tolist() == [0, 0, 0]


def test_missing_bytes_and_labels_are_the_samples_fault(tmp_path: Path) -> None:
    images = pa.array([None, {"bytes": None, "path": "x"}, {"bytes": png(picture(2)), "path": None}], IMAGE)
    write(tmp_path / "set.parquet", {"img": images, "label": pa.array([0, None, 2])})
    source = open_dataset(f"parquet:{tmp_path}/set.parquet")
    assert source.labels().tolist() == [0, -1, 2]
    first, second, third = source.read([0, 1, 2])
    assert "no image bytes" in str(first)
    assert "no image bytes" in str(second)
    assert np.array_equal(pixels_of(third), picture(2))


def test_unclear_columns_are_listed(tmp_path: Path) -> None:
    two = {"left": cells(range(2)), "right": cells(range(2)), "label": pa.array([0, 1])}
    write(tmp_path / "two.parquet", two)
    with pytest.raises(UserError, match=r"several columns could be the image: left, right; name .* \(image=COLUMN\)"):
        open_dataset(f"parquet:{tmp_path}/two.parquet")
    assert len(open_dataset(f"parquet:{tmp_path}/two.parquet(image=right)")) == 2
    with pytest.raises(UserError, match=r"no column 'rigt'.*did you mean right"):
        open_dataset(f"parquet:{tmp_path}/two.parquet(image=rigt)")
    write(tmp_path / "mask.parquet", {"img": cells(range(2)), "label": cells(range(2))})
    with pytest.raises(UserError, match="no column that could be the label"):
        open_dataset(f"parquet:{tmp_path}/mask.parquet")


def test_files_that_are_no_parquet_or_have_no_rows_or_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really")
    write(tmp_path / "none.parquet", {"img": cells(range(0)), "label": pa.array([], pa.int64())})
    write(tmp_path / "one.parquet", {"img": cells(range(1)), "label": pa.array([0])})
    write(tmp_path / "other.parquet", {"image": cells(range(1)), "label": pa.array([0])})
    for name, message in (
        ("bad.parquet", "cannot be read.*expected a Parquet file"),
        ("none.parquet", "has no rows"),
        ("missing.parquet", "nothing matches"),
        ("{one,other}.parquet", "give files of one data set"),
        ("o{ne.parquet", "braces"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(f"parquet:{tmp_path}/{name}")


def test_a_group_is_decoded_once_and_memory_stays_flat_in_its_size(tmp_path: Path) -> None:
    """One group of 24 MB in pages of about 1 MB; noise, so that compression cannot help."""
    blobs = [np.random.default_rng(n).bytes(1 << 16) for n in range(384)]
    columns = {"img": pa.array(blobs, pa.binary()), "label": pa.array([0] * 384)}
    pq.write_table(pa.table(columns), tmp_path / "big.parquet", row_group_size=384, write_batch_size=8)
    del columns
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    held_by_arrow = []
    source = open_dataset(f"parquet:{tmp_path}/big.parquet")
    assert isinstance(source, ParquetImages)
    loads = []
    stream = source.column.cache.load

    def watched(group: int) -> Iterator[bytes | None]:
        loads.append(group)
        for content in stream(group):
            held_by_arrow.append(pa.total_allocated_bytes() - before)
            yield content

    source.column.cache.load = watched
    for index in (383, 0, 200, 199, 383):
        assert source.column.cache.row(0, index) == blobs[index]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loads == [0]
    assert peak < 8 << 20
    assert len(held_by_arrow) == 384
    assert max(held_by_arrow) < 10 << 20
