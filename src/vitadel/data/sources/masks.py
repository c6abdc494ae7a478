"""Images with masks for segmentation: class numbers per pixel, resized and cropped like the image."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitadel.data.images import decode
from vitadel.data.labels import IMAGE_NAMES, pick_column
from vitadel.data.sources.folders import files_below
from vitadel.data.sources.parquet import EncodedColumn, ParquetFiles
from vitadel.data.sources.shapes import CLASSES, Shapes, open_shapes
from vitadel.data.spec import DATA_KINDS, SPLIT_NAMES, DataRequest, parse_spec, pick_split
from vitadel.errors import UserError

VOID = 255
"""The value of pixels to ignore."""

MASKED_KINDS = ("shapes", "parquet", "folder")
_MASK_NAMES = ("mask", "masks", "annotation", "annotations", "segmentation", "seg", "label", "labels", "target")
_MASK_FOLDERS = ("masks", "annotations", "labels")
_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

Values = np.ndarray[Any, np.dtype[np.int64]]


def resampling_of(interpolation: str) -> Image.Resampling:
    return _RESAMPLING.get(interpolation, Image.Resampling.BICUBIC)


class Cut(Protocol):
    """How image and mask get the size that a model takes."""

    def pair(self, image: Image.Image, values: Values, index: int) -> tuple[Tensor, Tensor]:
        """uint8, (3, height, width), and int64, (height, width), of the image with this number."""
        ...


@dataclass(frozen=True)
class ResizeCrop:
    """Resize an image to cover `size`, (height, width), keeping its aspect ratio, and crop the center.

    An image that covers it exactly in one direction is only cropped. Masks are resized by nearest neighbor, so that no
    class appears between two others.
    """

    size: tuple[int, int]
    interpolation: str = "bicubic"

    def pair(self, image: Image.Image, values: Values, index: int) -> tuple[Tensor, Tensor]:
        """Both; where the image is among others makes no difference here."""
        return self.image(image), self.mask(values)

    def image(self, image: Image.Image) -> Tensor:
        """uint8, (3, height, width)."""
        resampling = resampling_of(self.interpolation)
        return torch.from_numpy(np.array(self._crop(image, resampling), dtype=np.uint8)).permute(2, 0, 1).contiguous()

    def mask(self, values: Values) -> Tensor:
        """int64, (height, width)."""
        image = Image.fromarray(values.astype(np.int32))
        return torch.from_numpy(np.array(self._crop(image, Image.Resampling.NEAREST), dtype=np.int64))

    def _crop(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        height, width = self.size
        scale = max(height / image.height, width / image.width)
        covering = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        if covering != image.size:
            image = image.resize(covering, resampling)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


class _Pairs(Protocol):
    """Where images and masks come from."""

    def __len__(self) -> int: ...

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        """An image, and the stored values of its mask."""
        ...

    def name(self, index: int) -> str: ...


@dataclass(frozen=True, eq=False)
class MaskedImages:
    """Images with masks of class numbers 0 to len(classes) - 1, and `VOID`.

    Stored values in `void` are ignored; with `from_one`, stored classes count from 1 and 0 is ignored.
    """

    pairs: _Pairs = field(repr=False)
    classes: tuple[str, ...]
    void: tuple[int, ...] = ()
    from_one: bool = False

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs.name(index)

    def read(self, indices: Sequence[int] | Tensor, crop: Cut) -> tuple[Tensor, Tensor]:
        """Pixels in [0, 1], (n, 3, height, width), and masks, (n, height, width)."""
        pairs = [crop.pair(*self.pair(int(index)), int(index)) for index in indices]
        return torch.stack([image for image, _ in pairs]) / 255, torch.stack([mask for _, mask in pairs])

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        """A whole image, and its mask."""
        try:
            image, stored = self.pairs.pair(index)
        except UserError:
            raise
        except Exception as fault:  # decoders fail on damaged bytes in many ways
            raise UserError(f"sample {index} ({self.name(index)}) cannot be read: {fault}. Replace it.") from fault
        if stored.shape != (image.height, image.width):
            raise UserError(
                f"sample {index} ({self.name(index)}): its image is {image.height} x {image.width} pixels and its "
                f"mask {stored.shape[0]} x {stored.shape[1]}; both must have the same size. Use masks of these images."
            )
        return image, self._classes_of(stored, index)

    def _classes_of(self, stored: Values, index: int) -> Values:
        ignored = np.isin(stored, [VOID, *self.void, *([0] if self.from_one else [])])
        values: Values = np.where(ignored, VOID, stored - int(self.from_one))
        strange = values[~ignored & ((values < 0) | (values >= len(self.classes)))]
        if len(strange):
            raise UserError(
                f"sample {index} ({self.name(index)}): its mask holds {int(strange[0]) + int(self.from_one)}; there "
                f"are {len(self.classes)} classes, numbered from {int(self.from_one)}. Correct the number of classes "
                "(data.classes), or list the values to ignore (data.void)."
            )
        return values


def open_masked(
    spec: str,
    *,
    root: str | Path | None = None,
    classes: int | None = None,
    void: Sequence[int] = (),
    from_one: bool = False,
) -> MaskedImages:
    """Open images and masks of a spec: shapes, `parquet:FILES(image=COLUMN,mask=COLUMN)`, or `folder:DIR`.

    A folder holds images/ and masks/ (or annotations/, labels/), with a sub-folder per split in both or above both;
    a mask has the path of its image but for the ending.
    """
    request = parse_spec(spec, root=Path(os.path.expanduser("data" if root is None else root)), split=None)
    if request.kind == "shapes":
        if classes not in (None, len(CLASSES) + 1) or void or from_one:
            raise UserError(
                f"shapes has {len(CLASSES) + 1} classes, the ground and ten shapes, and no pixels to ignore"
            )
        return MaskedImages(_ShapePairs(open_shapes(request)), ("ground", *CLASSES))
    if request.kind not in MASKED_KINDS:
        known = "it has no masks" if request.kind in DATA_KINDS else "unknown data"
        raise UserError(f"'{spec}': {known}. Images with masks are shapes, parquet:FILES and folder:DIR")
    if classes is None:
        raise UserError(f"'{spec}': give the number of classes of its masks (data.classes)")
    pairs: _Pairs = _open_parquet(request) if request.kind == "parquet" else _open_folder(request)
    return MaskedImages(pairs, tuple(map(str, range(classes))), tuple(void), from_one)


@dataclass(frozen=True)
class _ShapePairs:
    shapes: Shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        pixels, _, masks = self.shapes.render([index])
        return Image.fromarray(pixels[0].permute(1, 2, 0).contiguous().numpy()), masks[0].numpy()

    def name(self, index: int) -> str:
        return self.shapes.name(index)


@dataclass(frozen=True, eq=False)
class _ParquetPairs:
    files: ParquetFiles
    images: EncodedColumn
    masks: EncodedColumn

    def __len__(self) -> int:
        return self.files.rows

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        image, mask = self.images.cell(index), self.masks.cell(index)
        if image is None or mask is None:
            raise ValueError(f"it has no {'image' if image is None else 'mask'}")
        return decode(image), _decode_mask(mask)

    def name(self, index: int) -> str:
        return self.files.row_name(index)


def _open_parquet(request: DataRequest) -> _ParquetPairs:
    settings = request.read_settings(image=str, mask=str)
    files = ParquetFiles.open(request)
    if not files.rows:
        raise UserError(f"'{files.paths[0]}' has no rows (from {request.spec})")
    where = f"'{request.argument}' (columns: {files.columns})"
    encoded = files.encoded
    if "mask" in settings:
        pick_column("mask", encoded, _MASK_NAMES, settings["mask"], where)
    others = [name for name in encoded if name != settings.get("mask")]
    image = pick_column("image", others, IMAGE_NAMES, settings.get("image"), where)
    rest = [name for name in encoded if name != image]
    if not rest:
        raise UserError(f"{where} has no masks: only '{image}' holds encoded images. Use data with masks.")
    mask = pick_column("mask", rest, _MASK_NAMES, settings.get("mask"), where)
    files.check_columns(image, mask)
    return _ParquetPairs(files, EncodedColumn.of(files, image), EncodedColumn.of(files, mask))


@dataclass(frozen=True)
class _FolderPairs:
    images: Path
    masks: Path
    files: tuple[tuple[str, str], ...] = field(repr=False)  # image and mask, below their folders

    def __len__(self) -> int:
        return len(self.files)

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        image, mask = self.files[index]
        return decode((self.images / image).read_bytes()), _decode_mask((self.masks / mask).read_bytes())

    def name(self, index: int) -> str:
        return self.files[index][0]


def _open_folder(request: DataRequest) -> _FolderPairs:
    request.read_settings()
    images, masks = _image_and_mask_folders(request, request.path("a folder with images/ and masks/"))
    mask_of = {str(PurePosixPath(path).with_suffix("")): path for path in files_below(masks)}
    files, alone = [], []
    for path in sorted(files_below(images)):
        mask = mask_of.get(str(PurePosixPath(path).with_suffix("")))
        alone += [path] if mask is None else []
        files += [] if mask is None else [(path, mask)]
    if alone:
        raise UserError(
            f"'{images}': {len(alone)} images have no mask in '{masks}', the first is '{alone[0]}'. A mask has the "
            "path of its image except for the ending; add the masks, or remove the images."
        )
    if not files:
        raise UserError(f"'{images}' has no images (from {request.spec})")
    return _FolderPairs(images, masks, tuple(files))


def _image_and_mask_folders(request: DataRequest, path: Path) -> tuple[Path, Path]:
    above = [name for name in SPLIT_NAMES if (path / name / "images").is_dir()]
    if above:
        path = path / pick_split(above, request.split, f"'{path}'")
    masks = next((path / name for name in _MASK_FOLDERS if (path / name).is_dir()), None)
    images = path / "images"
    if masks is None or not images.is_dir():
        raise UserError(
            f"'{path}' has no {'images/' if masks else 'masks/'}; segmentation takes a folder with images/ and masks/ "
            f"(or {', '.join(f'{name}/' for name in _MASK_FOLDERS[1:])}), each with a sub-folder per split, if any"
        )
    below = [name for name in SPLIT_NAMES if (images / name).is_dir() and (masks / name).is_dir()]
    if below:
        split = pick_split(below, request.split, f"'{images}'")
        return images / split, masks / split
    if request.split is not None and not above:
        raise UserError(
            f"'{path}' has no split '{request.split}' in images/ and {masks.name}/; drop the @{request.split}"
        )
    return images, masks


def _decode_mask(content: bytes) -> Values:
    """Class numbers of an image with one channel; for a palette the indices, not the colors."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            mode, values = image.mode, np.array(image)
    except UnidentifiedImageError:
        raise ValueError(f"its mask is not an image in a format that Pillow knows ({len(content)} bytes)") from None
    if values.ndim != 2 or mode == "F":
        raise UserError(
            f"a mask is a color image (mode {mode}) instead of class numbers; save it as a PNG with one channel, the "
            "class of each pixel"
        )
    return values.astype(np.int64)
