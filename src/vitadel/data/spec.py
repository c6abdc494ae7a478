"""The language of `--data`: `kind`, `kind/part` or `kind:path`, then settings in brackets, then `@split`.

`open_dataset` finds the module in `sources/` by the kind's row in `DATA_KINDS` and imports it then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import read_quantity
from vitadel.runtime.safe_reading import check_regular_file
from vitadel.types import Source

_SPLIT = re.compile(r"(.+)@([A-Za-z]\w*)")
_BRACKETS = re.compile(r"(.+?)\(([^()]*=[^()]*)\)")  # with an equals sign, so that a folder "photos (2)" stays a path
_VALIDATION = ("val", "validation", "valid", "dev")
SPLIT_NAMES = ("test", *_VALIDATION, "train", "trainval")
"""Names by which folders and files are recognized as splits."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class DataKind:
    """One row of `vitadel list data`."""

    form: str
    about: str
    opener: str  # 'module:function' below `sources`, imported when it is needed


_TORCHVISION = "torchvision_sets:open_torchvision"
_CIFAR_C, _IMAGENET = "cifar_c:open_cifar_c", "imagenet:open_imagenet"
DATA_KINDS: Mapping[str, DataKind] = {
    "shapes": DataKind("shapes", "ten generated shapes, built in: shapes(size=64,texture=0)", "shapes:open_shapes"),
    "cifar10": DataKind("cifar10", "CIFAR-10, 32 px, 10 classes, below --data-root", _TORCHVISION),
    "cifar100": DataKind("cifar100", "CIFAR-100, 32 px, 100 classes, below --data-root", _TORCHVISION),
    "mnist": DataKind("mnist", "MNIST, 28 px, 10 digits", _TORCHVISION),
    "fashion-mnist": DataKind("fashion-mnist", "Fashion-MNIST, 28 px, 10 classes", _TORCHVISION),
    "svhn": DataKind("svhn", "Street View House Numbers, 32 px, 10 digits", _TORCHVISION),
    "stl10": DataKind("stl10", "STL-10, 96 px, 10 classes", _TORCHVISION),
    "flowers102": DataKind("flowers102", "Oxford 102 Flowers", _TORCHVISION),
    "oxford-pets": DataKind("oxford-pets", "Oxford-IIIT Pets, 37 breeds", _TORCHVISION),
    "caltech101": DataKind(
        "caltech101", "Caltech-101, 102 classes, 30 images of each for training", "caltech101:open_caltech101"
    ),
    "food101": DataKind("food101", "Food-101", _TORCHVISION),
    "dtd": DataKind("dtd", "Describable Textures, 47 classes", _TORCHVISION),
    "fgvc-aircraft": DataKind("fgvc-aircraft", "FGVC Aircraft, 100 variants", _TORCHVISION),
    "gtsrb": DataKind("gtsrb", "German traffic signs, 43 classes", _TORCHVISION),
    "cifar10-c": DataKind("cifar10-c[/CORRUPTION[/SEVERITY]]", "CIFAR-10-C below --data-root", _CIFAR_C),
    "cifar100-c": DataKind("cifar100-c[/CORRUPTION[/SEVERITY]]", "CIFAR-100-C below --data-root", _CIFAR_C),
    "folder": DataKind("folder:DIR", "images in one sub-folder per class", "folders:open_folder"),
    "parquet": DataKind(
        "parquet:FILE-OR-GLOB", "Parquet of encoded images, Hugging Face layout", "parquet:open_parquet"
    ),
    "hf": DataKind("hf:ORG/NAME", "a data set of the Hugging Face Hub, or a saved folder", "hf:open_hf"),
    "shards": DataKind("shards:PATTERN", "webdataset tar files: train-{000..127}.tar", "shards:open_shards"),
    "npz": DataKind("npz:FILE", "NumPy archive of images and labels", "npz:open_npz"),
    "imagenet": DataKind("imagenet:DIR", "ImageNet-1k, folders of WordNet ids: imagenet:DIR(list=FILE)", _IMAGENET),
    "imagenet-a": DataKind("imagenet-a:DIR", "ImageNet-A, natural adversarial examples", _IMAGENET),
    "imagenet-r": DataKind("imagenet-r:DIR", "ImageNet-R, renditions", _IMAGENET),
    "imagenet-c": DataKind("imagenet-c:DIR", "ImageNet-C, corruption/severity/wnid", "imagenet:open_imagenet_c"),
    "imagenet-p": DataKind("imagenet-p:DIR", "ImageNet-P, videos, every frame a sample", "videos:open_imagenet_p"),
}


