"""Checks of what goes in and what comes out, before any attack is worth running."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitadel.attacks.parse import make
from vitadel.backbones.model_checks import looks_like_probabilities
from vitadel.diagnosis.examination import Examination, relative_change
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome
from vitadel.errors import UserError
from vitadel.evaluation.chance import beaten, binomial_tail
from vitadel.instrument.hooks import Edge, hooked

__all__ = [
    "answers_by_search",
    "clean_accuracy",
    "eps_zero",
    "finite_outputs",
    "gradient_mode",
    "normalisation",
    "pixel_range",
    "probabilities",
]

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5,) * 3, (0.5,) * 3)
_UNLIKELY = 0.01
_WEAK = 0.2  # of the way from guessing to being always right
_SLACK = 0.3  # by which resizing may overshoot black and white; normalised pixels are further out


def pixel_range(e: Examination) -> Outcome:
    """Raised if the images are not pixels in [0, 1], or fill only a 255th of that range.

    Why it matters: budgets such as 8/255, clipping and step sizes are all meant for [0, 1]. On normalised images, or on
    bytes, the same eps is a much smaller budget, and the model looks robust.

    What to do: give pixels in [0, 1] and let the model normalise them: vitadel.wrap(model, mean=..., std=...).
    """
    finite = bool(e.x.isfinite().all())
    low, high = (float(e.x.amin()), float(e.x.amax())) if finite else (0.0, 0.0)
    evidence = {"lowest": low, "highest": high, "finite": finite}
    if not finite or low < -1e-6 or high > 1 + 1e-6:
        return BROKEN, evidence
    return (SUSPICIOUS if high <= 1.01 / 255 else OK), evidence


def finite_outputs(e: Examination) -> Outcome:
    """Raised if the model answers NaN or infinity to the images, or to black, white and noisy ones.

    Why it matters: a NaN compares as false with everything, so depending on who counts, such an image is always or
    never fooled; and its gradients are NaN as well.

    What to do: find the layer that overflows (fp16 does where bf16 and fp32 do not) or divides by zero, and repair it.
    """
    shape = e.few(1)
    odd = torch.cat([torch.zeros_like(shape), torch.ones_like(shape), e.lots(1).uniform(*shape.shape[1:]).to(shape)])
    bad, bad_odd = (int((~logits.isfinite()).any(1).sum()) for logits in (e.logits, e.answers(odd)))
    return (BROKEN if bad + bad_odd else OK), {"images": bad, "of": len(e.x), "odd images": bad_odd}


def clean_accuracy(e: Examination) -> Outcome:
    """Raised if the model is no better on clean images than guessing, of so many that even a weak one would be.

    Why it matters: what is wrong already cannot be fooled. Labels in another order, missing weights or a wrong image
    size are the usual reasons, and each makes every further number meaningless.

    What to do: compare the data's class order with the model's, and check --weights, --mean, --std and --input-size.
    """
    right, n = int(e.correct.sum()), len(e.y)
    chance = 1 / e.logits.shape[1]
    evidence = {"accuracy": right / n, "n": n, "guessing": chance}
    if binomial_tail(right, n, chance) < _UNLIKELY:
        return OK, evidence
    weak = chance + _WEAK * (1 - chance)
    # As few right or fewer is as many wrong or more.
    if binomial_tail(n - right, n, 1 - weak) < _UNLIKELY:
        return BROKEN, evidence
    raise NotExamined(f"{right} of {n} images are right: too few images to tell a weak model from guessing")


def normalisation(e: Examination) -> Outcome:
    """Raised if the model is clearly more often right when its images are normalised first, when a normalisation is
    undone, when they are bytes, or when their channels are swapped; or if its own normalisation is given no pixels.

    Why it matters: then the model is not given what it was trained on: its normalisation is missing or applied twice.
    Clean accuracy suffers, if the model is not lucky, and eps means another budget than it says.

    What to do: normalise exactly once, inside the model: vitadel.wrap(model, mean=..., std=...), or --mean and --std.
    """
    changed = {name: e.answers(images) for name, images in _other_preprocessing(e).items()}
    right = {name: logits.argmax(1) == e.y for name, logits in changed.items()}
    best = max(right, key=lambda name: int(right[name].sum()))
    evidence: dict[str, object] = {"as given": e.share(e.correct)}
    evidence |= {name: e.share(held) for name, held in right.items()}
    ranges = _given_to_normalisers(e)
    if ranges:
        evidence["range of what is normalised"] = [list(each) for each in ranges]
    no_pixels = any(low < -_SLACK or high > 1 + _SLACK or high <= 1.01 / 255 for low, high in ranges)
    return (BROKEN if no_pixels or beaten(right[best], e.correct, 0.03) else OK), evidence


def _given_to_normalisers(e: Examination) -> list[tuple[float, float]]:
    """The least and largest value that each module with a mean and a standard deviation per colour gets to see.

    In its own unit: one whose means or standard deviations are those of bytes is rightly given bytes.
    """
    seen: list[tuple[float, float]] = []
    for name, part in e.model.named_modules():
        numbers = _normalisation_of(part)
        if numbers is not None:
            unit = 255.0 if max(*numbers[0], *numbers[1]) > 1 else 1.0

            def look(images: Tensor, unit: float = unit) -> None:
                low, high = (float(end) / unit for end in images.detach().aminmax())
                seen.append((round(low, 4), round(high, 4)))

            try:
                with hooked(e.model, [Edge(name, part, look, before=True)]):
                    e.answers(e.few(min(16, e.batch_size)))
            except (UserError, IndexError):  # it has no part in the answer, or is given its images by name
                continue
    return seen


def _normalisation_of(part: nn.Module) -> list[list[float]] | None:
    """Mean and standard deviation of each colour, if it has them."""
    numbers = []
    for name in ("mean", "std"):
        told: Any = getattr(part, name, None)
        try:
            numbers.append(
                [float(each) for each in told] if isinstance(told, list | tuple) else told.flatten().tolist()
            )
        except (AttributeError, TypeError, ValueError):  # anything may be called so
            return None
    per_colour = len(numbers[0]) == len(numbers[1]) == 3 and numbers != [[0.0] * 3, [1.0] * 3]
    return numbers if per_colour else None


def _other_preprocessing(e: Examination) -> dict[str, Tensor]:
    images = {"bytes": e.x * 255, "channels swapped": e.x.flip(1)}
    if e.x.ndim != 4 or e.x.shape[1] != 3:
        raise NotExamined("the images have no three colour channels")
    for name, (mean, std) in {"0.5": _HALF, "ImageNet's": _IMAGENET}.items():
        centre, width = (torch.tensor(numbers).to(e.x).view(1, 3, 1, 1) for numbers in (mean, std))
        images[f"normalised by {name}"] = (e.x - centre) / width
        images[f"normalisation by {name} undone"] = e.x * width + centre
    return images


def probabilities(e: Examination) -> Outcome:
    """Raised if the outputs are probabilities or percentages: none below 0, and every row adding up to 1 or to 100.

    Why it matters: attacks apply a softmax of their own. Of probabilities it is nearly flat, the cross-entropy is
    squeezed between two close values, and confident images give hardly any gradient. Of percentages it is so sharp that
    the cross-entropy rounds to nothing.

    What to do: return logits, without the final softmax.
    """
    sums = e.logits.double().sum(1)
    evidence = {
        "lowest": float(e.logits.min()),
        "highest": float(e.logits.max()),
        "sum of the first row": float(sums[0]),
    }
    shares = looks_like_probabilities(e.logits) or looks_like_probabilities(e.logits / 100)
    return (BROKEN if shares else OK), evidence


def eps_zero(e: Examination) -> Outcome:
    """Raised if an attack with a budget of zero changes an image or a prediction.

    Why it matters: with eps = 0 there is nothing an attacker may do, so robust and clean accuracy must be the same
    number. Where they are not, the model's answers differ between calls, or pixels are changed on the way.

    What to do: make the model deterministic in eval mode, or judge it over many passes (eot:20+ before an attack).
    """
    z = e.crafted(make(f"pgd-{min(e.level.steps, 3)}", eps=0, norm=e.norm))
    moved = float((z - e.x).abs().max())
    changed = int((e.answers(z).argmax(1) != e.logits.argmax(1)).sum())
    return (BROKEN if moved > 1e-6 or changed else OK), {"largest change": moved, "predictions changed": changed}


def gradient_mode(e: Examination) -> Outcome:
    """Raised if the answers differ between a pass that gradients are taken of and one without.

    Why it matters: attacks then climb another function than the one that is deployed and judged, by design (secrets
    that only inference uses) or by accident (a branch on requires_grad).

    What to do: let attacks see what is deployed. If a part is meant to be secret, give it to the attacker as well: a
    secret is no defence once it is known (`vitadel audit --suite ladder` tells what it is worth).
    """
    if e.at_random:
        raise NotExamined("the model answers at random, so two passes differ anyway")
    few = e.few(16)
    plain = e.answers(few)
    with torch.enable_grad():
        watched = torch.cat([e.model(x.clone().requires_grad_()).detach() for x in few.split(e.batch_size)])
    change = relative_change(plain, watched)
    flipped = int((plain.argmax(1) != watched.argmax(1)).sum())
    # Fused kernels may round otherwise when a graph is kept.
    return e.verdict_on_change(change, flipped), {"change of logits": change, "predictions changed": flipped}


class _Counting(TorchFunctionMode):
    """Counts how often gradients are asked for, by whatever name."""

    asking = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.asking
        return func(*args, **(kwargs or {}))


def answers_by_search(e: Examination) -> Outcome:
    """Raised if the model takes gradients of its own before it answers.

    Why it matters: it optimises the image, or itself, while it is asked (purification, anti-adversaries, adaptation at
    test time). Attacks seldom climb through such a loop, so that they see gradients of a part of the model only, and
    every answer costs many passes. Of the defences of this kind that were examined with care none was much better than
    the model below (Croce et al. 2022, arXiv:2202.13711).

    What to do: attack the model below without its loop, judge on the whole, and run square; report the worst case
    beside that of the model below.
    """
    with _Counting() as asked:
        e.answers(e.few(min(4, e.batch_size)))
    return (SUSPICIOUS if asked.count else OK), {"gradients taken per answer": asked.count}
