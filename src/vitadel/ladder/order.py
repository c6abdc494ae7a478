"""What a ladder is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from vitadel.attacks.names import make
from vitadel.errors import Mistake
from vitadel.ladder.levels import LEVELS, check_levels

__all__ = ["BUDGETS", "LadderOrder"]

BUDGETS = tuple(level / 255 for level in (1, 2, 4, 8))


@dataclass(frozen=True)
class LadderOrder:
    """What a ladder is asked to do: everything, beside victim and data, that decides its result.

    `surrogates` and `bank` are numbers of token sets to train, or token files that are there already; the victim's own
    tokens are one more set of the bank. `recipe` is how the tokens were trained, `attacker_data` on which other images
    attackers train theirs. `extraction` is (images to ask about, steps of the fit).
    """

    eps: tuple[float, ...] = BUDGETS
    levels: tuple[str, ...] = tuple(LEVELS)
    steps: int = 30
    queries: int = 5000
    white_box: tuple[str, ...] = ("apgd-ce", "apgd-t")
    surrogates: int | tuple[str, ...] = 2
    bank: int | tuple[str, ...] = 2
    recipe: str = "tokens/deit-tiny"
    attacker_data: str | None = None
    extraction: tuple[int, int] = (128, 200)
    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    skip_bad: bool = False
    allow_readable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", check_levels(self.levels))
        object.__setattr__(self, "eps", tuple(sorted(set(self.eps))))
        if not self.levels or not self.eps or not all(0 < eps < 1 for eps in self.eps):
            raise Mistake("the ladder needs at least one level, and budgets above 0 and below 1, such as 1/255,4/255")
        for name in ("steps", "queries", "batch_size"):
            if getattr(self, name) < 1:
                raise Mistake(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("surrogates", "bank"):
            count = getattr(self, name)
            if isinstance(count, int) and count < 0:
                raise Mistake(f"{name} is a number of token sets to train, or token files; got {count}")
        for attack in self.white_box:
            make(attack, eps=self.eps[0])  # a wrong name is told before anything is loaded
