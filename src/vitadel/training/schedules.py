"""The learning rate as a pure function of how far the training is, so that a resumed run needs no scheduler's state."""

from __future__ import annotations

import math

from vitadel.training.recipes.sections import OptimizerSection, Schedule

__all__ = ["rate_at", "scaling_of"]


def scaling_of(optimizer: OptimizerSection, batch_size: int) -> float:
    """What the recipe's rates are multiplied with for batches of another size than they are meant for."""
    if optimizer.lr_reference_batch is None:
        return 1.0
    ratio = batch_size / optimizer.lr_reference_batch
    return math.sqrt(ratio) if optimizer.lr_scaling == "sqrt" else ratio


def rate_at(schedule: Schedule, rate: float, epochs: int, progress: float) -> float:
    """The rate after `progress` epochs of a training of `epochs` (cool-down not counted).

    As in timm, the cosine starts with the training and not with the end of its warm-up.
    """
    if schedule.shape != "cyclic" and progress < schedule.warmup_epochs:
        return schedule.warmup_lr + (rate - schedule.warmup_lr) * progress / schedule.warmup_epochs
    done = min(progress / epochs, 1.0)
    if schedule.shape == "cosine":
        return schedule.min_lr + (rate - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.shape == "cyclic":
        rising = done < schedule.pct_start
        low = schedule.warmup_lr if rising else schedule.min_lr
        return low + (rate - low) * (done / schedule.pct_start if rising else (1 - done) / (1 - schedule.pct_start))
    if schedule.shape == "steps":
        return rate * schedule.decay_rate ** sum(progress >= milestone for milestone in schedule.milestones)
    return rate
