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
FEATURE_LEVELS = ("T0", "T2", "T6")
"""Levels with attacks that move features and need no classifier."""
WHITE_BOX = ("apgd-ce", "apgd-t")
"""Attacks through the tokens (T6) unless others are named."""
TOKEN_SETS = {"surrogates": ("T3", "T4"), "bank": ("T8",)}
"""Token sets besides the victim's, and the levels that use them."""


@dataclass(frozen=True)
class ThreatLevelsRequest(RunRequest):
    """Everything beside victim and data that decides the result.

    `white_box` are attacks through the tokens (T6; None means `WHITE_BOX`), `public` those on the backbone without them
    (T2). `guess` are numbers of tokens that attackers try who do not know the victim's: they train surrogates (T3, T4)
    with one number after the other instead of the recipe's, and fit each number (T7; 10, as in the paper, without it).
    `features_only` judges features, of models without a head, too: the levels that move features are run, and cosines
    are measured.
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
    white_box: tuple[str, ...] | None = None
    public: tuple[str, ...] = ()
    surrogates: int | tuple[str, ...] = 2
    bank: int | tuple[str, ...] = 2
    recipe: str | None = None
    attacker_data: str | None = None
    extraction: tuple[int, int] = (128, 200)
    guess: tuple[int, ...] = ()
    features_only: bool = False
    allow_readable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", check_levels(self.levels))
        if self.features_only:
            self._keep_feature_levels()
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
        for flag, level, names in (("--white-box", "T6", self.white_box), ("--public", "T2", self.public)):
            for name in names or ():
                _check_comparable(flag, name, self.eps[0])
            if names and level not in self.levels:
                raise UserError(
                    f"{flag} {','.join(names)} is for {level}, which is not among --levels {','.join(self.levels)}: "
                    f"add {level}, or leave {flag} out"
                )
        if self.white_box is None:
            object.__setattr__(self, "white_box", WHITE_BOX if "T6" in self.levels else ())
        self._check_guess()
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

    def _keep_feature_levels(self) -> None:
        if self.levels == tuple(LEVELS):
            object.__setattr__(self, "levels", FEATURE_LEVELS)
        for level in self.levels:
            if level not in FEATURE_LEVELS:
                raise UserError(
                    f"{level} is judged by a classifier: of features alone there are {', '.join(FEATURE_LEVELS)}. "
                    "Leave it out of --levels, or give the victim's head with --head instead of --features"
                )
        if self.white_box or self.public:
            raise UserError("--white-box and --public attack a classifier: leave them out, or leave out --features")
        object.__setattr__(self, "white_box", ())

    def _check_guess(self) -> None:
        if not self.guess:
            return
        numbers = ",".join(map(str, self.guess))
        if min(self.guess) < 1 or len(set(self.guess)) < len(self.guess):
            raise UserError(f"--guess is a list of numbers of tokens, each at least 1 and none twice; got {numbers}")
        if not self.to_train("surrogates") and "T7" not in self.levels:
            raise UserError(
                f"--guess {numbers} is for attackers who train tokens (T3, T4) or fit them (T7): add one of these to "
                "--levels, and for T3 and T4 give --surrogates as a number"
            )

        trained = self.to_train("surrogates")
        if 0 < trained < len(self.guess):
            raise UserError(
                f"--guess names {len(self.guess)} numbers of tokens, and --surrogates {trained} sets are trained, so "
                f"some would not be tried: give --surrogates {len(self.guess)}"
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
