"""Robustness tokens (Pulfer et al., ECCV 2024): train secret tokens for a frozen backbone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.adapters.tokens.token_files import load_tokens, save_tokens
from vitadel.backbones.classifier import Classifier
from vitadel.errors import check_known
from vitadel.instrument.tokens import PLACEMENTS, check_layers, check_placement, token_width


@dataclass(frozen=True)
class SecretTokens:
    """`count` tokens, initialized with normal noise times `scale`, after the class and register tokens (`placement`).

    In the paper they join before the first block; here as many join before each of the blocks `layers`. Without a
    `seed` the noise comes from the operating system: with a seed from a recipe anyone can train the same tokens again.
    In the paper attacks in training do not see the tokens; with `through` they do.
    """

    secret: ClassVar[bool] = True
    keeps_head: ClassVar[bool] = True

    count: int = 10
    scale: float = 0.01
    placement: str = "prefix"
    layers: tuple[int, ...] = (0,)
    seed: int | None = None
    through: bool = False

    def __post_init__(self) -> None:
        fresh_tokens(1, min(self.count, 1), self.scale, self.seed or 0)  # validates these settings
        check_known("placement of tokens", self.placement, PLACEMENTS)

    def check_model(self, model: Classifier) -> None:
        """A `UserError` if this model takes no tokens, or not at this place."""
        token_width(model)
        check_placement(model, self.placement)
        check_layers(model, self.layers, self._number)

    @property
    def _number(self) -> int:
        return self.count * len(self.layers)

    def start_warning(self) -> str | None:
        if self.seed is None:
            return None
        return "adapter.seed is in the recipe: anyone with it can train the same tokens; remove it to deploy them."

    def attach(self, model: Classifier) -> nn.Module:
        seed = secrets.randbits(62) if self.seed is None else self.seed
        tokens = fresh_tokens(token_width(model), self._number, self.scale, seed)
        return TokenClassifier(model, tokens, placement=self.placement, layers=self.layers)

    def shown(self, adapted: nn.Module) -> nn.Module:
        return adapted if self.through else cast(TokenClassifier, adapted).classifier

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        tokened = cast(TokenClassifier, adapted)
        salt = torch.frombuffer(bytearray(tokened.salt), dtype=torch.uint8)
        return {"tokens": tokened.tokens.detach(), "salt": salt}

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None:
        tokened = cast(TokenClassifier, adapted)
        with torch.no_grad():
            tokened.tokens.copy_(state["tokens"])
        tokened.salt = bytes(state["salt"].tolist())

    def save(self, adapted: nn.Module, path: Path) -> None:
        save_tokens(cast(TokenClassifier, adapted), path, asdict(self))

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        return load_tokens(path, cast(TokenClassifier, adapted).classifier).eval()