def known_specs() -> list[tuple[str, str]]:
    """The forms that `--data` accepts: (form, one-line description)."""
    return [(kind.form, kind.about) for kind in DATA_KINDS.values()]


def open_dataset(
    spec: str, *, root: str | Path | None = None, split: str | None = None, skip_bad: bool | None = None
) -> Source:
    """Open the source of a data spec; `root` (default ./data) holds the sets that have no path of their own.

    Without a split, in the spec or here, the test split is opened. With `skip_bad`, empty classes and broken files are
    skipped where that is possible; `skipped(source)` lists them.
    """
    folder = Path(os.path.expanduser("data" if root is None else root))
    request = parse_spec(spec, root=folder, split=split, skip_bad=skip_bad)
    kind = DATA_KINDS.get(request.kind)
    if kind is None or (":" in kind.form and ":" not in spec and request.argument):
        raise UserError(_unknown(request))
    if ":" in spec and ":" not in kind.form:
        raise UserError(f"'{spec}': {request.kind} takes no path; write {kind.form}, and --data-root DIR if need be")
    return cast(Source, _open(request))


def _open(request: DataRequest) -> Any:
    """Import the module of the source and let it open the request, after a copy of what is in object storage."""
    if "://" in request.argument:
        from vitadel.data.object_storage import local_copy

        request = replace(request, argument=local_copy(request.argument, request.root))
    module, _, function = DATA_KINDS[request.kind].opener.partition(":")
    return getattr(import_module(f"vitadel.data.sources.{module}"), function)(request)


def _unknown(request: DataRequest) -> str:
    path = Path(os.path.expanduser(request.spec.rpartition("@")[0] or request.spec))
    if request.spec.strip() and path.exists():
        kind = "folder" if path.is_dir() else _KINDS_OF_FILES.get(path.suffix, "folder")
        return f"'{request.spec}' is a path without a kind of data; did you mean {kind}:{request.spec}?"
    forms = ", ".join(kind.form for kind in DATA_KINDS.values())
    return f"unknown data '{request.spec}'{nearest_names(request.kind, DATA_KINDS) or '.'} Known: {forms}"


_KINDS_OF_FILES = {".parquet": "parquet", ".npz": "npz", ".tar": "shards"}


def with_kind(spec: str) -> str:
    """The spec, with its kind of data in front if it is only a path: `photos` is `folder:photos`."""
    text, at, split = spec.rpartition("@")
    path = Path(os.path.expanduser((text or spec) if at and split.isidentifier() else spec))
    kind = re.split(r"[:/(@]", spec, maxsplit=1)[0].strip().lower()
    if kind in DATA_KINDS or not spec.strip() or not path.exists():
        return spec
    if path.is_dir():
        return f"{'parquet' if any(path.glob('*.parquet')) else 'folder'}:{spec}"
    return f"{_KINDS_OF_FILES[path.suffix]}:{spec}" if path.suffix in _KINDS_OF_FILES else spec


def whole_number(text: str) -> int:
    value = read_quantity(text)
    if value != int(value):
        raise UserError(f"'{text}' is not a whole number")
    return int(value)


@dataclass(frozen=True)
class DataRequest:
    """A parsed data spec, and the flags that go with it; `spec` is the text as it was written."""

    spec: str
    kind: str
    argument: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    root: Path = Path("data")
    skip_bad: bool | None = None  # None: the caller has no such flag, so messages do not advise it

    def path(self, expected: str) -> Path:
        """The argument as a path that exists."""
        if not self.argument:
            raise UserError(f"'{self.spec}' names no path; write {self.kind}:PATH, where PATH is {expected}")
        path = Path(os.path.expanduser(self.argument))
        if not path.exists():
            raise UserError(f"'{path}' does not exist (from {self.spec}); expected {expected}")
        if not path.is_dir():
            check_regular_file(path, "data file")
        return path

    def read_settings(self, **known: Callable[[str], Value]) -> dict[str, Value]:
        """The settings in brackets, each read by the function given for its name; unknown names are errors."""
        values = {}
        for name, text in self.settings.items():
            if name not in known:
                allowed = f"it takes {', '.join(known)}" if known else "it takes none"
                raise UserError(f"{self.kind} has no setting '{name}'; {allowed}{nearest_names(name, known)}")
            try:
                values[name] = known[name](text)
            except UserError as error:
                raise UserError(f"{self.kind}({name}={text}): {error}") from None
        return values

    def refuse_split(self) -> None:
        """For kinds that only have test images."""
        if self.split not in (None, "test"):
            raise UserError(f"{self.kind} has no split '{self.split}'; it is for testing only: drop the @{self.split}")


