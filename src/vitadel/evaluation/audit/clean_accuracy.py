"""Sense of the clean accuracy: against chance, against what is known of the model, and against other set-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitadel.data.batches import read_batches
from vitadel.data.spec import parse_spec, same_images
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target, normalization_doubts
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.findings import BROKEN, CLEAN_ACCURACY, OK, SUSPICIOUS, CheckName, Finding
from vitadel.quantities import percent
from vitadel.statistics import binomial_tail, chance_level, wilson

if TYPE_CHECKING:
    from vitadel.evaluation.audit.alternatives import Fit

KNOWN_ACCURACY = CheckName("known-accuracy", "Clean accuracy is far below what is known of the model")
CONSTANT_PREDICTION = CheckName("constant-prediction", "One class is predicted for almost all images")
BETTER_SET_UP = CheckName("better-set-up", "Another preprocessing or labeling fits the model better")
CLASS_MAPPING = CheckName("class-mapping", "Classes of data and model were not matched by name")
OUTSIDE_NORMALIZATION = CheckName("outside-normalization", "The model's normalization is not the expected one")
ROBUST_ABOVE_CLEAN = CheckName("robust-above-clean", "Robust accuracy is above clean accuracy")
TRAINING_IMAGES = CheckName("training-images", "The images are those of a training split")

_IMAGES = 64  # on which all alternatives are tried
_MORE_IMAGES = 512  # on which the best of them is, if these cannot decide
_IMAGES_PER_CLASS = 4  # from which on two swapped classes can be seen
_UNLIKELY = 0.01
_GOOD = 0.75  # a clean accuracy above which no alternative is tried, unless more is known of the model
_SAME = 0.95  # share of one prediction that counts as constant
_CAUSES = "check the order of the classes, --weights, --mean, --std, --input-size and the crop"


@dataclass(frozen=True)
class Known:
    """A clean accuracy that is known of a model; `exact` if it is that of these very weights."""

    accuracy: float
    source: str
    exact: bool

    @property
    def margin(self) -> float:
        """How far below is far: other weights for the same architecture, as robust ones, are less accurate."""
        return 0.1 if self.exact else 0.3


def sense_of_clean(context: RunContext, verdicts: Verdicts, target: Target) -> list[dict[str, Any]]:
    """Findings about the clean accuracy of all audited images, the gravest first; none if it makes sense."""
    n, right = len(verdicts.label), int(verdicts.correct.sum())
    known = known_accuracy(target)
    found = findings_about_accuracy(verdicts.label, verdicts.prediction, known, len(target.source.classes))
    low = known is not None and wilson(right, n)[1] < known.accuracy
    labels = _findings_about_labels(verdicts)
    if not labels and (found or low or right < _GOOD * n or _contradicts_timm(target)):
        found += _findings_about_pixels(context, verdicts)
    found += labels
    found += _findings_about_assumptions(target)
    order = {BROKEN: 0, SUSPICIOUS: 1, OK: 2}
    return [finding.as_dict() for finding in sorted(found, key=lambda each: order[each.verdict])]


def findings_about_accuracy(label: Tensor, prediction: Tensor, known: Known | None, outputs: int) -> list[Finding]:
    """What speaks against clean predictions: chance level, one class for all, far below what is known."""
    n, right = len(label), int((label == prediction).sum())
    chance = chance_level(label.tolist(), outputs)
    found: list[Finding] = []
    if _is_constant(label, prediction):
        share = float((prediction == prediction.mode().values).double().mean())
        evidence = f"class {int(prediction.mode().values)} is predicted for {percent(share)} of {n} images"
        advice = f"the model collapsed or does not see the images: {_CAUSES}, or train with a lower learning rate"
        found.append(CONSTANT_PREDICTION.finding(BROKEN, evidence, advice))
    accuracy = f"{right} of {n} images are correct ({percent(right / n)})"
    guessed = _at_chance(right, n, chance, accuracy)
    return found + (guessed or ([] if known is None else _far_below(right, n, known, accuracy)))


def findings_about_training(
    label: Tensor, clean: float, robust: float | None, outputs: int, results: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """What speaks against a training by its scores on held-out images with these labels, and by its audit, if any.

    Accuracy is at chance level, robust accuracy is above clean, or held-out accuracy is far above that of the audit.
    """
    n = len(label)
    right = round(clean * n)
    known = {each["check"] for each in (results or {}).get("findings") or []}
    found = []
    if CLEAN_ACCURACY.identifier not in known:
        found += _at_chance(
            right, n, chance_level(label.tolist(), outputs), f"{right} of {n} held-out images are correct"
        )
    if robust is not None and robust > clean:
        evidence = f"on {n} held-out images: robust {percent(robust)}, clean {percent(clean)}"
        advice = "a robust image is a correct one: check how both were measured, and that outputs are not random"
        found.append(ROBUST_ABOVE_CLEAN.finding(BROKEN, evidence, advice))
    tested = (results or {}).get("clean")
    if tested and not known & {KNOWN_ACCURACY.identifier, CLEAN_ACCURACY.identifier}:
        held_out = Known(clean, f"on {n} held-out images of its training", exact=True)
        accuracy = f"{tested['correct']} of {tested['n']} test images are correct ({percent(tested['accuracy'])})"
        found += _far_below(tested["correct"], tested["n"], held_out, accuracy)
    return [each.as_dict() for each in found]


def _at_chance(right: int, n: int, chance: float, accuracy: str) -> list[Finding]:
    if binomial_tail(right, n, chance) < _UNLIKELY:
        return []
    weak = chance + 0.2 * (1 - chance)
    certain = binomial_tail(n - right, n, 1 - weak) < _UNLIKELY
    evidence = f"{accuracy}, and guessing among the data's classes gives {percent(chance)}"
    advice = f"no number of this run means anything before this is resolved: {_CAUSES}"
    if not certain:
        advice = f"too few images to distinguish the model from guessing: take more, and {_CAUSES}"
    return [CLEAN_ACCURACY.finding(BROKEN if certain else SUSPICIOUS, evidence, advice)]


def _far_below(right: int, n: int, known: Known, accuracy: str) -> list[Finding]:
    highest = wilson(right, n)[1]
    if highest >= known.accuracy - known.margin:
        return []
    grave = known.exact and highest < known.accuracy - 0.2
    evidence = f"{accuracy}; {known.source}: {percent(known.accuracy)}"
    return [KNOWN_ACCURACY.finding(BROKEN if grave else SUSPICIOUS, evidence, _CAUSES)]


def _is_constant(label: Tensor, prediction: Tensor) -> bool:
    top = prediction.mode().values
    predicted, true = float((prediction == top).double().mean()), float((label == top).double().mean())
    # With few images of few classes a good model may predict one class most of the time.
    return len(label) >= 8 and predicted >= _SAME and true < 0.8 * predicted and len(label.unique()) > 1


def _findings_about_labels(verdicts: Verdicts) -> list[Finding]:
    """Another meaning of the labels that fits better: it costs no pass, so it is tried wherever it can be seen."""
    right, n = int(verdicts.correct.sum()), len(verdicts.label)
    if right == n or (2 * right > n and n < _IMAGES_PER_CLASS * len(verdicts.label.unique())):
        return []
    from vitadel.evaluation.audit.alternatives import other_labels

    found = other_labels(verdicts.label, verdicts.prediction)
    if found is None:
        return []
    fit, rows = found
    return [_better(fit.name, fit.accuracy, verdicts.correct[rows], fit.remedy)]


def _findings_about_pixels(context: RunContext, verdicts: Verdicts) -> list[Finding]:
    """The other preprocessing that fits better than the one as given, if there is one.

    All are tried on a few images, and the best of them on more if a few cannot decide.
    """
    from vitadel.evaluation.audit.alternatives import best_alternative

    few, more = (_spread(verdicts.index, most) for most in (_IMAGES, _MORE_IMAGES))
    as_given, fits = _try(context, few)
    best = best_alternative(fits, as_given)
    promising = max(fits, key=lambda fit: fit.accuracy)
    if best is None and len(more) > len(few) and int(promising.correct.sum()) > int(as_given.sum()):
        as_given, fits = _try(context, more, promising.name)
        best = best_alternative(fits, as_given)
    return [] if best is None else [_better(best.name, best.accuracy, as_given, best.remedy, best.likelier)]


def _contradicts_timm(target: Target) -> bool:
    """Whether the normalization is not that of timm's model of this name, whose weights may be others."""
    from vitadel.backbones.timm_models import timm_normalization

    record = target.model.record
    theirs = None if record.training is not None else timm_normalization(record.name)
    return theirs is not None and theirs != (record.mean, record.std)


