"""Further token sets for the same backbone: the attacker's surrogates, the defender's bank, and trained controls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitadel.adapters.robustness_tokens import Tokened
from vitadel.adapters.token_files import load_tokens
from vitadel.attacks.features import pixels_per_unit
from vitadel.defenses.building import Recipe, build_recipe
from vitadel.defenses.harden import run_harden
from vitadel.defenses.recipes import compose
from vitadel.errors import Mistake
from vitadel.runtime.processes import Processes

__all__ = ["Trainer"]

_CONTROLS: dict[str, dict[str, Any]] = {
    "tokens trained on noise": {"objective.attack": "noise"},
    "tokens trained to change nothing": {"objective.attack": "noise", "objective.recovery": 0.0},
}
"""How the recipe is changed for tokens that never saw an attack."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains by the defender's recipe, which attackers are taken to know, on the same frozen classifier.

    Each set has a seed of its own, from which both its start and its choice of images come; `data` is a spec of other
    images, None those of the recipe. Sets are run folders below `folder`, so that a resumed ladder finds them again.
    """

    victim: Tokened
    recipe: str | None
    data: str | None
    data_root: str | Path | None
    folder: Path
    processes: Processes
    skip_bad: bool = False
    shown: bool = False

    @cached_property
    def _built(self) -> Recipe | None:
        return None if self.recipe is None else build_recipe(compose(self.recipe), self.recipe)

    @property
    def scale(self) -> float:
        """Of the noise that tokens start from."""
        return float(getattr(None if self._built is None else self._built.adapter, "scale", 0.01))

    def several(self, name: str, count: int, seed: int) -> tuple[Tokened, ...]:
        return tuple(self.train(f"{name} {number + 1}", seed + number) for number in range(count))

    def controls(self, seed: int) -> dict[str, Tokened]:
        """Tokens that never saw an attack, by what they saw instead; none without a recipe.

        Noise has the budget that the attack of the recipe has in pixels.
        """
        if self._built is None:
            return {}
        budget = self._built.threat.eps * pixels_per_unit(self._built.objective.attack)
        return {
            name: self.train(name, seed + number, {**changes, "threat.eps": budget})
            for number, (name, changes) in enumerate(_CONTROLS.items())
        }

    def train(self, name: str, seed: int, changes: Mapping[str, Any] | None = None) -> Tokened:
        assert self.recipe is not None, "an order without a recipe trains nothing"
        overrides: dict[str, Any] = {
            "adapter.count": len(self.victim.tokens),
            "adapter.placement": self.victim.placement,
            "adapter.seed": seed,
            "train.seed": seed,
            "train.tracker": "none",
            "data.test": None,
            **({} if self.data is None else {"data.train": self.data}),
            **(changes or {}),
        }
        title = f"{self.recipe} ({name})"
        out = self.folder / name.replace(" ", "-")
        try:
            run_harden(
                build_recipe(compose(self.recipe, None, overrides), title),
                title,
                self.processes,
                out=out,
                resume=True,
                shown=self.shown,
                data_root=self.data_root,
                model=self.victim.classifier,
            )
        except Mistake as mistake:
            raise Mistake(
                f"the ladder could not train tokens ({name}) by '{self.recipe}': {mistake} Say with --attacker-data on "
                "which images attackers train, or bring token files with --surrogates and --bank."
            ) from mistake
        return load_tokens(out / "weights" / "best.safetensors", self.victim.classifier).eval()
