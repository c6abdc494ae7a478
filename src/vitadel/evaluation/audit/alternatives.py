"""Other ways to prepare images and labels for a model: which of them fits the data at hand best.

A model that is given other pixels than it was trained on, or labels in another order, is wrong in a way that no attack
shows. Each alternative costs one forward pass per image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.statistics import significantly_fewer

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "raw pixels": ((0.0,) * 3, (1.0,) * 3),
    "mean and std 0.5": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet's mean and std": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10's mean and std": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "CLIP's mean and std": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
_FLOOR = 0.03  # by which an alternative must be better, as a share of the images
_FEWEST_PER_CLASS = 2


@dataclass(frozen=True)
class Fit:
    """One alternative: which images it gets right, and what to do if it is the right one."""

    name: str
    correct: Tensor
    remedy: str

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    def is_better_than(self, as_given: Tensor) -> bool:
        """Whether it is right on significantly more of the images."""
        return significantly_fewer(self.correct, as_given, _FLOOR)


def best_alternative(fits: Sequence[Fit], as_given: Tensor) -> Fit | None:
    """The alternative that is right most often, if it is significantly better than the set-up as given."""
    better = [fit for fit in fits if fit.is_better_than(as_given)]
    return max(better, key=lambda fit: fit.accuracy, default=None)


@torch.no_grad()
def try_alternatives(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 64, only: str | None = None
) -> tuple[Tensor, list[Fit]]:
    """Which images (pixels in [0, 1], RGB) the model gets right as given, and with each alternative, or the `only` one.

    The model's own normalization is that of its record, and replaced; a model without a record gets prepared pixels.
    `best_alternative` chooses among the result.
    """
    record = getattr(model, "record", None)
    own = (tuple(getattr(record, "mean", (0.0,) * 3)), tuple(getattr(record, "std", (1.0,) * 3)))

    def predict(images: Tensor) -> Tensor:
        return torch.cat([model(part).argmax(1) for part in images.split(batch_size)])

    prediction = predict(x)
    fits = [
        Fit(name, predict(images) == y, remedy)
        for name, images, remedy in _other_pixels(x, own)
        if only in (None, name)
    ]
    return prediction == y, fits if only else [*fits, *shifted_labels(y, prediction)]


Colors = tuple[float, ...]


def _other_pixels(x: Tensor, own: tuple[Colors, Colors]) -> Iterator[tuple[str, Tensor, str]]:
    mean, std = (_per_color(each, x) for each in own)
    for name, (other_mean, other_std) in NORMALIZATIONS.items():
        if (other_mean, other_std) == own:
            continue
        center, width = _per_color(other_mean, x), _per_color(other_std, x)
        # What the model's own normalization turns into the other one's result.
        yield name, (x - center) / width * std + mean, _flags(other_mean, other_std)
        if name != "raw pixels":
            undone = f"{name}, applied a second time somewhere"
            yield undone, x * width + center, "normalize once: drop the model's or the data's normalization"
    yield "BGR channels", x.flip(1), "give RGB images, or swap the channels inside the model"
    yield "pixels in 0..255", x * 255 * std + mean, "scale inside the model: --mean 0 --std 0.00392157 (1/255)"


def _flags(mean: Colors, std: Colors) -> str:
    first, second = (",".join(f"{each:g}" for each in dict.fromkeys(numbers)) for numbers in (mean, std))
    return f"--mean {first} --std {second}, or vitadel.wrap(model, mean=..., std=...)"


def _per_color(numbers: Colors, like: Tensor) -> Tensor:
    return torch.tensor(numbers).to(like).view(1, 3, 1, 1)


def shifted_labels(label: Tensor, prediction: Tensor) -> list[Fit]:
    """Labels that are all one too high or one too low."""
    return [
        Fit("labels counted from 1", prediction == label - 1, "subtract 1 from the labels"),
        Fit("labels counted from -1", prediction == label + 1, "add 1 to the labels"),
    ]


def other_labels(label: Tensor, prediction: Tensor) -> tuple[Fit, Tensor] | None:
    """The other meaning of the labels that fits the predictions significantly better, and on which images that is.

    These are labels that are one off, or classes in another order: for each label the output that is predicted most,
    learned on half of the images and tested on the other half. None if there is no such meaning.
    """
    correct, everywhere = prediction == label, torch.ones(len(label), dtype=torch.bool)
    shifted = best_alternative(shifted_labels(label, prediction), correct)
    learned = _other_order(label, prediction)
    if learned is not None and not learned[0].is_better_than(correct[learned[1]]):
        learned = None
    if shifted is not None and (learned is None or shifted.accuracy >= learned[0].accuracy - 0.15):
        return shifted, everywhere
    return learned


def _other_order(label: Tensor, prediction: Tensor) -> tuple[Fit, Tensor] | None:
    """None with too few images of each class, or if several labels have one output."""
    classes = label.unique().tolist()
    half = torch.zeros(len(label), dtype=torch.bool)
    for each in classes:
        half[(label == each).nonzero()[:, 0][::2]] = True
    known = {each: prediction[half & (label == each)] for each in classes}
    if len(known) < 2 or min(map(len, known.values())) < _FEWEST_PER_CLASS:
        return None
    output = {each: int(found.mode().values) for each, found in known.items()}
    moved = [f"{each} is {to}" for each, to in output.items() if each != to]
    if len({*output.values()}) < len(output) or not moved:
        return None
    expected = torch.tensor([output[each] for each in label[~half].tolist()])
    remedy = f"match the classes by --classes FILE: label {', '.join(moved[:3])}{', ...' if len(moved) > 3 else ''}"
    return Fit("classes in another order", prediction[~half] == expected, remedy), ~half