def parse_spec(spec: str, *, root: Path, split: str | None, skip_bad: bool | None = None) -> DataRequest:
    """Parse a data spec; the kind may be unknown."""
    text = spec.strip()
    suffix: str | None = None
    # A path may contain an @ or brackets: a text that exists as a path is a path.
    if (found := _SPLIT.fullmatch(text)) and not _names_a_path(text):
        text, suffix = found.groups()
    if suffix and split and suffix != split:
        raise UserError(f"'{spec}' says @{suffix}, but split '{split}' was given as well; give one of them")
    settings: dict[str, str] = {}
    if (found := _BRACKETS.fullmatch(text)) and not _names_a_path(text):
        text, inner = found.groups()
        settings = _parse_settings(inner, spec)
    kind, _, argument = text.partition(":" if ":" in text else "/")
    return DataRequest(
        spec=spec,
        kind=kind.strip().lower(),
        argument=argument.strip(),
        settings=settings,
        split=suffix or split,
        root=root,
        skip_bad=skip_bad,
    )


def _names_a_path(text: str) -> bool:
    path = text.partition(":")[2]
    return bool(path) and Path(os.path.expanduser(path)).exists()


def _parse_settings(inner: str, spec: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for item in inner.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise UserError(f"'{item.strip()}' in '{spec}' is not a setting; write name=value, separated by commas")
        if name in settings:
            raise UserError(f"'{spec}' sets '{name}' twice")
        settings[name] = value
    return settings


def pick_split(available: Iterable[str], wanted: str | None, where: str) -> str:
    """Choose one of `available`. By default test, else validation, never train, which would mislead an audit."""
    names = list(available)
    if wanted is None:
        choices: tuple[str, ...] = ("test", *_VALIDATION)
    else:
        choices = (wanted, *_VALIDATION) if wanted in _VALIDATION else (wanted,)
    for choice in choices:
        if choice in names:
            return choice
    listed = ", ".join(names)
    if wanted is None:
        raise UserError(
            f"{where} has no split to test on; it has: {listed}. Pick one, e.g. with the suffix @{names[0]}"
        )
    raise UserError(f"{where} has no split '{wanted}'; it has: {listed}")


_USUAL = ("test", "val", "train", "trainval")
_IN_FOLDERS = ("folder", "imagenet")  # a split of these is a sub-folder


def same_images(one: DataRequest, other: DataRequest) -> bool:
    """Compare kind, path and split without reading data; a spec without a split means the test split.

    Settings such as columns or a list of files select the same images, or some of them. Only different arrays of one
    file and different configurations are different images.
    """
    if one.kind != "shapes":
        first, second = (request.settings.get("images") for request in (one, other))
        if None not in (first, second) and first != second:
            return False
        if one.settings.get("config") != other.settings.get("config"):
            return False
    return identity(one) == identity(other)


def identity(request: DataRequest) -> object:
    """What identifies the images, apart from settings; a `UserError` if settings of generated images are wrong."""
    if request.kind == "shapes":
        shapes = _open(request)  # generated: opening costs nothing and fills in the defaults
        return request.kind, shapes.seed, shapes.split  # settings make variants of the same images
    if request.kind in _IN_FOLDERS:
        return request.kind, _folder(request)
    path = os.path.realpath(Path(os.path.expanduser(request.argument))) if request.argument else ""
    return request.kind, path, _split(request, _USUAL)


def _folder(request: DataRequest) -> str:
    """The folder of the images; a folder that does not exist is assumed to have the usual sub-folders."""
    path = Path(os.path.expanduser(request.argument))
    found = [name for name in SPLIT_NAMES if (path / name).is_dir()]
    if path.is_dir() and not found:
        return os.path.realpath(path)
    return os.path.realpath(path / _split(request, found or _USUAL))


def _split(request: DataRequest, available: list[str] | tuple[str, ...]) -> str:
    if request.kind == "imagenet" and request.split is None:  # its own test split has no labels
        available = [name for name in available if name != "test"] or available
    try:
        return pick_split(available, request.split, request.spec)
    except UserError:  # reported when the data is opened
        return request.split or ""
