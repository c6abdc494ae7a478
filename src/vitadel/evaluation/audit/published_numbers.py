"""A run on a published model beside the numbers that were published for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitadel.backbones.published import Published, describe_normalization, describe_resizing, find_published
from vitadel.evaluation.audit.protocols import kind_of_data
from vitadel.quantities import read_quantity

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.evaluation.engine.target import Target

__all__ = ["compare_with_published", "published_accuracy"]

_ATTACKS = ("autoattack", "pgd-20")
_BENCHMARKS = ("imagenet", "cifar10", "cifar100")


@dataclass(frozen=True)
class _Comparison:
    """One published number, in percent, beside a share of images with its interval."""

    what: str
    published: float
    share: float
    low: float
    high: float

    @property
    def consistent(self) -> bool:
        """Whether the published number lies in the 95 % interval, up to the digits it was published with."""
        return self.low - 5e-5 <= self.published / 100 <= self.high + 5e-5

    @property
    def sentence(self) -> str:
        here = f"{100 * self.share:.1f} ({100 * self.low:.1f} to {100 * self.high:.1f})"
        if self.consistent:
            verdict = "consistent"
        elif self.share < self.published / 100:
            verdict = "below the published by more than chance: check weights, preprocessing, images"
        else:
            verdict = "above the published by more than chance: check that attack and images are the same"
        return f"{self.what}: published {self.published:.2f}; here {here}: {verdict}"


def compare_with_published(target: Target, request: AuditRequest, results: Mapping[str, Any]) -> dict[str, Any]:
    """The field `published` of the results; empty if the model is not a published one.

    Accuracies are shares, as in all results. `consistent` is None if nothing could be compared; the sentences
    say why not.
    """
    if not target.model_spec.startswith("published:"):
        return {}
    published = find_published(target.model_spec.removeprefix("published:"))
    attack = next((name for name in _ATTACKS if name in published.numbers), None)
    robust = published.numbers.get(attack) if attack else None
    reason, remark = _about_data(published, target)
    found, skipped = [], [reason] if reason else []
    clean = published.numbers.get("clean")
    if not reason and clean is not None:
        found.append(_compare("clean", clean, results["clean"], "accuracy"))
    if not reason and robust is not None and attack is not None:
        entry = next((entry for entry in results["attacks"] if entry["name"] == attack), None)
        difference = _about_threat(published, request, attack)
        if difference or entry is None:
            skipped.append(f"robust accuracy is not compared: {difference or f'{attack} was not run'}")
        else:
            what = f"{attack}, {published.norm} {published.eps}"
            found.append(_compare(what, robust, entry, "robust_accuracy"))
    best = published.numbers.get("best_known")
    sentences = [each.sentence for each in found] + [
        f"{text}." for text in (*skipped, *_about_opening(published, target))
    ]
    if best is not None:
        sentences.append(f"Best known: {best:.2f}, lower than {attack} ({robust:.2f}). {published.note}.")
    return {
        "published": {
            "model": published.spec,
            "clean": _as_share(clean),
            "robust": _as_share(robust),
            "attack": attack,
            "norm": published.norm,
            "eps": published.eps,
            "best_known": _as_share(best),
            "source": published.paper,
            "consistent": all(each.consistent for each in found) if found else None,
            "sentences": [*sentences, *([remark] if remark and found else [])],
        }
    }


def published_accuracy(target: Target) -> tuple[float | None, str]:
    """The published clean accuracy of a published model as a share, and its source; None on other images."""
    published = find_published(target.model_spec.removeprefix("published:"))
    reason, _ = _about_data(published, target)
    return None if reason else _as_share(published.numbers.get("clean")), f"as published in {published.paper}"


def _compare(what: str, published: float, entry: Mapping[str, Any], name: str) -> _Comparison:
    low, high = entry["ci95"]
    return _Comparison(what, published, entry[name], low, high)


def _as_share(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 6)


def _about_data(published: Published, target: Target) -> tuple[str, str]:
    """Why the images cannot be compared with the published ones, or what is taken for granted about them."""
    kind = kind_of_data(target)[0]
    if kind == published.dataset:
        return "", ""
    if kind in _BENCHMARKS or len(target.source.classes) != (target.model.record.num_classes or 0):
        return f"nothing is compared: the published numbers are for {published.dataset}, not {target.data_spec}", ""
    return "", f"This takes {target.data_spec} for images of {published.dataset}."


def _about_opening(published: Published, target: Target) -> list[str]:
    """What the user changed about the way images reach the model."""
    record = target.model.record
    size = record.input_size[0] if record.input_size else 0
    here = f"{size} pixels, {describe_normalization(record.mean, record.std)}, {describe_resizing(record, size)}"
    theirs = f"{published.size} pixels, {published.normalization}, {published.resizing}"
    return [] if here == theirs else [f"opened with {here}, but published with {theirs}"]


def _about_threat(published: Published, request: AuditRequest, attack: str) -> str:
    if request.norm != published.norm or request.eps != read_quantity(str(published.eps), "eps"):
        return f"it was published for {published.norm}, eps {published.eps}"
    before = request.attacks[: request.attacks.index(attack)] if attack in request.attacks else ()
    if before and not request.independent:
        return f"{attack} ran after {', '.join(before)}, on the images that these left"
    return ""
