"""`shapes`: the built-in set of generated shapes with a robust and a fragile cue, deterministic per index.

The shape itself survives small perturbations; a faint texture, correlated with the class, does not. Standard training
relies on the texture and is not robust; adversarial training has to use the shape. The strength of both cues can be
set, which makes the trade-off between accuracy and robustness visible.

Pixels are computed with exactly rounded arithmetic only (trigonometry happens once per sample, in float64), so that
an image does not depend on the batch in which it is rendered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitadel.data.spec import DataRequest, pick_split, whole_number
from vitadel.errors import UserError
from vitadel.quantities import read_quantity
from vitadel.runtime.rng import SampleRNG

SPLITS = {"train": 50_000, "val": 2_000, "test": 10_000}
_TILE = 4  # the texture repeats every 4 pixels

Field = Callable[[Tensor, Tensor], Tensor]  # (u, v) in shape units -> signed distance, positive inside


def _disc(u: Tensor, v: Tensor, radius: float = 1.0, cu: float = 0.0, cv: float = 0.0) -> Tensor:
    return radius - torch.sqrt((u - cu).square() + (v - cv).square())


def _box(u: Tensor, v: Tensor, half_u: float, half_v: float) -> Tensor:
    return torch.minimum(half_u - u.abs(), half_v - v.abs())


def _half_planes(u: Tensor, v: Tensor, degrees: Sequence[float], offset: float) -> Tensor:
    """Distances inside half planes whose outward normals point at `degrees`; stacked on a new last axis."""
    sides = [offset - (u * math.cos(math.radians(d)) + v * math.sin(math.radians(d))) for d in degrees]
    return torch.stack(sides, dim=-1)


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return _half_planes(u, v + 0.12, (90, 210, 330), 0.58).amin(-1)


def _star(u: Tensor, v: Tensor) -> Tensor:
    """A pentagram: inside at least four of its five edges' half planes."""
    return _half_planes(u, v, (90, 162, 234, 306, 18), 0.42).sort(dim=-1).values[..., 1]