def _spread(indices: Tensor, most: int) -> list[int]:
    """At most so many of the indices, evenly spread: data may be sorted by class."""
    return indices[torch.linspace(0, len(indices) - 1, min(most, len(indices))).long()].tolist()


@torch.no_grad()
def _try(context: RunContext, rows: Sequence[int], only: str | None = None) -> tuple[Tensor, list[Fit]]:
    """Which of these images are right as given, and with each alternative, or with the `only` one."""
    from vitadel.evaluation.audit.alternatives import Fit, try_alternatives

    size, own, device = context.batch_size, context.preprocess, context.processes.device
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    crops = {f"a central crop of {share:g}": share for share in (1.0, 0.875) if share != own.crop_pct}
    crops = {name: share for name, share in crops.items() if only in (None, name)}
    streams = [
        read_batches(context.source, chunks, each, skip_bad=context.skip_bad, device=device)
        for each in (own, *(replace(own, crop_pct=share) for share in crops.values()))
    ]
    right: list[Tensor] = []
    found: dict[str, list[Fit]] = {}
    for batch, *cropped in zip(*streams, strict=True):
        with context.arithmetic():
            as_given, fits = try_alternatives(context.model, batch.x, batch.y, size, only)
            for (name, share), other in zip(crops.items(), cropped, strict=True):
                logits = context.model(other.x)
                fits.append(Fit.of(name, logits, batch.y, as_given, f"--crop-pct {share:g}"))
        right.append(as_given.argmax(1) == batch.y)
        for fit in fits:
            found.setdefault(fit.name, []).append(fit)
    return torch.cat(right), [Fit.joined(parts) for parts in found.values()]


