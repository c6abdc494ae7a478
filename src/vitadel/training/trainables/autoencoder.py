"""Masked image modeling: train the backbone together with a decoder, and save the classifier without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.masked_autoencoder import Decoder, MaskedAutoencoder, encoder_of
from vitadel.backbones.checkpoints import load_classifier, save_classifier
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.quantities import AT_LEAST_ONE, BETWEEN, SEED, check_ranges


@dataclass(frozen=True)
class Autoencoder:
    """A decoder of `depth` blocks with `width` channels and `heads` heads; a share `mask_ratio` of patches is hidden.

    The defaults are those of MIMIR; `seed` initializes the decoder. The head of the saved classifier is untrained.
    """

    secret: ClassVar[bool] = False
    trains_model: ClassVar[bool] = True
    keeps_head: ClassVar[bool] = True

    mask_ratio: float = 0.75
    width: int = 128
    depth: int = 2
    heads: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, mask_ratio=BETWEEN, width=AT_LEAST_ONE, depth=AT_LEAST_ONE, heads=AT_LEAST_ONE, seed=SEED)
        if self.width % self.heads or self.width % 4:
            raise UserError(f"width must be a multiple of heads ({self.heads}) and of 4, got {self.width}")

    def check_model(self, model: Classifier) -> None:
        encoder_of(model)

    def start_warning(self) -> str:
        return "the saved model has an untrained head: fine-tune it with a recipe whose model.name is this run folder."

    def attach(self, model: Classifier) -> nn.Module:
        encoder = encoder_of(model)
        for unused in (encoder.fc_norm, encoder.head):
            unused.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            decoder = Decoder(encoder, self.width, self.depth, self.heads)
        return MaskedAutoencoder(model, decoder, self.mask_ratio)

    def shown(self, adapted: nn.Module) -> nn.Module:
        return adapted

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        return adapted.state_dict()

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None:
        adapted.load_state_dict(state)

    def save(self, adapted: nn.Module, path: Path) -> None:
        save_classifier(cast(MaskedAutoencoder, adapted).classifier, path)

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        return load_classifier(path)
