"""The learning rate as a pure function of how far the training is, so that a resumed run needs no scheduler's state."""

from __future__ import annotations

import math

from vitadel.training.recipes.sections import OptimizerSection, Schedule

__all__ = ["rate_at", "scaling_of"]


def scaling_of(optimizer: OptimizerSection, batch_size: int) -> float:
    """What the recipe's rates are multiplied with for batches of another size than they are meant for."""
    if optimizer.rate_batch is None:
        return 1.0
    ratio = batch_size / optimizer.rate_batch
    return math.sqrt(ratio) if optimizer.rate_scaling == "sqrt" else ratio


def rate_at(schedule: Schedule, rate: float, epochs: int, progress: float) -> float:
    """The rate after `progress` epochs of a training of `epochs` (cool-down not counted).

    As in timm, the cosine starts with the training and not with the end of its warm-up.
    """
    if schedule.shape != "cyclic" and progress < schedule.warm_up:
        return schedule.warm_up_rate + (rate - schedule.warm_up_rate) * progress / schedule.warm_up
    done = min(progress / epochs, 1.0)
    if schedule.shape == "cosine":
        return schedule.final_rate + (rate - schedule.final_rate) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.shape == "cyclic":
        rising = done < schedule.peak
        low = schedule.warm_up_rate if rising else schedule.final_rate
        return low + (rate - low) * (done / schedule.peak if rising else (1 - done) / (1 - schedule.peak))
    if schedule.shape == "steps":
        return rate * schedule.factor ** sum(progress >= milestone for milestone in schedule.milestones)
    return rate
