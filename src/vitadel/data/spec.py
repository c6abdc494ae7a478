"""The language of `--data`: `kind`, `kind/part` or `kind:path`, then settings in brackets, then `@split`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import read_quantity

__all__ = ["DATA_KINDS", "Kind", "Request", "known_specs", "parse_spec", "whole_number"]

_SPLIT = re.compile(r"(.+)@([A-Za-z]\w*)")
_BRACKETS = re.compile(r"(.+?)\(([^()]*=[^()]*)\)")  # with an equals sign, so that a folder "photos (2)" stays a path

Value = TypeVar("Value")


@dataclass(frozen=True)
class Kind:
    """One row of `vitadel list data`."""

    form: str
    about: str
    opener: str  # 'module:function', imported only when asked for


def _torchvision(name: str, about: str) -> Kind:
    return Kind(name, about, "torchvision_sets:open_torchvision")


DATA_KINDS: Mapping[str, Kind] = {
    "shapes": Kind("shapes", "ten generated shapes, built in: shapes(size=64,texture=0)", "generated:open_shapes"),
    "cifar10": _torchvision("cifar10", "CIFAR-10, 32 px, 10 classes, below --data-root"),
    "cifar100": _torchvision("cifar100", "CIFAR-100, 32 px, 100 classes, below --data-root"),
    "mnist": _torchvision("mnist", "MNIST, 28 px, 10 digits"),
    "fashion-mnist": _torchvision("fashion-mnist", "Fashion-MNIST, 28 px, 10 classes"),
    "svhn": _torchvision("svhn", "Street View House Numbers, 32 px, 10 digits"),
    "stl10": _torchvision("stl10", "STL-10, 96 px, 10 classes"),
    "flowers102": _torchvision("flowers102", "Oxford 102 Flowers"),
    "oxford-pets": _torchvision("oxford-pets", "Oxford-IIIT Pets, 37 breeds"),
    "food101": _torchvision("food101", "Food-101"),
    "dtd": _torchvision("dtd", "Describable Textures, 47 classes"),
    "fgvc-aircraft": _torchvision("fgvc-aircraft", "FGVC Aircraft, 100 variants"),
    "gtsrb": _torchvision("gtsrb", "German traffic signs, 43 classes"),
    "cifar10-c": Kind("cifar10-c[/CORRUPTION[/SEVERITY]]", "CIFAR-10-C below --data-root", "cifar_c:open_cifar_c"),
    "cifar100-c": Kind("cifar100-c[/CORRUPTION[/SEVERITY]]", "CIFAR-100-C, likewise", "cifar_c:open_cifar_c"),
    "folder": Kind("folder:DIR", "pictures in one sub-folder per class", "folders:open_folder"),
    "parquet": Kind("parquet:FILE-OR-GLOB", "Parquet with encoded images, Hugging Face layout", "parquet:open_parquet"),
    "hf": Kind("hf:ORG/NAME", "a data set of the Hugging Face Hub, or a saved folder", "hf:open_hf"),
    "shards": Kind("shards:PATTERN", "webdataset tar files: train-{000..127}.tar", "shards:open_shards"),
    "npz": Kind("npz:FILE", "NumPy archive of images and labels", "npz:open_npz"),
    "imagenet": Kind(
        "imagenet:DIR", "ImageNet-1k, folders of WordNet ids: imagenet:DIR(list=FILE)", "imagenet:open_imagenet"
    ),
    "imagenet-a": Kind("imagenet-a:DIR", "ImageNet-A, natural adversarial examples", "imagenet:open_imagenet"),
    "imagenet-r": Kind("imagenet-r:DIR", "ImageNet-R, renditions", "imagenet:open_imagenet"),
    "imagenet-c": Kind("imagenet-c:DIR", "ImageNet-C, corruption/severity/wnid", "imagenet:open_imagenet_c"),
    "imagenet-p": Kind("imagenet-p:DIR", "ImageNet-P, videos, every frame a sample", "videos:open_imagenet_p"),
}


def known_specs() -> list[tuple[str, str]]:
    """What `--data` understands: (form, one line about it)."""
    return [(kind.form, kind.about) for kind in DATA_KINDS.values()]


def whole_number(text: str) -> int:
    value = read_quantity(text)
    if value != int(value):
        raise UserError(f"'{text}' is not a whole number")
    return int(value)


@dataclass(frozen=True)
class Request:
    """What was asked for: a spec taken apart, and the flags that go with it."""

    spec: str
    kind: str
    argument: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    root: Path = Path("data")
    skip_bad: bool | None = None  # None: whoever asks has no such flag, so that none is advised

    def path(self, expected: str) -> Path:
        """The argument as a path that exists."""
        if not self.argument:
            raise UserError(f"'{self.spec}' names no path; write {self.kind}:PATH, where PATH is {expected}")
        path = Path(self.argument).expanduser()
        if not path.exists():
            raise UserError(f"'{path}' does not exist (from {self.spec}); expected {expected}")
        return path

    def chosen(self, **known: Callable[[str], Value]) -> dict[str, Value]:
        """The settings, each read by the function given for its name."""
        values = {}
        for name, text in self.settings.items():
            if name not in known:
                allowed = f"it takes {', '.join(known)}" if known else "it takes none"
                raise UserError(f"{self.kind} has no setting '{name}'; {allowed}{nearest_names(name, known)}")
            try:
                values[name] = known[name](text)
            except UserError as mistake:
                raise UserError(f"{self.kind}({name}={text}): {mistake}") from None
        return values

    def without_split(self) -> None:
        """For kinds that have nothing to pick from; all of them are sets for testing."""
        if self.split not in (None, "test"):
            raise UserError(f"{self.kind} has no split '{self.split}'; it is for testing only: drop the @{self.split}")


def parse_spec(spec: str, *, root: Path, split: str | None, skip_bad: bool | None = None) -> Request:
    """Takes a spec apart; whether its kind is known is for the caller to say."""
    text = spec.strip()
    suffix: str | None = None
    # A path may itself hold an @ or brackets: what exists under its full name is a path.
    if (found := _SPLIT.fullmatch(text)) and not _names_a_path(text):
        text, suffix = found.groups()
    if suffix and split and suffix != split:
        raise UserError(f"'{spec}' says @{suffix}, but split '{split}' was asked for as well; give one of them")
    settings: dict[str, str] = {}
    if (found := _BRACKETS.fullmatch(text)) and not _names_a_path(text):
        text, inner = found.groups()
        settings = _settings(inner, spec)
    separator = ":" if ":" in text else "/"
    kind, _, argument = text.partition(separator)
    return Request(
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
    return bool(path) and Path(path).expanduser().exists()


def _settings(inner: str, spec: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for item in inner.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise UserError(f"'{item.strip()}' in '{spec}' is not a setting; write name=value, separated by commas")
        if name in settings:
            raise UserError(f"'{spec}' sets '{name}' twice")
        settings[name] = value
    return settings