def _plus(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(_box(u, v, 1.0, 0.32), _box(u, v, 0.32, 1.0))


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return torch.minimum(_disc(u, v, 1.05), -_disc(u, v, 0.55))


def _crescent(u: Tensor, v: Tensor) -> Tensor:
    return torch.minimum(_disc(u, v, 1.05), -_disc(u, v, 0.85, 0.55, -0.1))


def _heart(u: Tensor, v: Tensor) -> Tensor:
    lobes = torch.maximum(_disc(u, v, 0.56, -0.46, -0.3), _disc(u, v, 0.56, 0.46, -0.3))
    point = _half_planes(u, v, (45, 135), 0.67).amin(-1)  # both edges touch their lobe
    return torch.maximum(lobes, torch.minimum(point, v - 0.02))


def _hourglass(u: Tensor, v: Tensor) -> Tensor:
    return torch.minimum(0.95 - v.abs(), (v.abs() + 0.08 - u.abs()) * 0.75)


_FIELDS: dict[str, Field] = {
    "disc": lambda u, v: _disc(u, v, 0.95),
    "square": lambda u, v: _box(u, v, 0.82, 0.82),
    "triangle": _triangle,
    "star": _star,
    "plus": _plus,
    "ring": _ring,
    "crescent": _crescent,
    "heart": _heart,
    "bar": lambda u, v: _box(u, v, 1.15, 0.34),
    "hourglass": _hourglass,
}
CLASSES = tuple(_FIELDS)


def _between(rng: SampleRNG, name: str, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * rng.stream(name).uniform(*shape)


def _color(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """HSV to RGB, shape (batch, 3), by the piecewise linear formula."""
    turn = torch.stack([(hue * 6 + shift) % 6 for shift in (5.0, 3.0, 1.0)], dim=1)
    dip = torch.minimum(turn, 4 - turn).clamp(0, 1)
    return value[:, None] * (1 - saturation[:, None] * dip)


def _textures(size: int) -> Tensor:
    """One fixed pattern of +-1 per class and channel, (classes, 3, size, size): a 4 x 4 tile with zero mean."""
    order = SampleRNG.of_samples(2024, range(len(CLASSES) * 3)).permutation(_TILE * _TILE)
    tiles = torch.where(order < _TILE * _TILE // 2, -1.0, 1.0).view(len(CLASSES), 3, _TILE, _TILE)
    repeats = -(-size // _TILE)
    return tiles.repeat(1, 1, repeats, repeats)[:, :, :size, :size]


@dataclass(frozen=True)
class Shapes:
    """Ten generated shapes; sample i of a split is always the same image, at any size and in any order.

    `texture` is the amplitude of the fragile cue in pixel units; `agreement` the fraction of samples whose texture
    belongs to their class (the others have the texture of a random class). Shapes are drawn with an opacity between
    `faintest` and 1: faint ones can be classified by the texture, but not robustly.
    """

    split: str = "test"
    size: int = 32
    texture: float = 2 / 255
    agreement: float = 0.995
    faintest: float = 0.2
    seed: int = 0

    @property
    def classes(self) -> tuple[str, ...]:
        return CLASSES

    def __len__(self) -> int:
        return SPLITS[self.split]

    def labels(self) -> Tensor:
        return torch.arange(len(self)) % len(CLASSES)

    def render(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (batch, 3, size, size) uint8, labels (batch,), masks (batch, size, size): 0 or 1 + class."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        label = index % len(CLASSES)
        rng = SampleRNG.of_samples(self.seed, index).stream("shapes " + self.split)
        axis = (torch.arange(self.size, dtype=torch.float32) + 0.5) * (2 / self.size) - 1
        across, down = axis[None, None, :], axis[None, :, None]

        inside = self._coverage(rng.stream("shape"), label, across, down)
        hidden = self._occluder(rng.stream("occluder"), across, down)
        ground, ink, cover = self._paint(rng.stream("paint"), across, down)
        visible = (inside * (1 - hidden))[:, None]
        # Some shapes are faint: a robust model cannot classify those, which costs it accuracy.
        opacity = _between(rng, "opacity", self.faintest, 1.0)[:, None, None, None]
        image = ground + opacity * visible * (ink - ground) + hidden[:, None] * (cover - ground)
        image = image + self._texture(rng.stream("texture"), label)
        image = image + (3 / 255) * (rng.stream("grain").uniform(3, self.size, self.size) * 2 - 1)
        pixels = (image.clamp(0, 1) * 255 + 0.5).floor().to(torch.uint8)
        mask = torch.where(visible[:, 0] > 0.5, 1 + label[:, None, None], 0)
        return pixels, label, mask

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        pixels = self.render(indices)[0].permute(0, 2, 3, 1).contiguous().numpy()
        return [Image.fromarray(image) for image in pixels]

    def name(self, index: int) -> str:
        return f"shapes {self.split} {index} ({CLASSES[index % len(CLASSES)]})"

    def masks(self, indices: Sequence[int] | Tensor) -> Tensor:
        """(batch, size, size): 0 for the ground, 1 + class for the visible part of the shape."""
        return self.render(indices)[2]

    def _antialias(self, distance: Tensor, scale: Tensor | float) -> Tensor:
        """Signed distance in shape units to coverage in [0, 1]: a ramp one pixel wide."""
        return (distance * scale * (self.size / 2) + 0.5).clamp(0, 1)

    def _coverage(self, rng: SampleRNG, label: Tensor, across: Tensor, down: Tensor) -> Tensor:
        radius = _between(rng, "radius", 0.50, 0.72)[:, None, None]
        stretch = _between(rng, "stretch", 0.92, 1.09)[:, None, None]
        turn = (_between(rng, "turn", -0.30, 0.30)).double()
        cos, sin = (f(turn).float()[:, None, None] for f in (torch.cos, torch.sin))
        room = (0.92 - radius[:, :, 0]).clamp(min=0.05)
        x0 = (room * _between(rng, "x", -1, 1)[:, None])[:, :, None]
        y0 = (room * _between(rng, "y", -1, 1)[:, None])[:, :, None]
        u = ((across - x0) * cos + (down - y0) * sin) / (radius * stretch)
        v = ((down - y0) * cos - (across - x0) * sin) * stretch / radius
        coverage = torch.empty_like(u)
        for number, field in enumerate(_FIELDS.values()):
            members = (label == number).nonzero()[:, 0]
            if len(members):
                coverage[members] = self._antialias(field(u[members], v[members]), radius[members])
        return coverage

    def _occluder(self, rng: SampleRNG, across: Tensor, down: Tensor) -> Tensor:
        """Half of the images have a thin bar across them, somewhere."""
        angle = (_between(rng, "angle", 0, math.pi)).double()
        cos, sin = (f(angle).float()[:, None, None] for f in (torch.cos, torch.sin))
        offset = _between(rng, "offset", -0.8, 0.8)[:, None, None]
        half = _between(rng, "width", 0.04, 0.10)[:, None, None]
        present = (rng.stream("present").uniform() < 0.5).float()[:, None, None]
        return present * self._antialias(half - (across * cos + down * sin - offset).abs(), 1.0)

    def _paint(self, rng: SampleRNG, across: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Background, ink and occluder colors; ink and background differ in brightness by at least 0.3."""
        bright = (rng.stream("bright").uniform() < 0.5).float()
        low, high = _between(rng, "low", 0.12, 0.36), _between(rng, "high", 0.70, 0.95)
        ground_value = torch.where(bright > 0, low, high)
        ink_value = torch.where(bright > 0, high, low)
        hue = rng.stream("hue").uniform()
        ground = _color(hue, _between(rng, "wash", 0.05, 0.55), ground_value)[:, :, None, None]
        ink_hue = (hue + _between(rng, "contrast", 0.2, 0.8)) % 1
        ink = _color(ink_hue, _between(rng, "ink", 0.35, 0.95), ink_value)[:, :, None, None]
        cover = _color(rng.stream("cover").uniform(), _between(rng, "fade", 0.0, 0.6), (low + high) / 2)
        tilt = _between(rng, "tilt", -0.10, 0.10, 2)[:, :, None, None]
        ramp = (tilt[:, 0] * across + tilt[:, 1] * down)[:, None]
        blob_x = _between(rng, "blob x", -1, 1)[:, None, None]
        blob_y = _between(rng, "blob y", -1, 1)[:, None, None]
        blob = _between(rng, "blob", -0.12, 0.12)[:, None, None]
        glow = blob / (1 + 3 * ((across - blob_x).square() + (down - blob_y).square()))
        shade = 1 + (0.16 * (_between(rng, "shade", -1, 1))[:, None, None] * down)[:, None]
        return ground + ramp + glow[:, None], ink * shade, cover[:, :, None, None]

    def _texture(self, rng: SampleRNG, label: Tensor) -> Tensor:
        other = rng.stream("other").integers(len(CLASSES))
        owner = torch.where(rng.stream("agrees").uniform() < self.agreement, label, other)
        return self.texture * _textures(self.size)[owner]


def open_shapes(request: DataRequest) -> Shapes:
    """Open `shapes(size=64,texture=8/255,agreement=1,faintest=0.5,seed=1)`; all settings are optional."""
    if request.argument:
        raise UserError(f"'{request.spec}': shapes takes settings in brackets, e.g. shapes(size=64,texture=0)")
    numbers: dict[str, Callable[[str], Any]] = dict.fromkeys(("texture", "agreement", "faintest"), read_quantity)
    settings = request.read_settings(size=whole_number, seed=whole_number, **numbers)
    shapes = Shapes(split=pick_split(SPLITS, request.split, "shapes"), **settings)
    if not 8 <= shapes.size <= 1024:
        raise UserError(f"shapes: size must be from 8 to 1024 pixels, got {shapes.size}")
    for name, value in (("texture", shapes.texture), ("agreement", shapes.agreement), ("faintest", shapes.faintest)):
        if not 0 <= value <= 1:
            raise UserError(f"shapes: {name} must be in [0, 1], got {value:g}")
    return shapes
