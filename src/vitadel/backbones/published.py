"""The catalogue of published robust models, `published.yaml`: architecture, preprocessing, protocol and numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from vitadel.backbones.record import ModelRecord, three_numbers
from vitadel.errors import UserError, nearest_names

__all__ = [
    "Published",
    "catalogue",
    "describe_normalization",
    "describe_resizing",
    "find_published",
    "join_numbers",
    "published_names",
]

_CLASSES = {"imagenet": 1000, "cifar10": 10, "cifar100": 100}
_USUAL: dict[tuple[float, ...], str] = {
    (0.485, 0.456, 0.406, 0.229, 0.224, 0.225): "ImageNet",
    (0.481, 0.458, 0.408, 0.269, 0.261, 0.276): "CLIP",
    (0.491, 0.482, 0.446, 0.247, 0.244, 0.262): "CIFAR-10",
}
_ACCURACIES = ("clean", "autoattack", "pgd-20", "best_known")


@dataclass(frozen=True)
class Published:
    """One published checkpoint; see the head of `published.yaml` for the fields.

    `holds` and `prefix` are names in the file, and key prefixes, that few other projects use.
    """

    name: str
    dataset: str
    title: str
    paper: str
    source: str
    model: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    parameters: int
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ()
    small_images: int | None = None
    embedding: int | None = None
    norm: str = "linf"
    eps: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    images: int | None = None
    file: str | None = None
    certainty: str = "from code"
    note: str = ""
    holds: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def spec(self) -> str:
        """The shortest spec that names this model alone."""
        twice = sum(other.name == self.name for other in catalogue()) > 1
        return f"published:{self.dataset}/{self.name}" if twice else f"published:{self.name}"

    @property
    def normalization(self) -> str:
        """How it normalizes, in words."""
        return describe_normalization(self.mean, self.std)

    @property
    def resizing(self) -> str:
        """How images come to its input size, in words."""
        return describe_resizing(self, self.size)

    @property
    def about(self) -> str:
        """One line for a list: paper, parameters, protocol, published accuracies."""
        shown = [f"{what.replace('_', ' ')} {self.numbers[what]:g}" for what in _ACCURACIES if what in self.numbers]
        threat = f"{self.norm} {self.eps}" if self.eps else self.norm
        kind = ["image embedding"] if self.embedding else []
        arxiv = re.search(r"arXiv:[\d.]+", self.paper)
        where = [arxiv.group()] if arxiv else []
        facts = [f"{self.parameters / 1e6:.0f} M parameters", *kind, f"{self.dataset} {threat}", *shown, *where]
        return f"{self.title}: {', '.join(facts)}"

    @property
    def where(self) -> str:
        """Where the weights are to be had."""
        return f"{self.file} ({self.source})" if self.file else self.source

    def card(self) -> dict[str, str]:
        """All that is known about it, for reading."""
        numbers = ", ".join(f"{what.replace('_', ' ')} {value:g}" for what, value in self.numbers.items())
        arguments = "".join(f", {key}={value}" for key, value in self.kwargs.items())
        facts = {
            "model": f"{self.spec} ({self.title})",
            "paper": self.paper,
            "architecture": f"{self.model}{arguments}; {self.parameters:,} parameters",
            "output": "image embedding" if self.embedding else f"{_CLASSES[self.dataset]} classes of {self.dataset}",
            "preprocessing": f"{self.size} pixels; {self.normalization}; {self.resizing}",
            "threat": f"{self.norm} {self.eps}" if self.eps else self.norm,
            "published": f"{numbers} % ({self.images:,} images)" if self.images else f"{numbers} %",
            "weights": self.where,
            "certainty": self.certainty,
            "note": self.note,
        }
        return {what: text for what, text in facts.items() if text.strip(" %")}

    def record(self, kwargs: Mapping[str, Any] | None = None) -> ModelRecord:
        """How to build it, with other `kwargs` if given."""
        notes = {"published": f"{self.spec}; {self.certainty}"}
        if self.embedding:
            notes["output"] = "image embedding, no class scores"
        return ModelRecord(
            name=self.model,
            num_classes=self.embedding or _CLASSES[self.dataset],
            kwargs=dict(self.kwargs) | dict(kwargs or {}),
            mean=three_numbers(self.mean, "mean"),
            std=three_numbers(self.std, "std"),
            input_size=(self.size, self.size),
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            crop_mode=self.crop_mode,
            small_images=self.small_images,
            notes=notes,
        )


def describe_normalization(mean: tuple[float, ...], std: tuple[float, ...]) -> str:
    """Mean and std in words."""
    if set(mean) == {0.0} and set(std) == {1.0}:
        return "no normalization (raw pixels)"
    if len({*mean, *std}) == 1:
        return f"mean and std {mean[0]:g}"
    name = _USUAL.get((*(round(value, 3) for value in mean), *(round(value, 3) for value in std)))
    return f"{name} mean and std" if name else f"mean {join_numbers(mean)} and std {join_numbers(std)}"


def describe_resizing(how: Published | ModelRecord, size: int) -> str:
    """Crop and interpolation in words."""
    if how.crop_mode == "squash":
        return f"both sides resized to {size}, {how.interpolation}"
    return f"crop {how.crop_pct:g}, {how.interpolation}"


def join_numbers(values: Iterable[float]) -> str:
    """Numbers as a text."""
    return ", ".join(f"{value:.4g}" for value in values)


@cache
def catalogue() -> tuple[Published, ...]:
    """All published models."""
    text = (resources.files("vitadel.backbones") / "published.yaml").read_text("utf-8")
    facts = yaml.safe_load(text)
    return tuple(
        _read(name, {**family["shared"], **row}, family, facts)
        for family in facts["families"]
        for name, row in family["models"].items()
    )


def _read(name: str, row: dict[str, Any], family: Mapping[str, Any], facts: Mapping[str, Any]) -> Published:
    normalization = facts["inputs"][row.pop("input")]
    crop = facts["crops"][row.pop("crop")]
    fields = {key: row.pop(key) for key in list(row) if key in Published.__dataclass_fields__}
    fields |= {
        key: tuple(value) if isinstance(value, list) else value for key, value in family.get("marks", {}).items()
    }
    fields |= {"variants": tuple(fields.get("variants", ()))}
    return Published(
        name=name,
        dataset=family["dataset"],
        title=family["title"],
        paper=family["paper"],
        source=family["from"],
        mean=tuple(map(float, normalization["mean"])),
        std=tuple(map(float, normalization["std"])),
        numbers=row,  # what is left are accuracies
        **crop,
        **fields,
    )


def published_names() -> dict[str, str]:
    """Every published model as `published:NAME`, with one line each."""
    return {each.spec: each.about for each in catalogue()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())


def find_published(name: str) -> Published:
    """The model of `NAME` or `DATASET/NAME`; upper case and punctuation do not matter."""
    found = [each for each in catalogue() if _plain(name) in (_plain(each.name), _plain(f"{each.dataset}/{each.name}"))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"'published:{name}' names {len(found)} models. Give one of {', '.join(each.spec for each in found)}."
        )
    near = nearest_names(f"published:{name}", [each.spec for each in catalogue()]) or "."
    raise UserError(f"unknown published model '{name}'{near} See `vitadel list models --published`.")
