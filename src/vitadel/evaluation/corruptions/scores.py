"""Scores of corruption and perturbation benchmarks: ImageNet-C and -P (Hendrycks & Dietterich 2019, arXiv:1903.12261).

Errors, accuracies and flip probabilities are shares between 0 and 1. What is divided by AlexNet's (CE, mCE, relative
mCE, mFR) is a percentage of AlexNet's, as papers print it: AlexNet itself has 100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from vitadel.corruptions.constants import SEVERITIES
from vitadel.errors import UserError

Errors = Mapping[str, Mapping[int, float]]
"""Corruption -> severity -> top-1 error."""

NOISE = ("gaussian_noise", "shot_noise", "impulse_noise")

# Top-1 errors of torchvision's AlexNet on the JPEG files of ImageNet-C, severities 1 to 5, as the benchmark's author
# gives them (github.com/hendrycks/robustness, issue 10); their means are the constants of its test.py.
ALEXNET_ERRORS: Errors = {
    name: dict(zip(SEVERITIES, errors, strict=True))
    for name, errors in {
        "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
        "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
        "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
        "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
        "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
        "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
        "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
        "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
        "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
        "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
        "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
        "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
        "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
        "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
        "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
    }.items()
}
ALEXNET_CLEAN_ERROR = 0.435
"""On ImageNet's validation set. From memory of the literature, not from the benchmark's code: give your own to be sure.
"""
ALEXNET_FLIPS: Mapping[str, float] = {
    "gaussian_noise": 0.2365,
    "shot_noise": 0.3006,
    "motion_blur": 0.0930,
    "zoom_blur": 0.0594,
    "snow": 0.1193,
    "brightness": 0.0489,
    "translate": 0.1101,
    "rotate": 0.1310,
    "tilt": 0.0705,
    "scale": 0.2353,
}
"""Flip probabilities of AlexNet on ImageNet-P, as printed by Zhang (ICML 2019, arXiv:1904.11486) and recalled here; the
author's own list is not public in text. They give ResNet-50 the mFR of 58.0 that the benchmark reports."""

_Array = NDArray[np.generic]
_TOP = 5


def corruption_errors(errors: Errors, alexnet: Errors = ALEXNET_ERRORS) -> dict[str, float]:
    """CE of each corruption: errors summed over severities, then divided by AlexNet's sum over the same, in percent."""
    return {name: 100 * sum(by.values()) / _reference(name, by, alexnet) for name, by in errors.items()}


def relative_corruption_errors(
    errors: Errors,
    clean_error: float,
    alexnet: Errors = ALEXNET_ERRORS,
    alexnet_clean_error: float = ALEXNET_CLEAN_ERROR,
) -> dict[str, float]:
    """Relative CE: how much a corruption adds to the clean error, against what it adds to AlexNet's, in percent."""
    return {
        name: 100
        * (sum(by.values()) - len(by) * clean_error)
        / (_reference(name, by, alexnet) - len(by) * alexnet_clean_error)
        for name, by in errors.items()
    }


def flips(predictions: NDArray[np.integer], noise: bool, difficulty: int = 1) -> NDArray[np.float64]:
    """Per sequence of (sequences, frames): the share of steps at which the prediction is another one.

    The flip probability of a perturbation is the mean over sequences. `difficulty` d compares frames d apart, from
    every start; noise is always compared with frame 1.
    """
    return _steps(predictions[..., None], noise, difficulty, lambda one, other: (one != other)[..., 0])


def top5_distances(top: NDArray[np.integer], noise: bool, difficulty: int = 1) -> NDArray[np.float64]:
    """Per sequence: the mean top-5 distance of its steps (section 4.3 of the paper), not divided by AlexNet's.

    `top` holds the five most likely classes, best first, (sequences, frames, 5); fewer if there are fewer classes. A
    class at rank i that goes to rank j adds |min(i - 1, 5) - min(j - 1, 5)|.
    """
    count = top.shape[-1]
    before = np.arange(count)

    def distance(one: _Array, other: _Array) -> _Array:
        same = one[..., :, None] == other[..., None, :]
        after = np.where(same.any(-1), same.argmax(-1), min(_TOP, count))
        return np.asarray(np.abs(before - after).sum(-1))

    return _steps(top, noise, difficulty, distance)


def flip_rates(probabilities: Mapping[str, float], alexnet: Mapping[str, float] = ALEXNET_FLIPS) -> dict[str, float]:
    """Flip probabilities as percentages of AlexNet's; their mean over the ten perturbations is mFR."""
    unknown = [name for name in probabilities if name not in alexnet]
    if unknown:
        raise UserError(f"no flip probability of AlexNet for {', '.join(unknown)}; there are: {', '.join(alexnet)}")
    return {name: 100 * value / alexnet[name] for name, value in probabilities.items()}


def _reference(name: str, severities: Mapping[int, float], alexnet: Errors) -> float:
    """AlexNet's errors summed over the same severities."""
    if name not in alexnet:
        raise UserError(
            f"there is no error of AlexNet for '{name}', so it has no CE; there are: {', '.join(alexnet)}. The other "
            "four corruptions of the benchmark are for validation: read their plain errors"
        )
    return sum(alexnet[name][severity] for severity in severities)


def _steps(
    frames: NDArray[np.integer], noise: bool, difficulty: int, compare: Callable[[_Array, _Array], _Array]
) -> NDArray[np.float64]:
    """The mean of `compare` over the steps of each sequence, along the second axis of `frames`."""
    if difficulty < 1 or frames.shape[1] <= (1 if noise else difficulty):
        raise UserError(
            f"a difficulty of {difficulty} needs sequences of more frames than that, and at least 1; these have "
            f"{frames.shape[1]} frames"
        )
    if noise:
        one, other = np.broadcast_to(frames[:, :1], frames[:, 1:].shape), frames[:, 1:]
    else:  # every frame d behind another is a step of exactly one of the d phases, so all of them count alike
        one, other = frames[:, :-difficulty], frames[:, difficulty:]
    means: NDArray[np.float64] = np.asarray(compare(one, other), np.float64).mean(1)
    return means
