"""Attacks inside training: on the bare model in eval or train mode, with mixed labels where an attack takes them."""

from __future__ import annotations

from typing import Literal, Self

from torch import Tensor, nn

from vitadel.attacks.losses import hard_labels
from vitadel.attacks.pgd import PGD
from vitadel.attacks.settings import threats_in
from vitadel.attacks.wrappers import Averaged, Restarts
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Ensemble


def run_inner_attack(
    attack: Attack,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rng: SampleRNG | None = None,
    mode: Literal["eval", "train"] = "eval",
) -> Tensor:
    """Attacked images to train on; the model's modes, flags and gradients are left as they are.

    In mode 'train' the attack sees the model in the modes that training has set: dropout draws from torch's global
    generator, and every forward pass of the attack updates the running statistics of batch norm.

    PGD gets mixed labels, also when it is repeated or averaged; other attacks get the likeliest class.
    """
    threats = threats_in(attack)
    if threats and all(threat.eps == 0 for threat in threats):
        return x.detach()
    seen = _KeepsModes(model) if mode == "train" else model
    return attack(seen, x, y if _takes_mixed_labels(attack) else hard_labels(y), rng)


class _KeepsModes(nn.Module):
    """A model whose train and eval modes attacks cannot switch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Self:
        return self

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def _takes_mixed_labels(attack: Attack) -> bool:
    if isinstance(attack, Restarts | Averaged):
        return _takes_mixed_labels(attack.attack)
    if isinstance(attack, Ensemble):
        return all(_takes_mixed_labels(member) for _, member in attack.members())
    return isinstance(attack, PGD)
