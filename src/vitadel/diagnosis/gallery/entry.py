"""What the gallery consists of: models that are broken on purpose, honest ones, and how they are built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from vitadel.backbones.load import load_model

ROBUST = "zoo:shapes-robust"
STANDARD = "zoo:shapes-standard"

Change = Callable[[Tensor], Tensor]
Build = Callable[[nn.Module], nn.Module]
Rule = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class BrokenDefense:
    """`build` makes the defense out of an honest model, by default `base`.

    It must raise the checks `raises`, where any are named. Members of one `kind` differ only in `strength`; kinds that
    hide in the same way form a `family`.
    """

    name: str
    about: str
    build: Build
    raises: tuple[str, ...] = ()
    base: str = STANDARD
    family: str = ""
    strength: float | None = None

    @property
    def kind(self) -> str:
        """The name without its strength."""
        return self.name.partition(", strength ")[0]

    def make(self) -> nn.Module:
        """The defense around its default model."""
        return self.build(load_model(self.base))


@dataclass(frozen=True)
class HonestModel:
    """A model that hides nothing, and must raise no check."""

    name: str
    about: str
    build: Callable[[], nn.Module]
    family: str = ""

    def make(self) -> nn.Module:
        """The model in eval mode."""
        return self.build().eval()


def sweep(
    family: str, kind: str, about: str, at: Callable[[float], Build], strengths: Iterable[float], base: str = ROBUST
) -> tuple[BrokenDefense, ...]:
    """One defense for each strength; `at(strength)` builds it."""
    return tuple(
        BrokenDefense(f"{kind}, strength {strength:g}", about, at(strength), (), base, family, strength)
        for strength in strengths
    )


class Named(Protocol):
    """What a half can be drawn of."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...


Member = TypeVar("Member", bound=Named)


def held_out(members: Sequence[Member]) -> list[Member]:
    """The half of every family that no threshold was chosen on: the smaller digests of the names.

    Of a family with an odd number of members the larger part is held out.
    """
    digests = {each.name: hashlib.sha256(each.name.encode()).hexdigest() for each in members}
    chosen = set()
    for family in {each.family for each in members}:
        names = sorted((each.name for each in members if each.family == family), key=digests.__getitem__)
        chosen |= set(names[: (len(names) + 1) // 2])
    return [each for each in members if each.name in chosen]


class Transform(nn.Module):
    """A function as a module, which attacks can name."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


class Around(nn.Module):
    """A module around an honest model, in the mode of that model; `rule` gives its logits."""

    def __init__(self, model: nn.Module, rule: Rule = lambda model, x: model(x)) -> None:
        super().__init__()
        self.model = model
        self.rule = rule
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.model, x)


class Defended(nn.Module):
    """An honest model with a module before it, `input_transform`, and one after it, `output_transform`."""

    def __init__(self, model: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.input_transform = nn.Identity() if before is None else before
        self.model = model
        self.output_transform = nn.Identity() if after is None else after
        for part in (self, *self.input_transform.modules(), *self.output_transform.modules()):
            part.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output_transform(self.model(self.input_transform(x)))
        return logits


def around(rule: Rule) -> Build:
    return lambda model: Around(model, rule)


def before(change: Change) -> Build:
    return lambda model: Defended(model, before=Transform(change))


def after(change: Change) -> Build:
    return lambda model: Defended(model, after=Transform(change))


def smoothed(x: Tensor) -> Tensor:
    """The mean of every 3 x 3 pixels."""
    return nn.functional.avg_pool2d(nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def looks_noisy(x: Tensor, level: float) -> Tensor:
    """Whether flat parts, of which every clean image has some, are no longer flat."""
    if len(x) == 0:  # of which there is no quantile
        return torch.zeros(0, dtype=torch.bool, device=x.device)
    return (x - smoothed(x)).abs().flatten(1).quantile(0.2, dim=1) > level
