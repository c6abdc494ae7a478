"""Images with a mask each, for segmentation: class numbers per pixel, cut exactly as the image is."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitadel.data.images import decode
from vitadel.data.paths import matching_files
from vitadel.data.sources.columns import IMAGE_NAMES, pick_column
from vitadel.data.sources.folders import files_below
from vitadel.data.sources.generated import open_shapes
from vitadel.data.sources.row_group_cache import Spool
from vitadel.data.sources.shapes import CLASSES, Shapes
from vitadel.data.spec import DATA_KINDS, Request, parse_spec
from vitadel.data.splits import SPLIT_NAMES, pick_split
from vitadel.errors import UserError

__all__ = ["MASKED_KINDS", "VOID", "Cut", "Masked", "open_masked"]

VOID = 255
"""What pixels hold that are left out."""

MASKED_KINDS = ("shapes", "parquet", "folder")
_MASK_NAMES = ("mask", "masks", "annotation", "annotations", "segmentation", "seg", "label", "labels", "target")
_MASK_FOLDERS = ("masks", "annotations", "labels")
_RESAMPLING = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

Values = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Cut:
    """Make a picture cover `size`, (height, width), keeping its proportions, and cut at the centre.

    A picture that covers it exactly in one direction is only cut. Masks take the nearest pixel, so that no class is
    made up between two others.
    """

    size: tuple[int, int]
    interpolation: str = "bicubic"

    def image(self, picture: Image.Image) -> Tensor:
        """uint8, (3, height, width)."""
        resampling = _RESAMPLING.get(self.interpolation, Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(self._cut(picture, resampling), dtype=np.uint8)).permute(2, 0, 1).contiguous()

    def mask(self, values: Values) -> Tensor:
        """int64, (height, width)."""
        picture = Image.fromarray(values.astype(np.int32))
        return torch.from_numpy(np.array(self._cut(picture, Image.Resampling.NEAREST), dtype=np.int64))

    def _cut(self, picture: Image.Image, resampling: Image.Resampling) -> Image.Image:
        height, width = self.size
        scale = max(height / picture.height, width / picture.width)
        covering = (max(width, round(picture.width * scale)), max(height, round(picture.height * scale)))
        if covering != picture.size:
            picture = picture.resize(covering, resampling)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return picture.crop((left, top, left + width, top + height))


class _Pairs(Protocol):
    """Where images and masks come from."""

    def __len__(self) -> int: ...

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        """A picture, and the values of its mask as they are stored."""
        ...

    def name(self, index: int) -> str: ...


@dataclass(frozen=True, eq=False)
class Masked:
    """Images with masks of class numbers 0 to len(classes) - 1, and `VOID`.

    Stored values `void` are left out; with `from_one`, stored classes count from 1, and 0 is left out.
    """

    pairs: _Pairs = field(repr=False)
    classes: tuple[str, ...]
    void: tuple[int, ...] = ()
    from_one: bool = False

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs.name(index)

    def read(self, indices: Sequence[int] | Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Pixels in [0, 1], (n, 3, height, width), and masks, (n, height, width)."""
        pairs = [self._pair(int(index), cut) for index in indices]
        return torch.stack([image for image, _ in pairs]) / 255, torch.stack([mask for _, mask in pairs])

    def _pair(self, index: int, cut: Cut) -> tuple[Tensor, Tensor]:
        try:
            picture, stored = self.pairs.pair(index)
        except UserError:
            raise
        except Exception as fault:  # decoders meet hostile bytes and fail in many ways
            raise UserError(f"sample {index} ({self.name(index)}) cannot be read: {fault}. Replace it.") from fault
        if stored.shape != (picture.height, picture.width):
            raise UserError(
                f"sample {index} ({self.name(index)}): its image is {picture.height} x {picture.width} pixels and its "
                f"mask {stored.shape[0]} x {stored.shape[1]}; both must have one size. Take masks made for the images."
            )
        return cut.image(picture), cut.mask(self._classes_of(stored, index))

    def _classes_of(self, stored: Values, index: int) -> Values:
        left_out = np.isin(stored, [VOID, *self.void, *([0] if self.from_one else [])])
        values: Values = np.where(left_out, VOID, stored - int(self.from_one))
        strange = values[~left_out & ((values < 0) | (values >= len(self.classes)))]
        if len(strange):
            raise UserError(
                f"sample {index} ({self.name(index)}): its mask holds {int(strange[0]) + int(self.from_one)}; there "
                f"are {len(self.classes)} classes, numbered from {int(self.from_one)}. Tell the number of classes, or "
                "name the values of pixels to leave out (data.classes, data.void)."
            )
        return values


