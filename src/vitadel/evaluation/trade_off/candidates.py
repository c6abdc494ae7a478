"""The models of a trade-off: TORA at several lambdas, fusions between two of them, baselines, any other model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from vitadel.adapters.adapted_model import open_model
from vitadel.adapters.tora.tora_files import fusion_of, interpolate_fusions, put_fusion
from vitadel.adapters.tora.tora_settings import BRANCHES
from vitadel.adapters.tora.tora_vit import BranchClassifier, Tora, find_tora
from vitadel.backbones.classifier import Classifier
from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import Target, open_target, subset_like
from vitadel.types import Source

__all__ = ["JOINT", "Candidate", "between", "check_alike", "open_candidates"]

JOINT = "joint"
"""The output that is deployed, beside those of the branches."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A point of the figure: a model with its data. `knob` says between which two fusions it lies, and where."""

    name: str
    target: Target
    knob: Mapping[str, Any] | None = None

    @property
    def tora(self) -> Tora | None:
        return find_tora(self.target.model)

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches with a head of their own; none if there is only one head."""
        return BRANCHES if self.tora is not None and self.tora.settings.branches == BRANCHES else ()

    def output(self, head: str) -> nn.Module:
        """The model as seen at one head, or at the joint output."""
        model = self.target.model
        return model if head == JOINT else subset_like(model, BranchClassifier(cast(Tora, self.tora), head))

    def describe(self) -> dict[str, Any]:
        """The fields that identify it in results."""
        tora = self.tora
        return {
            "name": self.name,
            "spec": self.target.model_spec,
            "kind": "model" if tora is None else tora.settings.kind,
            "lambda": None if tora is None else tora.trade_off,
            "knob": self.knob,
            "parameters": sum(each.numel() for each in self.target.model.parameters()),
            "fingerprint": self.target.model_fingerprint(),
            "notes": dict(self.target.model.record.notes),
        }


def open_candidates(
    specs: Sequence[str],
    data: str | Source,
    *,
    data_root: str | Path | None = None,
    skip_bad: bool = False,
    knob: int = 0,
    model_options: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Each by the name of its folder, all with the same data; then `knob` fusions between those of one training.

    `model_options` are for all of them, such as the `crop_pct` of a protocol.
    """
    if not specs:
        raise UserError("a trade-off needs at least one model: give run folders of `vitadel harden tora/...`")
    first = open_target(specs[0], data, data_root=data_root, skip_bad=skip_bad, model_options=model_options)
    targets = [first]
    for spec in specs[1:]:
        targets.append(replace(first, model=cast(Classifier, open_model(spec, model_options)), model_spec=spec))
    found = [Candidate(name, target) for name, target in zip(_names(specs), targets, strict=True)]
    for each in found[1:]:
        check_alike(found[0], each)
    return [*found, *between(found, knob)]


def between(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` fusions, evenly spaced, between those for the smallest and the largest lambda of each training."""
    if count < 0:
        raise UserError(f"--knob must not be negative, got {count}")
    if count == 0:
        return []
    trainings: dict[str, list[Candidate]] = {}
    for each in candidates:
        if each.tora is not None and each.tora.settings.fuses and each.tora.trade_off is not None:
            trainings.setdefault(fusion_of(each.tora).base, []).append(each)
    found = []
    for several in trainings.values():
        ends = sorted(several, key=_lambda)
        if _lambda(ends[0]) < _lambda(ends[-1]):
            found += [_interpolate(ends[0], ends[-1], place / (count + 1)) for place in range(1, count + 1)]
    if not found:
        raise UserError(
            "--knob goes from one fusion to another of the same training: give two runs of phase 2 with different "
            "lambdas that started from one phase 1"
        )
    return found


def _lambda(candidate: Candidate) -> float:
    return cast(float, cast(Tora, candidate.tora).trade_off)


def _interpolate(first: Candidate, second: Candidate, t: float) -> Candidate:
    one, other = cast(Tora, first.tora), cast(Tora, second.tora)
    tora = copy.deepcopy(one, {id(one.classifier): one.classifier})  # the frozen backbone is shared
    put_fusion(tora, interpolate_fusions(fusion_of(one), fusion_of(other), t))
    name = f"{first.name} to {second.name} at {t:.3g}"
    knob = {"from": first.name, "to": second.name, "lambdas": [one.trade_off, other.trade_off], "at": t}
    return Candidate(name, replace(first.target, model=cast(Classifier, tora), model_spec=name), knob)


def _names(specs: Sequence[str]) -> list[str]:
    """Folders by their last name, with a number where that repeats."""
    names = [Path(spec).resolve().name if Path(spec).is_dir() else spec for spec in specs]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} [{place}]" if name in twice else name for place, name in enumerate(names, start=1)]


def check_alike(first: Candidate, other: Candidate) -> None:
    """Refuse candidates for different classes, image sizes or preprocessing."""
    one, two = first.target, other.target
    for what, mine, theirs in (
        ("classes", one.model.record.num_classes, two.model.record.num_classes),
        ("image size and preprocessing", _view(one), _view(two)),
    ):
        if mine != theirs:
            raise UserError(
                f"'{other.name}' and '{first.name}' differ in {what} ({theirs} and {mine}), so they cannot be "
                "evaluated on the same images. Compare models for one input."
            )


def _view(target: Target) -> Preprocess:
    """The preprocessing; the mean color counts only where it fills a border."""
    given = target.preprocess
    return given if given.crop_mode == "border" else replace(given, mean=(0.0, 0.0, 0.0))
