"""Further token sets for the same backbone: the attacker's surrogates, the defender's bank, and trained controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitadel.adapters.robustness_tokens import Tokened
from vitadel.adapters.token_files import load_tokens
from vitadel.defenses.building import build_recipe
from vitadel.defenses.harden import run_harden
from vitadel.defenses.recipes import compose
from vitadel.errors import Mistake
from vitadel.runtime.processes import Processes

__all__ = ["Trainer", "read_sets"]

CONTROLS: dict[str, dict[str, Any]] = {
    "tokens trained on noise": {"objective.attack": "noise"},
    "tokens trained to change nothing": {"objective.attack": "noise", "objective.recovery": 0.0},
}
"""How the recipe is changed for tokens that never saw an attack."""


@dataclass(frozen=True)
class Trainer:
    """Trains by the defender's recipe, which attackers are taken to know, on the same frozen classifier.

    Each set has a seed of its own, from which both its start and its choice of images come; `data` is a spec of other
    images, None those of the recipe. Sets are run folders below `folder`, so that a resumed ladder finds them again.
    """

    victim: Tokened
    recipe: str
    data: str | None
    data_root: str | Path | None
    folder: Path
    processes: Processes
    shown: bool = False

    def train(self, name: str, seed: int, changes: Mapping[str, Any] | None = None) -> Tokened:
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
        document = compose(self.recipe, None, overrides)
        title = f"{self.recipe} ({name})"
        out = self.folder / name.replace(" ", "-")
        try:
            run_harden(
                build_recipe(document, title),
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
                "which images, or bring token files with --surrogates and --bank."
            ) from mistake
        return load_tokens(out / "weights" / "best.safetensors", self.victim.classifier).eval()


def read_sets(victim: Tokened, files: Sequence[str], allow_readable: bool) -> tuple[Tokened, ...]:
    """Token sets from files, all for the victim's backbone."""
    return tuple(load_tokens(file, victim.classifier, allow_readable=allow_readable).eval() for file in files)
