"""The ladder's levels, T0 to T8: what each attacker of secret tokens knows, and what it runs.

Robustness Tokens (Pulfer et al., ECCV 2024) were judged at T2 only, where the attacker knows the public backbone and
not the tokens; the paper calls that white-box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.attacks.settings import training_form
from vitadel.attacks.threats import Linf
from vitadel.errors import UserError, nearest_names
from vitadel.types import Attack

__all__ = ["LEVELS", "AttackerAssets", "Head", "Level", "MeanOf", "Rung", "check_levels", "rungs"]

RELEASED_EPS = 8 / 255
"""Of the released code's attack: in units of ImageNet's standard deviations."""

RELEASED_PIXELS = 2 / 255
"""What that can change of a pixel at most: 1.83 grey levels, floored to whole ones."""


_GUESSED = 10  # random tokens beside which it crafts, as many as in the paper: the victim's number is a secret
_TUNED = 4  # times as many steps for the attack made to transfer: its gradients are of random inputs


@dataclass(frozen=True)
class Level:
    code: str
    title: str
    knows: str


LEVELS = {
    level.code: level
    for level in (
        Level("T0", "noise", "nothing"),
        Level("T1", "other model", "another model for the same classes"),
        Level("T2", "public backbone", "the backbone and not the tokens: the paper's setting"),
        Level("T2+", "transfer tuned", "the same, and crafts for a model that it does not have"),
        Level("T3", "surrogate tokens", "how the tokens were trained, so it trains its own"),
        Level("T4", "several surrogates", "the same, with several sets of tokens, averaged"),
        Level("T5", "score queries", "the victim's scores for images of its choice, no gradient"),
        Level("T6", "white box", "everything, the secret tokens too"),
        Level("T7", "token extraction", "the victim's features, or scores, for its own images: fits tokens to them"),
        Level("T8", "randomised bank", "every set of tokens of a bank, but not which one answers a query"),
    )
}


def check_levels(codes: Sequence[str]) -> tuple[str, ...]:
    """The levels in their order; unknown ones are a `UserError`."""
    for code in codes:
        if code not in LEVELS:
            known = ", ".join(LEVELS)
            raise UserError(f"unknown level {code!r} of the ladder{nearest_names(code, LEVELS) or '.'} Known: {known}.")
    return tuple(code for code in LEVELS if code in codes)


class MeanOf(nn.Module):
    """The mean logits of several models: what an attacker climbs who does not know which of them will answer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.models]).mean(0)


@dataclass(frozen=True, eq=False)
class Rung:
    """One attack of one level: `attack(eps)` climbs `source`; what counts is what `judges` say of the result.

    `judges` None is the victim; a bank's sets all judge. Who `asks` the victim sees whether an image works: what it
    found at one budget it still has at a larger one. `in_pixels` is off for the released code's attack, whose budget
    is in other units and the same whatever the ladder's. `features`: how far features moved is measured too.
    """

    level: str
    name: str
    source: nn.Module
    attack: Callable[[float], Attack]
    judges: tuple[nn.Module, ...] | None = None
    asks: bool = False
    in_pixels: bool = True
    features: bool = False

    @property
    def title(self) -> str:
        return f"{self.level} {self.name}"

    @property
    def models(self) -> int:
        """How many models one pass of the source is."""
        return len(self.source.models) if isinstance(self.source, MeanOf) else 1

    @property
    def all_images(self) -> bool:
        """Whether images that the victim gets wrong are attacked, too: others judge them, or features are compared."""
        return self.level == "T2" or self.features or self.judges is not None


Head = Callable[[nn.Module], nn.Module]
"""Puts a head on a model's frozen features; the result gives logits."""


def _as_it_is(model: nn.Module) -> nn.Module:
    """The head that the backbone came with."""
    return model


@dataclass(frozen=True, eq=False)
class AttackerAssets:
    """What attackers have or get hold of; a level without its means is left out of the ladder."""

    victim: TokenClassifier
    head: Head = _as_it_is  # the victim's, put on a backbone with or without tokens
    own_head: Head | None = None  # the attacker's
    other: nn.Module | None = None
    surrogates: tuple[TokenClassifier, ...] = ()
    extracted: tuple[tuple[str, TokenClassifier], ...] = ()  # from what, and the fitted tokens
    bank: tuple[TokenClassifier, ...] = ()
    features: str = "tokens"  # those that the defence compares, as attackers know from its recipe; or "pooled"


