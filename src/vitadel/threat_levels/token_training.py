"""Further token sets for the same backbone: the attacker's surrogates, the defender's bank, and trained controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.adapters.tokens.token_files import load_tokens
from vitadel.attacks.settings import pixels_per_unit
from vitadel.errors import UserError
from vitadel.runtime.distributed import Processes
from vitadel.training.recipes.build import Recipe, build_recipe
from vitadel.training.recipes.compose import compose, rows
from vitadel.training.run import open_training, run_harden

_AS_WRITTEN: dict[str, Any] = {}
_CONTROLS: dict[str, dict[str, Any]] = {
    "tokens trained on noise": {"objective.attack": "noise"},
    "tokens trained to change nothing": {"objective.attack": "noise", "objective.recovery": 0.0},
}
"""Changes of the recipe for tokens that are trained without an attack."""


@dataclass(frozen=True)
class TokenRecipe:
    """The defender's recipe, which attackers are assumed to know; `text` is the name that was given."""

    text: str
    name: str
    row: str | None

    def build(self, changes: Mapping[str, Any] = _AS_WRITTEN, what: str = "") -> Recipe:
        """Build it without test data and tracker, which no set here needs; `what` is to be trained, for messages."""
        overrides = {"train.tracker": "none", "data.test": None, **changes}
        return build_recipe(compose(self.name, self.row, overrides), f"{self.text} ({what})" if what else self.text)

    @property
    def scale(self) -> float:
        """Scale of the noise that tokens start from."""
        return float(getattr(self.build().adapter, "scale", 0.01))

    @property
    def features(self) -> str:
        """Which features the defense, and so the paper's attack, compares: tokens, or one pooled vector per image."""
        return str(getattr(self.build().objective, "features", "tokens"))


def read_recipe(text: str) -> TokenRecipe:
    """Read NAME or NAME:ROW of a recipe or a file; a `UserError` if it does not exist or trains no tokens."""
    name, _, row = (text, "", "") if ":" not in text or text.endswith((".yaml", ".yml")) else text.rpartition(":")
    there = rows(name)
    if there and not row:
        raise UserError(
            f"--recipe {text}: this recipe is a table, and tokens are trained by one of its rows. Name it, as in "
            f"--recipe {name}:{there[0]}. Known rows: {', '.join(there)}."
        )
    recipe = TokenRecipe(text, name, row or None)
    use = dict(recipe.build().document.get("adapter") or {}).get("use", "whole_model")
    if use != "tokens":
        raise UserError(
            f"--recipe {text} trains no robustness tokens (its adapter is {use}). Name the recipe of the victim's "
            "tokens, such as tokens/deit-tiny, or a file like it."
        )
    return recipe


def control_changes(recipe: TokenRecipe) -> dict[str, dict[str, Any]]:
    """Changes of the recipe for tokens that are trained without an attack, by the name of the control.

    Noise has the budget that the attack of the recipe has in pixels.
    """
    built = recipe.build()
    budget = built.threat.eps * pixels_per_unit(built.objective.attack)
    return {name: {**changes, "threat.eps": budget} for name, changes in _CONTROLS.items()}


@dataclass(frozen=True, eq=False)
class TokenTraining:
    """How token sets are trained on the victim's frozen classifier; `data` None means the recipe's own images.

    The defender's sets have as many tokens as the victim, in the same place (`as_victim`); attackers only know what the
    recipe says.
    """

    victim: TokenClassifier
    recipe: TokenRecipe
    data: str | None
    data_root: str | Path | None
    as_victim: bool = True

    def build(self, what: str, seed: int, changes: Mapping[str, Any] = _AS_WRITTEN) -> Recipe:
        """The recipe for one set. Each has its own seed, for its initial tokens and its choice of images."""
        overrides: dict[str, Any] = {
            **(self._victims_settings() if self.as_victim else {}),
            "adapter.seed": seed,
            "train.seed": seed,
            **({} if self.data is None else {"data.train": self.data}),
            **changes,
        }
        return self.recipe.build(overrides, what)

    def _victims_settings(self) -> dict[str, Any]:
        layers = self.victim.layers
        return {
            "adapter.count": len(self.victim.tokens) // len(layers),
            "adapter.placement": self.victim.placement,
            "adapter.layers": list(layers),
        }

    def check(self, processes: Processes, variants: Mapping[str, Mapping[str, Any]]) -> None:
        """Build the recipe with each variant's changes and open its data, so that a `UserError` comes now."""
        built = [self.build(what, 0, changes) for what, changes in variants.items()]
        open_training(built[0], processes, self.data_root, self.victim.classifier)


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains in run folders below `folder`, so that a resumed run finds its sets."""

    folder: Path
    processes: Processes
    show_progress: bool = False

    def train_several(
        self, training: TokenTraining, name: str, count: int, seed: int, changes: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[TokenClassifier, ...]:
        """`count` sets; each takes the next of the `changes`, over and over."""
        turns = [changes[number % len(changes)] if changes else _AS_WRITTEN for number in range(count)]
        return tuple(
            self.train(training, f"{name} {number + 1}", seed + number, turn) for number, turn in enumerate(turns)
        )

    def train_controls(self, training: TokenTraining, seed: int) -> dict[str, TokenClassifier]:
        """Train tokens without an attack, by the name of the control."""
        changes = control_changes(training.recipe)
        return {name: self.train(training, name, seed + k, changes[name]) for k, name in enumerate(changes)}

    def train(
        self, training: TokenTraining, name: str, seed: int, changes: Mapping[str, Any] = _AS_WRITTEN
    ) -> TokenClassifier:
        out = self.folder / name.replace(" ", "-")
        try:
            run_harden(
                training.build(name, seed, changes),
                f"{training.recipe.text} ({name})",
                self.processes,
                out=out,
                resume=True,
                show_progress=self.show_progress,
                data_root=training.data_root,
                model=training.victim.classifier,
            )
        except UserError as mistake:
            raise UserError(f"could not train tokens ({name}) by '{training.recipe.text}': {mistake}") from mistake
        return load_tokens(out / "weights" / "best.safetensors", training.victim.classifier).eval()
