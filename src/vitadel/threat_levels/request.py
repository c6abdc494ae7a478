"""The settings of a run over the threat levels."""

from __future__ import annotations

from dataclasses import dataclass

from vitadel.attacks.parse import make
from vitadel.attacks.threats import make_threat
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import needs_calibration
from vitadel.evaluation.engine.run import RunRequest
from vitadel.evaluation.engine.stages import rules_of
from vitadel.threat_levels.levels import LEVELS, check_levels

BUDGETS = tuple(level / 255 for level in (1, 2, 4, 8))
TOKEN_SETS = {"surrogates": ("T3", "T4"), "bank": ("T8",)}
"""Token sets besides the victim's, and the levels that use them."""


@dataclass(frozen=True)
class ThreatLevelsRequest(RunRequest):
    """Everything beside victim and data that decides the result.

    `white_box` are attacks through the tokens (T6), `public` those on the backbone without them (T2).
    `surrogates` and `bank` are numbers of token sets to train, or token files; the victim's own tokens are one more set
    of the bank. `recipe`, NAME or NAME:ROW, is how the tokens were trained, which attackers are assumed to know;
    `attacker_data` are images for them to train and fit on. Without it they train on those of the recipe, and fit (T7)
    to the training split of the audited data or, if there is none, to images that are not audited. `extraction` is
    (images to query, steps of the fit).
    """

    eps: tuple[float, ...] = BUDGETS
    levels: tuple[str, ...] = tuple(LEVELS)
    steps: int = 30
    queries: int = 5000
    white_box: tuple[str, ...] = ("apgd-ce", "apgd-t")
    public: tuple[str, ...] = ()
    surrogates: int | tuple[str, ...] = 2
    bank: int | tuple[str, ...] = 2
    recipe: str | None = None
    attacker_data: str | None = None
    extraction: tuple[int, int] = (128, 200)
    allow_readable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", check_levels(self.levels))
        object.__setattr__(self, "eps", tuple(sorted(set(self.eps))))
        if not self.levels:
            raise UserError(f"no threat level is given; choose from {', '.join(LEVELS)}")
        _check_budgets(self.eps)
        for name in ("steps", "queries"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.extraction) < 1:
            raise UserError(
                f"extraction is (images to query, steps of the fit), each at least 1; got {self.extraction}"
            )
        for name in TOKEN_SETS:
            count = getattr(self, name)
            if isinstance(count, int) and count < 0:
                raise UserError(f"{name} is a number of token sets to train, or token files; got {count}")
        for flag, names in (("--white-box", self.white_box), ("--public", self.public)):
            for name in names:
                _check_comparable(flag, name, self.eps[0])
        if self.public and "T2" not in self.levels:
            raise UserError(f"--public {','.join(self.public)} is for T2, which is not among --levels; add it")
        trains = [
            f"--{name} {self.to_train(name)} ({', '.join(levels)})"
            for name, levels in TOKEN_SETS.items()
            if self.to_train(name)
        ]
        if trains and self.recipe is None:
            raise UserError(
                f"token sets must be trained for {' and '.join(trains)}. Give the recipe of the tokens with --recipe, "
                "e.g. --recipe tokens/deit-tiny, or token files, or leave these levels out with --levels."
            )

    def to_train(self, sets: str) -> int:
        """How many "surrogates", or sets of the "bank", the chosen levels need that are not in files."""
        wanted = getattr(self, sets)
        return wanted if isinstance(wanted, int) and set(TOKEN_SETS[sets]) & set(self.levels) else 0

    def set_files(self, sets: str) -> tuple[str, ...]:
        """The files of those that the chosen levels need."""
        wanted = getattr(self, sets)
        return () if isinstance(wanted, int) or not set(TOKEN_SETS[sets]) & set(self.levels) else wanted


def _check_budgets(budgets: tuple[float, ...]) -> None:
    if not budgets:
        raise UserError("threat levels need at least one budget, such as 1/255,4/255")
    for eps in budgets:
        make_threat("linf", eps)  # refuses negative budgets and gray levels
        if eps in (0, 1):
            raise UserError(f"budgets must be above 0 and below 1, for pixels in [0, 1]; got {eps:g}. Try 1/255,4/255")


def _check_comparable(flag: str, name: str, eps: float) -> None:
    """Refuse wrong names, and attacks that cannot be compared here, before anything is loaded."""
    attack = make(name, eps=eps)
    if rules_of(attack) is not None:
        raise UserError(f"{flag} {name}: this attack has its own threat model and no budget in pixels to compare by")
    if needs_calibration(attack):
        raise UserError(f"{flag} {name}: this attack needs calibration images; run it with a plain `vitadel audit`")
