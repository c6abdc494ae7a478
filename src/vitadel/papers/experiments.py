"""Experiments that decide a question: contrasts and the rule, written down before any result is seen."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LEVEL = 0.05
"""The chance of a wrong decision about an effect that is not there, over all contrasts of a kind."""

RULE = (
    "Of each seed, the difference of every test image is averaged. The estimate is the mean over seeds. Its interval "
    "has two parts: a paired bootstrap over images (their differences averaged over seeds), and Student's interval of "
    "the seeds' means. Both half widths are added as squares. {kinds} Confirmed: the whole interval lies above 0. "
    "Refuted: otherwise, if the whole interval lies below what would be worth it. Undecided: anything else, and "
    "whatever has fewer than two seeds."
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Contrast(_Part):
    """The mean of the cells `plus` less that of the cells `minus`.

    With `column`, both name rows; with `rows`, both name columns, whose differences are averaged over these rows.
    `worth` is the smallest difference that would matter, in the unit of the page. `primary` contrasts decide the
    question; the others describe.
    """

    id: str
    question: str
    column: str | None = None
    rows: tuple[str, ...] = ()
    plus: tuple[str, ...] = Field(min_length=1)
    minus: tuple[str, ...] = Field(min_length=1)
    worth: float = Field(default=0.0, ge=0)
    primary: bool = True

    def cells(self, side: Literal["plus", "minus"]) -> list[tuple[str, str]]:
        """(row, column) of all cells of one side."""
        names = self.plus if side == "plus" else self.minus
        if self.column is not None:
            return [(name, self.column) for name in names]
        return [(row, name) for row in self.rows for name in names]


class Experiment(_Part):
    """`design` says what is the same in all arms, how many images are judged and which controls there are; `known` is
    what was known when it was written. With `shared_start`, all seeds start from one trained model, that of seed 0."""

    question: str
    design: str
    known: str
    seeds: int = Field(ge=2)
    shared_start: bool = False
    contrasts: tuple[Contrast, ...] = Field(min_length=1)

    def level(self, contrast: Contrast) -> float:
        """The level of a contrast's interval: errors are shared among all that are primary, or are not (Bonferroni)."""
        return 1 - LEVEL / sum(each.primary == contrast.primary for each in self.contrasts)

    @property
    def rule(self) -> str:
        """The rule as text, with the levels of this experiment."""
        said = [
            f"{name} contrasts have intervals of {100 * self.level(first):.4g} %: {100 * LEVEL:g} % of error for all "
            f"{count} together."
            for primary, name in ((True, "Primary"), (False, "Secondary"))
            if (count := len(alike := [each for each in self.contrasts if each.primary == primary]))
            for first in alike[:1]
        ]
        return RULE.format(kinds=" ".join(said))

    def text(self) -> str:
        """Question, design, contrasts and rule, for a recipe."""
        contrasts = (
            f"{'contrast' if each.primary else 'second'}: {each.question} "
            f"[{' + '.join(each.plus)} against {' + '.join(each.minus)}, {each.column or ', '.join(each.rows)}; "
            f"worth {each.worth:g}]"
            for each in self.contrasts
        )
        lines = f"Question: {self.question}", f"Design: {self.design}", f"Known before: {self.known}"
        return "\n".join([*lines, *contrasts, f"Rule: {self.rule}"])