def open_masked(
    spec: str,
    *,
    root: str | Path | None = None,
    classes: int | None = None,
    void: Sequence[int] = (),
    from_one: bool = False,
) -> Masked:
    """Images and masks of a spec: shapes, `parquet:FILES(image=COLUMN,mask=COLUMN)`, or `folder:DIR`.

    A folder holds images/ and masks/ (or annotations/, labels/), with a sub-folder per split in both or above both;
    a mask has the path of its image but for the ending.
    """
    request = parse_spec(spec, root=Path("data" if root is None else root).expanduser(), split=None)
    if request.kind == "shapes":
        if classes not in (None, len(CLASSES) + 1) or void or from_one:
            raise UserError(
                f"shapes has {len(CLASSES) + 1} classes, the ground and ten shapes, and no pixels to leave out"
            )
        return Masked(_ShapePairs(open_shapes(request)), ("ground", *CLASSES))
    if request.kind not in MASKED_KINDS:
        known = "it has no masks" if request.kind in DATA_KINDS else "unknown data"
        raise UserError(f"'{spec}': {known}. Images with masks are shapes, parquet:FILES and folder:DIR")
    if classes is None:
        raise UserError(f"'{spec}': the number of classes of its masks must be told (data.classes)")
    pairs: _Pairs = _open_parquet(request) if request.kind == "parquet" else _open_folder(request)
    return Masked(pairs, tuple(map(str, range(classes))), tuple(void), from_one)


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


# Parquet


@dataclass(frozen=True, eq=False)
class _ParquetPairs:
    files: tuple[Path, ...]
    places: tuple[tuple[int, int], ...]  # (file, row group within it)
    first_rows: Values  # of each group, over all files
    rows: int
    images: Spool
    masks: Spool

    def __len__(self) -> int:
        return self.rows

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        content = self._content(self.images, index, "image")
        return decode(content), _decoded_mask(self._content(self.masks, index, "mask"))

    def name(self, index: int) -> str:
        file = self.places[self._group(index)][0]
        first = min(int(row) for (at, _), row in zip(self.places, self.first_rows, strict=True) if at == file)
        return f"{self.files[file].name} row {index - first}"

    def _group(self, index: int) -> int:
        return int(np.searchsorted(self.first_rows, index, side="right")) - 1

    def _content(self, spool: Spool, index: int, what: str) -> bytes:
        group = self._group(index)
        content = spool.row(group, index - int(self.first_rows[group]))
        if content is None:
            raise ValueError(f"it has no {what}")
        return content


def _open_parquet(request: Request) -> _ParquetPairs:
    chosen = request.chosen(image=str, mask=str)
    files = tuple(matching_files(request, ".parquet"))
    schemas, sizes, places = [], [], []
    for number, path in enumerate(files):
        try:
            with pq.ParquetFile(path) as parquet:
                schemas.append(parquet.schema_arrow)
                groups = range(parquet.metadata.num_row_groups)
                sizes += [parquet.metadata.row_group(group).num_rows for group in groups]
        except (OSError, pa.ArrowException) as fault:
            raise UserError(f"'{path}' cannot be read: {fault}; expected a Parquet file") from fault
        places += [(number, group) for group in groups]
    if not sum(sizes):
        raise UserError(f"'{files[0]}' has no rows (from {request.spec})")
    image, mask = _columns(schemas[0], request, chosen)
    for path, schema in zip(files, schemas, strict=True):
        if not {image, mask} <= set(schema.names):
            raise UserError(f"'{path}' lacks the columns '{image}' and '{mask}' of '{files[0]}'; give files of one set")
    counts = np.array(sizes, dtype=np.int64)
    first_rows: Values = np.cumsum(counts) - counts
    images, masks = (Spool(_cells(files, places, column)) for column in (image, mask))
    return _ParquetPairs(files, tuple(places), first_rows, int(counts.sum()), images, masks)