def rungs(
    levels: Sequence[str], arms: AttackerAssets, steps: int, queries: int, white_box: Sequence[str]
) -> list[Rung]:
    """Every attack of the chosen levels for which the means are there, in the ladder's order."""
    climb = _climber(steps)
    return [rung for rung in _all_rungs(arms, climb, steps, queries, white_box) if rung.level in levels]


def _all_rungs(
    arms: AttackerAssets, climb: Callable[[float], Attack], steps: int, queries: int, white_box: Sequence[str]
) -> Iterator[Rung]:
    victim, public = arms.head(arms.victim), arms.head(arms.victim.classifier)
    for kind in ("uniform", "surface", "gaussian"):
        yield Rung("T0", f"{kind} noise", public, _named(f"noise(kind={kind})"), features=kind == "surface")
    if arms.other is not None:
        yield Rung("T1", f"pgd-{steps}", arms.other, climb)
        yield Rung("T1", f"mi-fgsm-{steps}", arms.other, _named(f"mi-fgsm-{steps}"))
    away = f"features-{steps}{_of(arms)}"
    yield Rung("T2", away, public, _features(steps, arms.features), features=True)
    released = _named(f"features-30(paper=true,features={arms.features})")
    yield Rung("T2", f"features-30, released{_of(arms)}", public, released, in_pixels=False, features=True)
    yield Rung("T2", f"pgd-{steps}, victim's head", public, climb)
    if arms.own_head is not None:
        yield Rung("T2", f"pgd-{steps}, own head", arms.own_head(arms.victim.classifier), climb)
    tuned = f"diverse-{_TUNED * steps}(tokens={_GUESSED})"
    yield Rung("T2+", f"diverse-{_TUNED * steps} beside random tokens", public, _named(tuned))
    yield Rung("T2+", f"pna-patchout, {steps} steps", public, _named(f"pna-patchout(steps={steps},decay=1)"))
    for number, surrogate in enumerate(arms.surrogates, start=1):
        yield Rung("T3", f"pgd-{steps}, set {number}", arms.head(surrogate), climb)
    for count in range(1, len(arms.surrogates) + 1):
        mean = MeanOf([public, *map(arms.head, arms.surrogates[:count])])
        yield Rung("T4", f"pgd-{steps}, bare and {count} set{'s' * (count > 1)}", mean, climb)
    yield Rung("T5", f"square, {queries} queries", victim, _named(f"square(queries={queries})", stops=True), asks=True)
    yield Rung("T6", away, victim, _features(steps, arms.features), asks=True, features=True)
    yield Rung("T6", f"pgd-{steps}", victim, _climber(steps, stops=True), asks=True)
    for name in dict.fromkeys(white_box):
        if name not in (f"pgd-{steps}", away):  # they are there already
            yield Rung("T6", name, victim, _named(name, stops=True), asks=True)
    for exposed, extracted in arms.extracted:
        yield Rung("T7", f"pgd-{steps}, from {exposed}", arms.head(extracted), climb)
    if arms.bank:
        bank = tuple(map(arms.head, arms.bank))
        yield Rung("T8", f"pgd-{steps} over {len(bank)} sets", MeanOf(bank), climb, judges=bank)


def _climber(steps: int, stops: bool = False) -> Callable[[float], Attack]:
    """Who crafts for a model that it cannot ask goes all the way, to the worst point, not the first that fools."""

    def at(eps: float) -> Attack:
        return PGD(Linf(eps), steps=steps, stop_when_fooled=stops)

    return at


def _of(arms: AttackerAssets) -> str:
    """Named where they are not the usual ones, so that verdicts on one are not taken for those on the other."""
    return "" if arms.features == "tokens" else f", {arms.features}"


def _features(steps: int, kind: str) -> Callable[[float], Attack]:
    def at(eps: float) -> Attack:
        return make(f"features-{steps}(normed=true,features={kind},stop_when_fooled=false)", eps=eps)

    return at


def _named(name: str, stops: bool = False) -> Callable[[float], Attack]:
    def at(eps: float) -> Attack:
        attack = make(name, eps=eps)
        return attack if stops else training_form(attack)

    return at
