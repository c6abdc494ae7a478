"""CIFAR-10-C and CIFAR-100-C (Hendrycks & Dietterich 2019, arXiv:1903.12261), from the benchmark's own .npy files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from PIL.Image import Image
from torch import Tensor

from vitadel.data.sources.arrays import ArrayRows, image_rows, label_tensor, rows_of_npy, small_array
from vitadel.data.spec import DataRequest
from vitadel.errors import UserError, nearest_names

# The corrupted sets come without class names.
_TEN = "airplane automobile bird cat deer dog frog horse ship truck"

_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10_CLASSES = tuple(_TEN.split())
CIFAR100_CLASSES = tuple(_HUNDRED.split())

SEVERITIES = 5  # each file holds all severities in order, with equal sizes
_SETS = {"cifar10-c": ("CIFAR-10-C", CIFAR10_CLASSES), "cifar100-c": ("CIFAR-100-C", CIFAR100_CLASSES)}


@dataclass(frozen=True, eq=False)
class CorruptedArrays:
    """Corruptions by name, severities 1 to 5 within each; `parts` maps 'fog/3' to its range of samples."""

    root: Path
    classes: tuple[str, ...] = field(repr=False)
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    pixels: tuple[ArrayRows, ...] = field(repr=False)
    clean_labels: Tensor = field(repr=False)  # of one file

    @property
    def _share(self) -> int:
        return len(self.clean_labels) // SEVERITIES

    @property
    def parts(self) -> Mapping[str, range]:
        names = [f"{corruption}/{severity}" for corruption in self.corruptions for severity in self.severities]
        return {name: range(i * self._share, (i + 1) * self._share) for i, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.corruptions) * len(self.severities) * self._share

    def labels(self) -> Tensor:
        shares = self.clean_labels.view(SEVERITIES, self._share)[[severity - 1 for severity in self.severities]]
        return shares.flatten().repeat(len(self.corruptions))

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        images: list[Image | Exception] = []
        for corruption, places in groupby(map(self._place, indices), key=itemgetter(0)):
            images += image_rows(self.pixels[corruption], [row for _, row in places])
        return images

    def name(self, index: int) -> str:
        corruption, row = self._place(index)
        severity, within = divmod(row, self._share)
        return f"{self.corruptions[corruption]}.npy severity {severity + 1} row {within}"

    def _place(self, index: int) -> tuple[int, int]:
        """(number of the corruption, row in its file)."""
        part, within = divmod(index, self._share)
        corruption, severity = divmod(part, len(self.severities))
        return corruption, (self.severities[severity] - 1) * self._share + within


def open_cifar_c(request: DataRequest) -> CorruptedArrays:
    """Open `cifar10-c` (all), `cifar10-c/fog` (one corruption) or `cifar10-c/fog/3` (one severity)."""
    request.read_settings()
    request.refuse_split()
    folder_name, classes = _SETS[request.kind]
    root = request.root / folder_name
    if not (root / "labels.npy").is_file():
        raise UserError(
            f"{request.kind}: '{root / 'labels.npy'}' does not exist; unpack the benchmark's {folder_name}.tar into "
            f"'{request.root}', or give the parent of the folder {folder_name} as --data-root"
        )
    available = sorted(path.stem for path in root.glob("*.npy") if path.stem != "labels")
    corruptions, severities = _part(request, available, root)
    labels = small_array(root / "labels.npy")
    pixels = tuple(rows_of_npy(root / f"{corruption}.npy") for corruption in corruptions)
    for corruption, rows in zip(corruptions, pixels, strict=True):
        if rows.shape != (len(labels), 32, 32, 3) or rows.dtype != "uint8" or len(labels) % SEVERITIES:
            raise UserError(
                f"'{root / corruption}.npy' has shape {rows.shape} and type {rows.dtype}; expected "
                f"({len(labels)}, 32, 32, 3) and uint8, with {SEVERITIES} severities of equal size"
            )
    targets = label_tensor(labels, len(labels), f"'{root / 'labels.npy'}'")
    return CorruptedArrays(root, classes, corruptions, severities, pixels, targets)


def _part(request: DataRequest, available: list[str], root: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    corruption, _, severity = request.argument.partition("/")
    if not available:
        raise UserError(f"'{root}' holds no corruption; expected files such as gaussian_noise.npy")
    if corruption and corruption not in available:
        raise UserError(
            f"no corruption '{corruption}' in '{root}'; there are: {', '.join(available)}"
            f"{nearest_names(corruption, available)}"
        )
    levels = [str(level) for level in range(1, SEVERITIES + 1)]
    if severity and severity not in levels:
        raise UserError(f"'{request.spec}': severity '{severity}' must be one of {', '.join(levels)}")
    corruptions = (corruption,) if corruption else tuple(available)
    return corruptions, (int(severity),) if severity else tuple(range(1, SEVERITIES + 1))
