"""Is AFAT's opponent adversarial, and does the alignment matter? Measured on fixed images after every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_ratio
from vitadel.training.paired_features import Pair

RANDOM_MASKS = 4  # for each image; what the opponent's choice is compared with

PairOf = Callable[[nn.Module, Tensor, Tensor, SampleRNG], Pair]
"""Features of images with these patches kept (batch, patches), and of the clean ones."""

Images = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class OpponentGain:
    """Alignment loss under the opponent's masks over that under random masks with the same noise, with 95 % interval.

    1 is an opponent that is no better than chance.
    """

    gain: float
    low: float
    high: float

    @property
    def beats_chance(self) -> bool:
        return self.low > 1

    def as_metrics(self) -> dict[str, float]:
        return {"opponent_gain": self.gain, "opponent_gain_low": self.low, "opponent_gain_high": self.high}


@torch.no_grad()
def opponent_gain(
    model: nn.Module, images: Images, choose: Callable[[Tensor], Tensor], pair: PairOf, key: int
) -> OpponentGain | None:
    """The gain of `choose`, which maps images to kept patches, (batch, patches); None if nothing is corrupted."""
    chosen: list[NDArray[np.float64]] = []
    by_chance: list[NDArray[np.float64]] = []
    with frozen(model):
        for x, _ in images:
            rng, keep = SampleRNG.of_pixels(x, key), choose(x)
            count = int((keep[0] == 0).sum())
            if count == 0:
                return None
            masks = [(rng.stream("mask", k).permutation(keep.shape[1]) >= count).to(keep) for k in range(RANDOM_MASKS)]
            chosen.append(_distances(pair(model, x, keep, rng)))
            by_chance.append(np.mean([_distances(pair(model, x, mask, rng)) for mask in masks], axis=0))
    ours, others = np.concatenate(chosen), np.concatenate(by_chance)
    return OpponentGain(float(ours.mean() / others.mean()), *bootstrap_ratio(ours, others))


def _distances(pair: Pair) -> NDArray[np.float64]:
    """The alignment loss of each image: mean over elements, then over blocks."""
    blocks = [(altered.double() - clean.double()).square().flatten(1).mean(1) for altered, clean in pair.features]
    distances: NDArray[np.float64] = torch.stack(blocks).mean(0).cpu().numpy()
    return distances


def gradient_share(lengths: tuple[float, float]) -> float:
    """The second gradient's share: |g2| / (|g1| + |g2|)."""
    first, second = lengths
    return second / (first + second) if second > 0 else 0.0


def weight_of_share(share: float, lengths: tuple[float, float]) -> float | None:
    """The weight of the second loss whose gradient then has this share; None where it has no gradient.

    w |g2| / (|g1| + w |g2|) = share gives w = share / (1 - share) * |g1| / |g2|.
    """
    first, second = lengths
    return share / (1 - share) * first / second if second > 0 else None


def gradient_lengths(
    model: nn.Module,
    images: Images,
    choose: Callable[[Tensor], Tensor],
    pair: PairOf,
    losses: Callable[[Pair, Tensor], tuple[Tensor, Tensor]],
    key: int,
) -> tuple[float, float]:
    """The lengths of two losses' gradients with respect to the trained parameters.

    `losses` are means over a batch of the cross-entropy and of the alignment. In eval mode, so that only the patches
    make features differ and no statistics change.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    sums: list[list[Tensor]] = [[torch.zeros_like(each) for each in trained] for _ in range(2)]
    try:
        model.eval()
        for x, y in images:
            rng = SampleRNG.of_pixels(x, key)
            with torch.no_grad():
                keep = choose(x)
            both = losses(pair(model, x, keep, rng), y)
            for each, loss in zip(sums, both, strict=True):
                slopes = torch.autograd.grad(loss, trained, retain_graph=loss is both[0], allow_unused=True)
                for old, new in zip(each, slopes, strict=True):
                    if new is not None:
                        old.add_(new, alpha=len(x))
    finally:
        model.train(modes[0][1])
        for module, flag in modes:
            module.training = flag
    first, second = map(_length, sums)
    return first, second


def _length(gradients: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([each.double().flatten() for each in gradients])))
