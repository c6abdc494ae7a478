"""What a climb will cost at most, told before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vitadel.evaluation.engine.cost import PassTimes
from vitadel.threat_levels.levels import Rung

__all__ = ["cost_sentence", "passes_at_most"]

_PROBE = 8  # images


def passes_at_most(rungs: Sequence[Rung], budgets: Sequence[float]) -> tuple[int, int]:
    """(gradients, forwards) per image if it withstands everything to the last step; judges are not counted."""
    gradients = forwards = 0
    for rung in rungs:
        for eps in budgets if rung.in_pixels else budgets[:1]:
            more_gradients, more_forwards = rung.attack(eps).passes()
            gradients += rung.models * more_gradients
            forwards += rung.models * more_forwards
    return gradients, forwards


def cost_sentence(rungs: Sequence[Rung], budgets: Sequence[float], model: nn.Module, x: Tensor, images: int) -> str:
    """In words, with the time that a few images say; `x` is like those to come."""
    gradients, forwards = passes_at_most(rungs, budgets)
    hours = images * PassTimes.measure(model, x[:_PROBE]).seconds(gradients, forwards) / 3600
    time = f"{hours:.1f} hours" if hours >= 1.5 else f"{60 * hours:.0f} minutes"
    return (
        f"{len(rungs)} attacks at {len(budgets)} budget{'s' * (len(budgets) > 1)} on {images} images: at most "
        f"{gradients} gradients and {forwards} forwards an image, {time} here, beside the training and fitting of "
        "token sets; images that fall early cost less"
    )
