"""Square: random search with square-shaped changes, without gradients (Andriushchenko et al. 2020, arXiv:1912.00049).

It only needs logits, so it also works where gradients are masked. Two deliberate differences from the reference code:
positions and signs are drawn per sample (there per batch, so that results depend on the batches), and windows may touch
the last row and column.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, repeat

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.goals import fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.per_sample import per_sample, takes_arrays
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import with_restarts
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

_TINY = 1e-12
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # after these queries the share is halved
_BLOCK = 64  # number of queries whose random numbers are drawn at once

Propose = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(best points so far, clean images, uniform random numbers) -> points to try."""


def share_of_pixels(query: int, p_init: float = 0.8, rescale_from: int | None = None) -> float:
    """The share of pixels that query number `query` (from 0) changes: the paper's schedule for 10,000 queries.

    `rescale_from` is the number of queries to which the schedule is rescaled.
    """
    place = query if rescale_from is None else int(query / rescale_from * 10_000)
    return float(p_init / 2 ** bisect_left(_HALVINGS, place))


@dataclass(frozen=True)
class Square:
    """Random search on the margin: changes that raise the margin are kept, fooled samples stop.

    `queries` counts the start and the proposals, but not the pass on the clean images before. `rescale_schedule`
    rescales the schedule of window sizes from 10,000 queries to `queries` (off in AutoAttack).
    """

    threat: Threat
    queries: int = 5000
    p_init: float = 0.8
    rescale_schedule: bool = False

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise UserError(f"Square needs at least 1 query, got {self.queries}")
        if not 0 < self.p_init <= 1:
            raise UserError(f"p_init is a share of the pixels and must be in (0, 1], got {self.p_init}")
        if not isinstance(self.threat, (Linf, L2, L1)):
            raise UserError(f"Square needs the threat Linf, L2 or L1, got {type(self.threat).__name__}")

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        if x.ndim != 4:
            raise UserError(f"Square needs images of shape (batch, channels, height, width), got {tuple(x.shape)}")
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        with frozen(model), torch.no_grad():
            return self._search(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng)

    def _search(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG) -> Tensor:
        shapes = _FlatSquares(self.threat) if isinstance(self.threat, Linf) else _Bumps(self.threat)
        found = x.clone()
        place = (~fooled(model, x, model(x), y)).nonzero().squeeze(1)  # of the samples not fooled yet
        x, y, rng = x[place], y[place], rng[place]
        z, best = x, torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
        for query, propose in enumerate(self._proposals(shapes, x, rng)):
            if len(place) == 0:
                break
            if query % _BLOCK == 0:
                uniform = rng.stream("block", query // _BLOCK).uniform(_BLOCK, shapes.numbers + x.shape[1])
            trial = propose(z, x, uniform[:, query % _BLOCK])
            logits = model(trial)
            value, wrong = margin(logits, y).to(best.dtype), fooled(model, trial, logits, y)
            z, best = torch.where(per_sample((value > best) | wrong, z).bool(), trial, z), torch.maximum(value, best)
            if bool(wrong.any()):
                found[place[wrong]] = z[wrong]
                rest = ~wrong
                place, z, x, y, best = place[rest], z[rest], x[rest], y[rest], best[rest]
                rng, uniform = rng[rest], uniform[rest]
        found[place] = z
        return found

    def _proposals(self, shapes: _FlatSquares | _Bumps, x: Tensor, rng: SampleRNG) -> Iterator[Propose]:
        """The start, then shrinking windows; each window size is prepared once for all its queries."""
        height, width = x.shape[-2:]
        rescale_from = self.queries if self.rescale_schedule else None

        def side(query: int) -> int:
            return shapes.side(share_of_pixels(query, self.p_init, rescale_from), height, width)

        yield lambda z, x, uniform: shapes.start(x, rng.stream("start"))
        for length, queries in groupby(range(self.queries - 1), key=side):
            yield from repeat(shapes.windows(length, x), len(list(queries)))

    def passes(self) -> tuple[int, int]:
        return 0, self.queries + 1


def _signs(uniform: Tensor, like: Tensor) -> Tensor:
    """One sign per channel."""
    return torch.where(uniform < 0.5, -1.0, 1.0).to(like.dtype)[:, :, None, None]


def _positions(corner: Tensor, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of every row (samples, height) and column (samples, width) of the image relative to a window.

    `corner` (samples, 2) in [0, 1) is the window's place; inside it coordinates are 0 .. length - 1.
    """
    places = []
    for axis, extent in enumerate(x.shape[-2:]):
        first = (corner[:, axis] * (extent - length + 1)).long().clamp(max=extent - length)
        places.append(torch.arange(extent, device=x.device) - first[:, None])
    return places[0], places[1]


def _window(rows: Tensor, columns: Tensor, length: int) -> Tensor:
    """The window as a mask (samples, 1, height, width)."""
    high = (rows >= 0) & (rows < length)
    wide = (columns >= 0) & (columns < length)
    return high[:, None, :, None] & wide[:, None, None, :]


@dataclass(frozen=True)
class _FlatSquares:
    """Linf: vertical stripes of +-eps, then squares of +-eps, one sign per channel."""

    threat: Threat
    numbers = 2  # random numbers per proposal, besides one sign per channel

    def side(self, share: float, height: int, width: int) -> int:
        return min(max(round(math.sqrt(share * height * width)), 1), height, width)

    def start(self, x: Tensor, rng: SampleRNG) -> Tensor:
        signs = rng.signs(x.shape[1], 1, x.shape[3]).to(x.dtype)
        return self.threat.project(x + self.threat.eps * signs, x)

    def windows(self, length: int, like: Tensor) -> Propose:
        def propose(z: Tensor, x: Tensor, uniform: Tensor) -> Tensor:
            inside = _window(*_positions(uniform[:, :2], length, x), length)
            return torch.where(inside, self.threat.project(x + self.threat.eps * _signs(uniform[:, 2:], x), x), z)

        return propose


@dataclass(frozen=True)
class _Bumps:
    """L2, and L1 as in Croce & Hein 2021 (arXiv:2103.01208): move budget from one window into a bump in another.

    In L1 the bump exceeds the budget, and the projection onto ball and box makes it sparse.
    """

    threat: Threat
    numbers = 5

    @property
    def order(self) -> int:
        return 1 if isinstance(self.threat, L1) else 2

    def side(self, share: float, height: int, width: int) -> int:
        odd = max(round(math.sqrt(share * height * width)), 3) | 1
        return min(odd, height, width)

    def start(self, x: Tensor, rng: SampleRNG) -> Tensor:
        """A grid of bumps, each in one of two orientations and with one sign per channel."""
        samples, channels, height, width = x.shape
        tile = max(min(height, width) // 5, 1)
        down, across = height // tile, width // tile
        turned = (rng.stream("turn").uniform(down, across) < 0.5).long()
        bumps = self._brush(tile, x)[turned].transpose(2, 3).reshape(samples, 1, down * tile, across * tile)
        signs = rng.stream("signs").signs(channels, down, across).to(x.dtype)
        signs = signs.repeat_interleave(tile, 2).repeat_interleave(tile, 3)
        left, top = (width - across * tile) // 2, (height - down * tile) // 2
        border = (left, width - across * tile - left, top, height - down * tile - top)
        return self._spend(x, F.pad(bumps * signs, border))

    def windows(self, length: int, like: Tensor) -> Propose:
        brush = self._brush(length, like)

        def propose(z: Tensor, x: Tensor, uniform: Tensor) -> Tensor:
            return self._spend(x, self._moved(z - x, brush, uniform))

        return propose

    def _moved(self, delta: Tensor, brush: Tensor, uniform: Tensor) -> Tensor:
        """Move the budget of both windows, and what is unspent, into a bump in the first window."""
        length, channels = brush.shape[-1], delta.shape[1]
        rows, columns = _positions(uniform[:, :2], length, delta)
        first = _window(rows, columns, length)
        second = _window(*_positions(uniform[:, 2:4], length, delta), length)
        turned = (uniform[:, 4] < 0.5).long()
        row, column = rows.clamp(0, length - 1)[:, :, None], columns.clamp(0, length - 1)[:, None, :]
        bump = brush[turned[:, None, None], row, column][:, None] * _signs(uniform[:, 5:], delta)
        inside = delta * first
        fresh = (bump + inside / (self._length(inside, (2, 3)) + _TINY)) * first
        spare = (self.threat.eps**self.order - self._length(delta, (1, 2, 3)) ** self.order).clamp(min=0)
        share = spare / channels + self._length(delta * (first | second), (2, 3)) ** self.order
        budget = share.sqrt() if self.order == 2 else share * channels
        fresh = fresh / (self._length(fresh, (2, 3)) + _TINY) * budget
        return torch.where(first, fresh, delta * ~second)

    def _spend(self, x: Tensor, delta: Tensor) -> Tensor:
        """The perturbation at full budget: scaled in L2, projected in L1."""
        if self.order == 2:
            delta = delta / (self._length(delta, (1, 2, 3)) + _TINY) * self.threat.eps
        return self.threat.project(x + delta, x)

    def _length(self, delta: Tensor, dims: tuple[int, ...]) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(delta, ord=self.order, dim=dims, keepdim=True)
        return length

    def _brush(self, side: int, like: Tensor) -> Tensor:
        """The bump of unit length and its transpose, (2, side, side): two halves of opposite sign."""
        steepness = 2 if self.order == 2 else 4
        upper, lower = _hill(side // 2, side, steepness), _hill(side - side // 2, side, steepness)
        whole = torch.cat([upper / self._length(upper, (0, 1)), -lower / self._length(lower, (0, 1))])
        whole = whole / self._length(whole, (0, 1))
        return torch.stack([whole, whole.T]).to(like)


def _hill(height: int, width: int, steepness: int) -> Tensor:
    """A sum of concentric rectangles; the k-th has the height 1 / k**steepness."""
    rows = (torch.arange(height) - height // 2).abs()
    columns = (torch.arange(width) - width // 2).abs()
    ring = torch.maximum(rows[:, None], columns[None, :])
    layers = torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** -steepness
    return layers.flip(0).cumsum(0).flip(0)[ring]


def square(
    threat: Threat, queries: int = 5000, restarts: int = 1, p_init: float = 0.8, rescale_schedule: bool = False
) -> Attack:
    return with_restarts(Square(threat, queries, p_init, rescale_schedule), restarts)