def _better(name: str, accuracy: float, as_given: Tensor, remedy: str, likelier: int | None = None) -> Finding:
    given = float(as_given.double().mean())
    evidence = f"{percent(given)} as given, {percent(accuracy)} with {name}, on {len(as_given)} images"
    evidence += "" if likelier is None else f", of which {likelier} have a likelier label with it"
    return BETTER_SET_UP.finding(BROKEN, evidence, remedy)


def _findings_about_assumptions(target: Target) -> list[Finding]:
    found = []
    if target.mapping is not None and target.mapping.doubt:
        advice = "name the model's outputs in their order with --classes FILE, or rename the data's classes"
        found.append(CLASS_MAPPING.finding(SUSPICIOUS, target.mapping.doubt, advice))
    for doubt in normalization_doubts(target.model.record):
        advice = "normalize exactly once, inside the model, as it was trained: vitadel.wrap(model, mean=..., std=...)"
        found.append(OUTSIDE_NORMALIZATION.finding(SUSPICIOUS, doubt, advice))
    trained_on = (target.model.record.training or {}).get("trained_on")
    if _are_training_images(target, trained_on):
        evidence = f"{target.data_spec} is {'what the model was trained on' if trained_on else 'a training split'}"
        advice = "audit images that the model was not trained on: @test or @val"
        found.append(TRAINING_IMAGES.finding(SUSPICIOUS, evidence, advice))
    return found


def _are_training_images(target: Target, trained_on: str | None) -> bool:
    if target.given_as_object:
        return False
    if target.data_spec.rpartition("@")[2] in ("train", "trainval"):
        return True
    root = Path(target.data_root or "data")
    try:
        here, there = (parse_spec(str(spec), root=root, split=None) for spec in (target.data_spec, trained_on))
        return trained_on is not None and same_images(here, there)
    except UserError:
        return False


def known_accuracy(target: Target) -> Known | None:
    """What is known of the model's clean accuracy on such data: from its record, its paper, or timm's list."""
    record = target.model.record
    if target.model_spec.startswith("published:"):
        from vitadel.evaluation.audit.published_numbers import published_accuracy

        accuracy, source = published_accuracy(target)
        return None if accuracy is None else Known(accuracy, source, exact=True)
    own = record.training
    if own is not None and own.get("measure", "accuracy") == "accuracy":
        source = f"on {own['n']} held-out images of its training ({own['data']})"
        return Known(float(own["clean"]), source, exact=True)
    mapping = target.mapping
    if record.num_classes != 1000 or mapping is None or "ImageNet-1k" not in mapping.origin:
        return None
    if getattr(target.source, "among", None) is not None or target.data_spec.startswith(("imagenet-a", "imagenet-r")):
        return None  # harder images, other classes
    from vitadel.backbones.timm_models import published_top1

    top1 = published_top1(record.name)
    return None if top1 is None else Known(top1, f"timm's {record.name} on ImageNet's validation images", exact=False)
