"""Checks of what goes into the model and what comes out, before any attack is worth running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.backbones.classifier import looks_like_probabilities, modules_in_train_mode
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome, check
from vitadel.diagnosis.examination import Examination, relative_change
from vitadel.errors import UserError
from vitadel.findings import CLEAN_ACCURACY, PROBABILITY_OUTPUTS, TRAIN_MODE
from vitadel.instrument.hooks import Edge, hooked
from vitadel.statistics import binomial_tail, chance_level, significantly_fewer

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5,) * 3, (0.5,) * 3)
_UNLIKELY = 0.01
_WEAK = 0.2  # of the way from chance level to perfect accuracy
_SLACK = 0.3  # by which black and white may leave [0, 1]; normalized ones are further out


@check("pixel-range", "Images are not pixels in [0, 1]", vital=True)
def pixel_range(e: Examination) -> Outcome:
    """Raised if the images are not pixels in [0, 1], or fill only a 255th of that range.

    Why it matters: budgets such as 8/255, clipping and step sizes all assume [0, 1]. On normalized images or bytes the
    same eps is a much smaller budget, and the model looks robust.

    What to do: give pixels in [0, 1] and let the model normalize them: vitadel.wrap(model, mean=..., std=...).
    """
    finite = bool(e.x.isfinite().all())
    low, high = (float(e.x.amin()), float(e.x.amax())) if finite else (0.0, 0.0)
    evidence = {"lowest": low, "highest": high, "finite": finite}
    if not finite or low < -1e-6 or high > 1 + 1e-6:
        return BROKEN, evidence
    return (SUSPICIOUS if high <= 1.01 / 255 else OK), evidence


@check("non-finite-outputs", "Outputs are NaN or infinite", cost=(0, 1), vital=True)
def finite_outputs(e: Examination) -> Outcome:
    """Raised if the model returns NaN or infinity for the images, or for black, white and noise images.

    Why it matters: every comparison with NaN is false, so such an image counts as always or never misclassified,
    depending on the code that counts; its gradients are NaN as well.

    What to do: find the layer that overflows (fp16 does where bf16 and fp32 do not) or divides by zero, and repair it.
    """
    shape = e.first(1)
    noise = e.rng_of(1).uniform(*shape.shape[1:]).to(shape)
    odd = torch.cat([torch.zeros_like(shape), torch.ones_like(shape), noise])
    bad, bad_odd = (int((~logits.isfinite()).any(1).sum()) for logits in (e.logits, e.logits_of(odd)))
    return (BROKEN if bad + bad_odd else OK), {"images": bad, "of": len(e.x), "odd images": bad_odd}


@check(*TRAIN_MODE, cost=(0, 0.5), as_given=True)
def train_mode(e: Examination) -> Outcome:
    """Raised if modules are in train mode; broken if that changes predictions.

    Why it matters: in train mode dropout is random and batch norm mixes the images of a batch. All other checks use
    eval mode; a deployment that does not switch to it is a different model.

    What to do: call model.eval() before deploying and before measuring.
    """
    training = modules_in_train_mode(e.model)
    if not training:
        return OK, {"modules in train mode": 0}
    images = e.first(32)
    with _restored_buffers(e.model):
        as_given = e.logits_of(images)
    change = relative_change(e.logits[: len(images)], as_given)
    flipped = int((as_given.argmax(1) != e.logits[: len(images)].argmax(1)).sum())
    evidence = {"modules in train mode": len(training), "the first": training[0], "change of logits": change}
    return (BROKEN if flipped else SUSPICIOUS), evidence | {"predictions changed": flipped, "of": len(images)}


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore running statistics, which passes in train mode change."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@check("normalization", "Normalization is missing or applied twice", cost=(0, 6.1))
def normalization(e: Examination) -> Outcome:
    """Raised if accuracy is clearly higher when images are normalized first, when a normalization is undone, when they
    are bytes, or when their channels are swapped; or if black and white are no pixels where the model normalizes.

    Why it matters: the model does not receive what it was trained on, because its normalization is missing or applied
    twice. Clean accuracy usually suffers, and eps is a different budget than it says.

    What to do: normalize exactly once, inside the model: vitadel.wrap(model, mean=..., std=...), or --mean and --std.
    """
    right = {name: e.logits_of(images).argmax(1) == e.y for name, images in _other_preprocessing(e).items()}
    best = max(right, key=lambda name: int(right[name].sum()))
    evidence: dict[str, object] = {"as given": e.share(e.correct)}
    evidence |= {name: e.share(correct) for name, correct in right.items()}
    ranges = _ranges_before_normalization(e)
    if ranges:
        evidence["range of what is normalised"] = [list(each) for each in ranges]
    # Where black and white become the same, contrast is that of each image, and the two say nothing about its scale.
    no_pixels = any(low < -_SLACK or high > 1 + _SLACK or 0 < high - low <= 1.01 / 255 for low, high in ranges)
    return (BROKEN if no_pixels or significantly_fewer(right[best], e.correct, 0.03) else OK), evidence


def _ranges_before_normalization(e: Examination) -> list[tuple[float, float]]:
    """What black and white are, at the least and the most, before each module with a mean and a deviation per color.

    In units of the module: one whose mean or standard deviation is that of bytes expects bytes. Plain images show a
    normalization of all pixels, and not what filters and standardized contrast do to an image, which is no mistake.
    """
    plain = torch.stack([torch.zeros_like(e.x[0]), torch.ones_like(e.x[0])])
    seen: list[tuple[float, float]] = []
    for name, part in e.model.named_modules():
        numbers = _mean_and_std(part)
        if numbers is not None:
            unit = 255.0 if max(*numbers[0], *numbers[1]) > 1 else 1.0

            def record(images: Tensor, unit: float = unit) -> None:
                low, high = (float(end) / unit for end in images.detach().aminmax())
                seen.append((round(low, 4), round(high, 4)))

            try:
                with hooked(e.model, [Edge(name, part, record, before=True)]):
                    e.logits_of(plain)
            except (UserError, IndexError):  # the module is not called, or receives its images by keyword
                continue
    return seen


def _mean_and_std(part: nn.Module) -> list[list[float]] | None:
    """Mean and standard deviation of each color, if the module has them."""
    numbers = []
    for name in ("mean", "std"):
        value: Any = getattr(part, name, None)
        try:
            is_list = isinstance(value, list | tuple)
            numbers.append([float(each) for each in value] if is_list else value.flatten().tolist())
        except (AttributeError, TypeError, ValueError):  # any attribute may have this name
            return None
    per_color = len(numbers[0]) == len(numbers[1]) == 3 and numbers != [[0.0] * 3, [1.0] * 3]
    return numbers if per_color else None


def _other_preprocessing(e: Examination) -> dict[str, Tensor]:
    images = {"bytes": e.x * 255, "channels swapped": e.x.flip(1)}
    if e.x.ndim != 4 or e.x.shape[1] != 3:
        raise NotExamined("the images do not have three color channels")
    for name, (mean, std) in {"0.5": _HALF, "ImageNet's": _IMAGENET}.items():
        center, width = (torch.tensor(numbers).to(e.x).view(1, 3, 1, 1) for numbers in (mean, std))
        images[f"normalised by {name}"] = (e.x - center) / width
        images[f"normalisation by {name} undone"] = e.x * width + center
    return images


@check(*CLEAN_ACCURACY, vital=True)
def clean_accuracy(e: Examination) -> Outcome:
    """Raised if clean accuracy is at chance level, on so many images that even a weak model would be better.

    Why it matters: an image that is misclassified already cannot be attacked. The usual causes are labels in another
    order, missing weights or a wrong image size, and each makes every further number meaningless.

    What to do: compare the data's class order with the model's, and check --weights, --mean, --std and --input-size.
    """
    right, n = int(e.correct.sum()), len(e.y)
    chance = chance_level(e.y.tolist(), e.logits.shape[1])
    evidence = {"accuracy": right / n, "n": n, "guessing": chance}
    if binomial_tail(right, n, chance) < _UNLIKELY:
        return OK, evidence
    weak = chance + _WEAK * (1 - chance)
    # At most this many correct is the same as at least this many wrong.
    if binomial_tail(n - right, n, 1 - weak) < _UNLIKELY:
        return BROKEN, evidence
    raise NotExamined(f"{right} of {n} images are correct: too few images to distinguish a weak model from guessing")


@check(*PROBABILITY_OUTPUTS)
def probability_outputs(e: Examination) -> Outcome:
    """Raised if the outputs are probabilities or percentages: none below 0, and every row adds up to 1 or to 100.

    Why it matters: attacks apply a softmax of their own. Applied to probabilities it is nearly flat, so the
    cross-entropy hardly varies and confident images give almost no gradient. Applied to percentages it is so sharp
    that the cross-entropy rounds to zero.

    What to do: return logits, without the final softmax.
    """
    evidence = {
        "lowest": float(e.logits.min()),
        "highest": float(e.logits.max()),
        "sum of the first row": float(e.logits.double().sum(1)[0]),
    }
    shares = looks_like_probabilities(e.logits) or looks_like_probabilities(e.logits / 100)
    return (BROKEN if shares else OK), evidence
