"""Images with masks: both are cropped alike, values follow the settings, and errors name the sample."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitadel.data.sources.masks import VOID, ResizeCrop, open_masked
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError


def encoded(values, form="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(values, dtype=np.uint8)).save(buffer, form)
    return buffer.getvalue()


def striped(number, height=6, width=8):
    """An image whose red is the row and whose green is the column, and a mask of the row's number modulo 3."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows * 10, columns * 10, np.full_like(rows, number)], axis=2)
    return image, rows % 3


def write_parquet(path, pairs, names=("img", "label"), struct=True, row_group_size=2):
    def cells(pictures):
        return [{"bytes": encoded(each), "path": None} if struct else encoded(each) for each in pictures]

    columns = dict(zip(names, map(cells, zip(*pairs, strict=True)), strict=True))
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def test_shapes_come_with_their_own_masks():
    masked, shapes = open_masked("shapes(size=16)@val"), Shapes("val", 16)
    pixels, masks = masked.read([3, 17], ResizeCrop((16, 16)))
    expected, labels, truth = shapes.render([3, 17])
    assert torch.equal(pixels, expected / 255)
    assert torch.equal(masks, truth)
    assert (len(masked), masked.classes[0], masked.classes[1 + labels[0]]) == (2000, "ground", "star")


@pytest.mark.parametrize("struct", [True, False])
def test_rows_of_parquet_are_cut_alike(tmp_path, struct):
    file = write_parquet(tmp_path / "test.parquet", [striped(n) for n in range(5)], struct=struct)
    masked = open_masked(f"parquet:{file}", classes=3)
    pixels, masks = masked.read([4, 0], ResizeCrop((4, 8)))
    levels = (pixels * 255).round().long()
    assert levels[:, 2, 0, 0].tolist() == [4, 0]
    assert levels[0, 0, :, 0].tolist() == [10, 20, 30, 40]  # of six rows one is cut off on either side
    assert levels[0, 1, 0].tolist() == [10 * column for column in range(8)]
    assert torch.equal(masks, (levels[:, 0] // 10) % 3)
    assert (len(masked), masked.name(3)) == (5, "test.parquet row 3")


def test_a_mask_takes_the_nearest_pixel_and_no_value_between():
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    image[:, 2:] = 200
    cut = ResizeCrop((8, 12))
    mask = cut.mask(np.where(image[:, :, 0] > 0, 7, 1))
    picture = cut.image(Image.fromarray(image))
    assert (picture.shape, mask.shape) == ((3, 8, 12), (8, 12))
    assert mask.unique().tolist() == [1, 7]
    assert torch.equal(mask, torch.tensor([1] * 6 + [7] * 6).expand(8, 12))
    assert picture[:, :, :3].max() < 20
    assert picture[:, :, 9:].min() > 180


def test_void_values_and_classes_from_one(tmp_path):
    image = np.zeros((1, 4, 3))
    file = write_parquet(tmp_path / "a.parquet", [(image, [[0, 1, 2, 255]])])
    cut = ResizeCrop((1, 4))
    assert open_masked(f"parquet:{file}", classes=3).read([0], cut)[1].tolist() == [[[0, 1, 2, VOID]]]
    assert open_masked(f"parquet:{file}", classes=2, void=[2]).read([0], cut)[1].tolist() == [[[0, 1, VOID, VOID]]]
    assert open_masked(f"parquet:{file}", classes=2, from_one=True).read([0], cut)[1].tolist() == [[[VOID, 0, 1, VOID]]]
    with pytest.raises(UserError, match="its mask holds 2; there are 2 classes"):
        open_masked(f"parquet:{file}", classes=2).read([0], cut)


def test_columns_are_found_or_named(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", [striped(0)], names=("scene", "truth"))
    with pytest.raises(UserError, match="several columns could be the image"):
        open_masked(f"parquet:{file}", classes=3)
    for settings in ("image=scene,mask=truth", "mask=truth", "image=scene"):
        assert open_masked(f"parquet:{file}({settings})", classes=3).read([0], ResizeCrop((6, 8)))[1][0, 4, 0] == 1
    with pytest.raises(UserError, match="did you mean truth"):
        open_masked(f"parquet:{file}(mask=truht)", classes=3)


def test_data_without_masks_is_reported(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"img": [encoded(striped(0)[0])], "label": [3]}), file)
    with pytest.raises(UserError, match="has no masks"):
        open_masked(f"parquet:{file}", classes=3)
    with pytest.raises(UserError, match="has no masks"):
        open_masked("cifar10@train", classes=3)
    with pytest.raises(UserError, match="unknown data"):
        open_masked("shappes", classes=3)
    with pytest.raises(UserError, match="number of classes"):
        open_masked(f"parquet:{file}")
    with pytest.raises(UserError, match="11 classes"):
        open_masked("shapes", classes=3)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((6, 7)), "6 x 8 pixels and its mask 6 x 7"),
        (np.zeros((6, 8, 3)), "a color image"),
    ],
)
def test_masks_that_do_not_fit_are_reported_with_the_sample(tmp_path, mask, message):
    file = write_parquet(tmp_path / "a.parquet", [(striped(0)[0], mask)])
    with pytest.raises(UserError, match=message):
        open_masked(f"parquet:{file}", classes=3).read([0], ResizeCrop((6, 8)))


def test_a_broken_mask_is_reported_with_the_sample(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"img": [encoded(striped(0)[0])], "mask": [b"nothing"]}), file)
    with pytest.raises(UserError, match=r"a\.parquet row 0.*cannot be read"):
        open_masked(f"parquet:{file}", classes=3).read([0], ResizeCrop((6, 8)))


@pytest.mark.parametrize("layout", ["{split}/images", "images/{split}"])
def test_folders_pair_images_and_masks_by_name(tmp_path, layout):
    for split, numbers in (("train", (1, 2)), ("val", (7,))):
        for number in numbers:
            image, mask = striped(number)
            for kind, values, ending in (("images", image, "png"), ("annotations", mask, "png")):
                folder = tmp_path / layout.format(split=split).replace("images", kind) / "town"
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.asarray(values, dtype=np.uint8)).save(folder / f"{number}.{ending}")
    train, val = (open_masked(f"folder:{tmp_path}@{split}", classes=3) for split in ("train", "val"))
    assert (len(train), len(val), val.name(0)) == (2, 1, "town/7.png")
    pixels, masks = train.read([1], ResizeCrop((6, 8)))
    assert round(float(pixels[0, 2, 0, 0] * 255)) == 2
    assert masks[0, :, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_palettes_hold_classes_and_missing_masks_are_reported(tmp_path):
    (tmp_path / "images").mkdir()
    image, mask = striped(0)
    Image.fromarray(image.astype(np.uint8)).save(tmp_path / "images" / "a.png")
    with pytest.raises(UserError, match="has no masks/"):
        open_masked(f"folder:{tmp_path}", classes=3)
    (tmp_path / "masks").mkdir()
    with pytest.raises(UserError, match="1 images have no mask"):
        open_masked(f"folder:{tmp_path}", classes=3)
    colored = Image.fromarray(mask.astype(np.uint8))
    colored.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    colored.save(tmp_path / "masks" / "a.png")
    assert open_masked(f"folder:{tmp_path}", classes=3).read([0], ResizeCrop((6, 8)))[1][0, :, 0].tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]
    with pytest.raises(UserError, match="no split 'train'"):
        open_masked(f"folder:{tmp_path}@train", classes=3)
