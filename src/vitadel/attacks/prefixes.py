"""What may stand before an attack's name and go around it: 'eot:20+pgd-100'; one line here adds a prefix."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from vitadel.attacks.attention_scaling.aas import aas, aas_bpda, aas_paper, scale
from vitadel.attacks.views import Averaged, Targeted
from vitadel.types import Attack

__all__ = ["PREFIXES", "Prefix"]


@dataclass(frozen=True)
class Prefix:
    """A wrapper from an attack and settings; `value` names the setting that stands after the colon."""

    wrap: Callable[..., Attack]
    about: str
    value: str | None = None
    needs_vit: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """Names and defaults of what may stand in brackets."""
        return {p.name: p.default for p in list(inspect.signature(self.wrap).parameters.values())[1:]}

    def describe(self) -> str:
        """The line for a list, with the settings that may stand in brackets."""
        names = ", ".join(name for name in self.settings if name != self.value)
        return f"around an attack: {self.about}{f' [{names}]' if names else ''}"

    def title(self, name: str) -> str:
        """How it is written, e.g. 'eot:TIMES+'."""
        return f"{name}:{self.value.upper()}+" if self.value else f"{name}+"


def eot(attack: Attack, times: int = 20) -> Attack:
    return Averaged(attack, times)


def targeted(attack: Attack, target: str = "least") -> Attack:
    return Targeted(attack, target)


PREFIXES: dict[str, Prefix] = {
    "aas": Prefix(aas, "through attention scaled by adaptive factors (Jain & Dutta 2024)", needs_vit=True),
    "aas-bpda": Prefix(aas_bpda, "the same, with only the gradients scaled", needs_vit=True),
    "aas-paper": Prefix(aas_paper, "the same by the letter of the paper, for comparison", needs_vit=True),
    "scale": Prefix(scale, "through attention scaled by one factor", "factor", needs_vit=True),
    "eot": Prefix(eot, "expectation over randomness: every pass is the mean of several (Athalye et al. 2018)", "times"),
    "targeted": Prefix(targeted, "towards a class: its number, or next, least, random", "target"),
}
