"""Other ways to prepare images and labels for a model: which of them fits the data at hand best.

A model that is given other pixels than it was trained on, or labels in another order, is wrong in a way that no attack
shows. Each alternative costs one forward pass per image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from vitadel.statistics import ALPHA, sign_test, significantly_fewer

NORMALIZATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "raw pixels": ((0.0,) * 3, (1.0,) * 3),
    "mean and std 0.5": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet's mean and std": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10's mean and std": ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "CLIP's mean and std": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
_TRIED = 20  # alternatives, at most
_LIKELIER = 0.7  # share of the images whose label an alternative must make likelier, and by how much in the mean
_LEAST_GAIN = 0.05
_FLOOR = 0.03  # by which an alternative must be better, as a share of the images
_FEWEST_PER_CLASS = 2


@dataclass(frozen=True)
class Fit:
    """One alternative: which images it gets right, and what to do if it is the right one."""

    name: str
    correct: Tensor
    remedy: str
    gain: Tensor | None = None  # of the label's log-likelihood, beside the set-up as given

    @classmethod
    def of(cls, name: str, logits: Tensor, y: Tensor, as_given: Tensor, remedy: str) -> Self:
        """From the logits with it and `as_given`."""
        gain = _log_likelihood(logits, y) - _log_likelihood(as_given, y)
        return cls(name, logits.argmax(1) == y, remedy, gain)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One alternative on several batches."""
        gains = [part.gain for part in parts if part.gain is not None]
        correct = torch.cat([part.correct for part in parts])
        return cls(parts[0].name, correct, parts[0].remedy, torch.cat(gains) if gains else None)

    @property
    def likelier(self) -> int | None:
        """On how many images the label is likelier."""
        return None if self.gain is None else int((self.gain > 0).sum())

    @property
    def accuracy(self) -> float:
        return float(self.correct.double().mean())

    def is_better_than(self, as_given: Tensor) -> bool:
        """Whether it is right on significantly more of the images, or makes the label likelier on most of them.

        A wrong normalization may cost a point or two of accuracy, which only thousands of images show; the likelihood
        of the label shows it on a few dozen.
        """
        if significantly_fewer(self.correct, as_given, _FLOOR):
            return True
        if self.gain is None or self.accuracy < float(as_given.double().mean()):
            return False
        likelier, less = int((self.gain > 0).sum()), int((self.gain < 0).sum())
        clear = likelier >= _LIKELIER * len(self.gain) and float(self.gain.mean()) >= _LEAST_GAIN
        return clear and sign_test(likelier, less) < ALPHA / _TRIED


def best_alternative(fits: Sequence[Fit], as_given: Tensor) -> Fit | None:
    """The alternative that fits best, of those that are significantly better than the set-up as given.

    Among those that are right about equally often, the one that makes the labels likeliest.
    """
    better = [fit for fit in fits if fit.is_better_than(as_given)]
    most = max((fit.accuracy for fit in better), default=0.0)
    near = [fit for fit in better if fit.accuracy >= most - _FLOOR]
    return max(near, key=lambda fit: 0.0 if fit.gain is None else float(fit.gain.mean()), default=None)


@torch.no_grad()
def try_alternatives(
    model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 64, only: str | None = None
) -> tuple[Tensor, list[Fit]]:
    """The logits of images (pixels in [0, 1], RGB) as given, and the fit of each alternative, or the `only` one.

    The model's own normalization is that of its record, and replaced; a model without a record gets prepared pixels.
    `best_alternative` chooses among the result.
    """
    record = getattr(model, "record", None)
    own = (tuple(getattr(record, "mean", (0.0,) * 3)), tuple(getattr(record, "std", (1.0,) * 3)))

    def predict(images: Tensor) -> Tensor:
        return torch.cat([model(part) for part in images.split(batch_size)])

    as_given = predict(x)
    fits = [
        Fit.of(name, predict(images), y, as_given, remedy)
        for name, images, remedy in _other_pixels(x, own)
        if only in (None, name)
    ]
    return as_given, fits if only else [*fits, *shifted_labels(y, as_given.argmax(1))]


def _log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    return logits.float().log_softmax(1).gather(1, y[:, None])[:, 0]


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
