"""The threat levels, T0 to T8: what each attacker of secret tokens knows, and the attacks it runs.

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
from vitadel.attacks.settings import pixels_per_unit, training_form
from vitadel.attacks.threats import Linf
from vitadel.errors import check_known
from vitadel.types import Attack

RELEASED_EPS = 8 / 255
"""Budget of the released code's attack, in units of ImageNet's standard deviations."""

RELEASED_PIXELS = 2 / 255
"""The most that it can change a pixel: 1.83 gray levels, floored to whole ones."""

GUESSED = 10
"""How many tokens an attacker assumes who does not know the number: the paper's."""
_TUNED = 4  # times as many steps for the transfer attack, whose gradients are those of random inputs


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


NEED_TOKENS = ("T2+", "T3", "T4", "T5", "T6", "T7", "T8")
"""Levels of attackers who look for tokens: a model without any is refused, as the user may have forgotten them."""


def check_levels(codes: Sequence[str]) -> tuple[str, ...]:
    """Sort levels; an unknown one is a `UserError`."""
    for code in codes:
        check_known("threat level", code, LEVELS)
    return tuple(code for code in LEVELS if code in codes)


class MeanOf(nn.Module):
    """The mean logits of several models, for an attacker who does not know which of them will answer."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.models]).mean(0)


@dataclass(frozen=True, eq=False)
class LevelAttack:
    """One attack of one level: `attack(eps)` runs on `source`, and `judges` decide whether the result counts.

    `judges` None is the victim; of a bank all sets judge. `queries_victim`: the attacker sees whether an image works,
    so it keeps what it found at smaller budgets. `in_pixels` is False for the released code's attack, whose budget is
    in other units and always the same. `features`: the change of features is measured, too.
    """

    level: str
    name: str
    source: nn.Module
    attack: Callable[[float], Attack]
    judges: tuple[nn.Module, ...] | None = None
    queries_victim: bool = False
    in_pixels: bool = True
    features: bool = False

    @property
    def title(self) -> str:
        return f"{self.level} {self.name}"

    @property
    def models(self) -> int:
        """How many models one pass of the source runs."""
        return len(self.source.models) if isinstance(self.source, MeanOf) else 1

    @property
    def all_images(self) -> bool:
        """Whether images that the victim misclassifies are attacked, too, for other judges or for their features."""
        return self.level == "T2" or self.features or self.judges is not None


Head = Callable[[nn.Module], nn.Module]
"""Puts a head on a model's frozen features; the result gives logits."""


@dataclass(frozen=True, eq=False)
class AttackerAssets:
    """The models that attackers have; a level whose models are missing is left out."""

    victim: TokenClassifier
    head: Head = lambda model: model  # the victim's, put on a backbone with or without tokens
    own_head: Head | None = None  # the attacker's
    other: nn.Module | None = None
    surrogates: tuple[TokenClassifier, ...] = ()
    extracted: tuple[tuple[str, TokenClassifier], ...] = ()  # from what, and the fitted tokens
    bank: tuple[TokenClassifier, ...] = ()
    features: str = "tokens"  # those that the defense compares, known from its recipe; or "pooled"


def level_attacks(
    levels: Sequence[str],
    assets: AttackerAssets,
    steps: int,
    queries: int,
    white_box: Sequence[str],
    public: Sequence[str] = (),
) -> list[LevelAttack]:
    """Every attack of the chosen levels whose models are there, in the order of the levels."""
    return [each for each in _all_attacks(assets, steps, queries, white_box, public) if each.level in levels]


def _all_attacks(
    assets: AttackerAssets, steps: int, queries: int, white_box: Sequence[str], on_public: Sequence[str]
) -> Iterator[LevelAttack]:
    victim, public = assets.head(assets.victim), assets.head(assets.victim.classifier)
    pgd = _pgd(steps)
    # Other features than the usual ones are named, so that their verdicts are not confused.
    kind = "" if assets.features == "tokens" else f", {assets.features}"
    away_name = f"features-{steps}{kind}"
    away = _named(f"features-{steps}(normed=true,features={assets.features},stop_when_fooled=false)", stops=True)
    for noise in ("uniform", "surface", "gaussian"):
        yield LevelAttack("T0", f"{noise} noise", public, _named(f"noise(kind={noise})"), features=noise == "surface")
    if assets.other is not None:
        yield LevelAttack("T1", f"pgd-{steps}", assets.other, pgd)
        yield LevelAttack("T1", f"mi-fgsm-{steps}", assets.other, _named(f"mi-fgsm-{steps}"))
    yield LevelAttack("T2", away_name, public, away, features=True)
    released = _named(f"features-30(paper=true,features={assets.features})")
    yield LevelAttack("T2", f"features-30, released{kind}", public, released, in_pixels=False, features=True)
    yield LevelAttack("T2", f"pgd-{steps}, victim's head", public, pgd)
    if assets.own_head is not None:
        yield LevelAttack("T2", f"pgd-{steps}, own head", assets.own_head(assets.victim.classifier), pgd)
    for name in dict.fromkeys(on_public):
        yield LevelAttack("T2", f"{name}, public", public, _named(name), in_pixels=_in_pixels(name))
    tuned = _TUNED * steps
    yield LevelAttack(
        "T2+", f"diverse-{tuned} beside random tokens", public, _named(f"diverse-{tuned}(tokens={GUESSED})")
    )
    yield LevelAttack("T2+", f"pna-patchout, {steps} steps", public, _named(f"pna-patchout(steps={steps},decay=1)"))
    for number, surrogate in enumerate(assets.surrogates, start=1):
        yield LevelAttack("T3", f"pgd-{steps}, set {number}", assets.head(surrogate), pgd)
    for count in range(1, len(assets.surrogates) + 1):
        mean = MeanOf([public, *map(assets.head, assets.surrogates[:count])])
        yield LevelAttack("T4", f"pgd-{steps}, bare and {count} set{'s' * (count > 1)}", mean, pgd)
    square = _named(f"square(queries={queries})", stops=True)
    yield LevelAttack("T5", f"square, {queries} queries", victim, square, queries_victim=True)
    yield LevelAttack("T6", away_name, victim, away, queries_victim=True, features=True)
    yield LevelAttack("T6", f"pgd-{steps}", victim, _pgd(steps, stops=True), queries_victim=True)
    for name in dict.fromkeys(white_box):
        if name not in (f"pgd-{steps}", away_name):  # they run anyway
            named = _named(name, stops=True)
            yield LevelAttack("T6", name, victim, named, queries_victim=True, in_pixels=_in_pixels(name))
    for exposed, extracted in assets.extracted:
        yield LevelAttack("T7", f"pgd-{steps}, from {exposed}", assets.head(extracted), pgd)
    if assets.bank:
        bank = tuple(map(assets.head, assets.bank))
        yield LevelAttack("T8", f"pgd-{steps} over {len(bank)} sets", MeanOf(bank), pgd, judges=bank)


# An attacker who cannot query the victim runs all steps, to the worst point, instead of stopping at the first success.


def _pgd(steps: int, stops: bool = False) -> Callable[[float], Attack]:
    return lambda eps: PGD(Linf(eps), steps=steps, stop_when_fooled=stops)


def _named(name: str, stops: bool = False) -> Callable[[float], Attack]:
    return lambda eps: make(name, eps=eps) if stops else training_form(make(name, eps=eps))


def _in_pixels(name: str) -> bool:
    return pixels_per_unit(make(name, eps=RELEASED_EPS)) == 1
