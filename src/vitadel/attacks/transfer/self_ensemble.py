"""Self-Ensemble (Naseer et al., ICLR 2022, arXiv:2106.04169): attack the logits of every block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import deployed, fooled
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.per_sample import keep_samples, takes_arrays
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum
from vitadel.backbones.anatomy import anatomy_of, backbone_of, blocks_of
from vitadel.backbones.classifier import check_pixels
from vitadel.instrument.hooks import Edge, block_features, hooked
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Loss, Threat


@dataclass
class BlockLogits:
    """Logits of every block but the last, (blocks, batch, classes), from the last run of the model."""

    earlier: Tensor | None = None


@contextmanager
def block_logits(model: nn.Module) -> Iterator[BlockLogits]:
    """Apply the model's final norm and head to the output of every block, in the pass that `model(x)` takes.

    Everything after the blocks runs on the outputs of all blocks, stacked along the batch: final norm, pooling, both
    heads of distilled models, FAN's class attention, wrappers of the backbone. The model still returns its own logits.
    Only blocks whose output has the shape of the last one's take part, as norm and head fit only these: all blocks of
    ViT, EVA, BEiT and FAN, class-attention blocks of CaiT and XCiT, the last stage of Swin, PiT, LeViT and RVT.
    """
    backbone, last_block = backbone_of(model), blocks_of(model)[-1]
    norm = getattr(backbone, "norm", None)
    seen = BlockLogits()
    count = 1

    def stack_blocks(own: Tensor) -> Tensor:
        nonlocal count
        earlier = [each for each in features[:-1] if each.shape == features[-1].shape]
        count = 1 + len(earlier)
        return torch.cat([*(_in_place_of(own, each) for each in earlier), own])

    def split_blocks(logits: Tensor) -> Tensor:
        rows: Tensor = logits.unflatten(0, (count, len(logits) // count))
        seen.earlier = rows[:-1]
        return rows[-1]

    site = (
        Edge("norm", norm, stack_blocks, before=True)
        if isinstance(norm, nn.Module) and anatomy_of(model).norm_is_next
        else Edge(last_block.name, last_block.module, stack_blocks)
    )
    # Before all other hooks, so that pass counters and other readers of the output see one row per image.
    with block_features(model) as features, hooked(model, [site, Edge("model", model, split_blocks, first=True)]):
        yield seen


def _in_place_of(own: Tensor, block: Tensor) -> Tensor:
    """A block's output in the shape of the final norm's input.

    The two shapes are equal in most families. PiT norms only its class tokens, which come first; CaiT's class-attention
    blocks return only the class token, to which the patches are added.
    """
    return torch.cat([block[:, : own.shape[1]], own[:, block.shape[1] :]], dim=1)


@dataclass(frozen=True)
class _EveryBlockAim:
    model: nn.Module
    y: Tensor
    loss: Loss
    seen: BlockLogits

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        own = self.model(z)
        assert self.seen.earlier is not None
        values = torch.stack([self.loss(logits, self.y) for logits in (*self.seen.earlier, own)]).sum(0)
        return values, fooled(self.model, z, own, self.y)


@dataclass(frozen=True)
class EveryBlock:
    """The sum of a loss over the logits of every block; `seen` is what `block_logits` yields around the search."""

    seen: BlockLogits
    loss: Loss = field(default=cross_entropy)

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _EveryBlockAim(model, y, self.loss, self.seen)


@dataclass(frozen=True)
class SelfEnsemble:
    """MI-FGSM on the summed cross-entropy of every block's logits.

    For transfer it does not stop when the model is fooled, unless `stop_when_fooled`, and returns the last iterate. The
    default `length` is eps / steps. The paper's token refinement, which trains a head per block, is not implemented.
    """

    threat: Threat
    steps: int = 10
    decay: float = 1.0
    length: float | None = None
    stop_when_fooled: bool = False

    def __post_init__(self) -> None:
        Momentum(self.decay)  # checks the decay

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        stepper = Momentum(self.decay, self.length)
        with block_logits(deployed(model)) as seen:
            goal = EveryBlock(seen)
            stop = self.stop_when_fooled
            search = PGD(self.threat, goal, stepper, self.steps, random_start=False, stop_when_fooled=stop)
            return search(model, x, y, rng)

    def passes(self) -> tuple[int, int]:
        return self.steps, 0
