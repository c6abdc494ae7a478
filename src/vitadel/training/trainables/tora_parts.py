"""TORA-ViT (Li & Xu, CVPR 2023): train adapters and fusion first, then one fusion for each lambda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.tora.tora_files import load_tora, parts_file, save_fusion, save_tora
from vitadel.adapters.tora.tora_settings import LOSSES_AT, ToraSettings, check_trade_off
from vitadel.adapters.tora.tora_vit import BranchClassifier, Tora, trainable_parameters
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError, check_known
from vitadel.training.interfaces import Adapter

_FACTORS = "classifier.attention_factors"


@dataclass(frozen=True)
class ToraParts(ToraSettings):
    """Phase 1 without `start` trains all parts of `kind`; phase 2 with it trains the fusion alone, for one `trade_off`.

    `start` is the run folder of phase 1, or its weights. `trade_off` is lambda, the weight of the robust loss. Kinds
    without a fusion have one phase, with a lambda. `train_heads` also trains the heads in phase 2. All other settings
    of phase 2 must be those of phase 1. `loss_at` says where the losses, and attacks in training, look: each at its
    own head, or all at the joint prediction. The slides leave this open; "own" is our choice.
    """

    secret: ClassVar[bool] = False

    start: str | None = None
    trade_off: float | None = None
    train_heads: bool = False
    loss_at: str = "own"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trade_off is not None:
            check_trade_off(self.trade_off)
        if self.fuses and (self.start is None) != (self.trade_off is None):
            raise UserError(
                "TORA has two phases: without start and trade_off all parts are trained, with both only the fusion "
                f"for one lambda. Got start {self.start!r} and trade_off {self.trade_off!r}."
            )
        if not self.fuses and (self.start is not None or self.trade_off is None):
            raise UserError(f"kind '{self.kind}' has no fusion and so one phase: give trade_off, lambda, and no start.")
        check_known("loss_at", self.loss_at, LOSSES_AT, " of TORA")
        if len(self.branches) == 1 and self.loss_at != "own":
            raise UserError(f"kind '{self.kind}' has one head, so loss_at '{self.loss_at}' has no effect. Remove it.")

    def attach(self, model: Classifier) -> nn.Module:
        if self.start is None:
            tora = Tora(model, self.settings, seed=self.seed, trade_off=self.trade_off)
        else:
            tora = load_tora(parts_file(self.start), model)
            self.check_start(tora.settings)
            tora.trade_off = self.trade_off
            trained = trainable_parameters(tora, 2, heads=self.train_heads)
            for name, parameter in tora.named_parameters():
                parameter.requires_grad_(name in trained)
        tora.loss_at = self.loss_at
        return tora

    @property
    def settings(self) -> ToraSettings:
        return ToraSettings(**{each.name: getattr(self, each.name) for each in fields(ToraSettings)})

    def check_start(self, first: ToraSettings) -> None:
        """Phase 2 trains the fusion that phase 1 made; other settings would be recorded and have no effect."""
        ours, theirs = asdict(self.settings), asdict(first)
        wrong = [name for name in ours if ours[name] != theirs[name]]
        if wrong:
            said = "; ".join(f"adapter.{name} is {ours[name]}, phase 1 has {theirs[name]}" for name in wrong)
            needed = " ".join(f"adapter.{name}={theirs[name]}" for name in wrong)
            raise UserError(
                f"phase 2 has other settings than its start '{self.start}': {said}. Phase 2 trains the fusion of phase "
                f"1 as it is: set {needed}, or give an adapter.start that was trained with these settings."
            )

    def without_start(self, starts: Sequence[Adapter]) -> ToraParts:
        if self.start is None:
            return self
        for first in starts:
            self.check_start(cast(ToraParts, first).settings)
        return replace(self, start=None, trade_off=None)

    def shown(self, adapted: nn.Module) -> nn.Module:
        return adapted if self.loss_at == "joint" else BranchClassifier(cast(Tora, adapted), "rob")

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        trained = {name: each.detach() for name, each in adapted.named_parameters() if each.requires_grad}
        factors = cast(Tora, adapted).classifier.attention_factors  # AAS-AT changes them between epochs
        return trained if factors is None else {**trained, _FACTORS: factors}

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None:
        own = dict(adapted.named_parameters())
        with torch.no_grad():
            for name, each in state.items():
                if name != _FACTORS:
                    own[name].copy_(each)
        if _FACTORS in state:
            cast(Tora, adapted).classifier.set_attention_factors(state[_FACTORS].tolist())

    def save(self, adapted: nn.Module, path: Path) -> None:
        tora = cast(Tora, adapted)
        if self.start is None:
            save_tora(tora, path)
        else:
            save_fusion(tora, path, self.trade_off)

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        classifier = cast(Tora, adapted).classifier
        if self.start is None:
            return load_tora(path, classifier)
        return load_tora(parts_file(self.start), classifier, path)