def _columns(schema: Any, request: Request, chosen: dict[str, str]) -> tuple[str, str]:
    where = f"'{request.argument}' (columns: {', '.join(f'{item.name} {item.type}' for item in schema)})"
    encoded = [item.name for item in schema if _holds_bytes(item.type)]
    if "mask" in chosen:
        pick_column("mask", encoded, _MASK_NAMES, chosen["mask"], where)
    others = [name for name in encoded if name != chosen.get("mask")]
    image = pick_column("image", others, IMAGE_NAMES, chosen.get("image"), where)
    rest = [name for name in encoded if name != image]
    if not rest:
        raise UserError(
            f"{where} has no masks: beside '{image}' no column holds encoded pictures. Take data with masks."
        )
    return image, pick_column("mask", rest, _MASK_NAMES, chosen.get("mask"), where)


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _cells(
    files: Sequence[Path], places: Sequence[tuple[int, int]], column: str
) -> Callable[[int], Iterator[bytes | None]]:
    """Streams a column of a row group; groups are numbered over all files."""

    def load(group: int) -> Iterator[bytes | None]:
        file, inner = places[group]
        with pq.ParquetFile(files[file], pre_buffer=False) as parquet:
            for batch in parquet.iter_batches(16, row_groups=[inner], columns=[column], use_threads=False):
                for cell in batch.column(0).to_pylist():
                    yield cell["bytes"] if isinstance(cell, dict) else cell

    return load


# Folders


@dataclass(frozen=True)
class _FolderPairs:
    images: Path
    masks: Path
    files: tuple[tuple[str, str], ...] = field(repr=False)  # of image and mask, below their folders

    def __len__(self) -> int:
        return len(self.files)

    def pair(self, index: int) -> tuple[Image.Image, Values]:
        image, mask = self.files[index]
        return decode((self.images / image).read_bytes()), _decoded_mask((self.masks / mask).read_bytes())

    def name(self, index: int) -> str:
        return self.files[index][0]


def _open_folder(request: Request) -> _FolderPairs:
    request.chosen()
    images, masks = _image_and_mask_folders(request, request.path("a folder with images/ and masks/"))
    mask_of = {str(PurePosixPath(path).with_suffix("")): path for path in files_below(masks)}
    files, alone = [], []
    for path in sorted(files_below(images)):
        mask = mask_of.get(str(PurePosixPath(path).with_suffix("")))
        alone += [path] if mask is None else []
        files += [] if mask is None else [(path, mask)]
    if alone:
        raise UserError(
            f"'{images}': {len(alone)} images have no mask in '{masks}', the first is '{alone[0]}'. A mask has its "
            "image's path but for the ending; add them, or take the images away."
        )
    if not files:
        raise UserError(f"'{images}' has no pictures (from {request.spec})")
    return _FolderPairs(images, masks, tuple(files))


def _image_and_mask_folders(request: Request, path: Path) -> tuple[Path, Path]:
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


def _decoded_mask(content: bytes) -> Values:
    """Class numbers of a picture with one channel; of a palette the numbers, not the colours."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            mode, values = picture.mode, np.array(picture)
    except UnidentifiedImageError:
        raise ValueError(f"its mask is no picture in a format that Pillow knows ({len(content)} bytes)") from None
    if values.ndim != 2 or mode == "F":
        raise UserError(
            f"a mask is a picture of colours (mode {mode}), not of class numbers; write it with one channel, the class "
            "of each pixel, as a PNG"
        )
    return values.astype(np.int64)
