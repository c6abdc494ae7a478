"""Run what the columns of a table name: each evaluation is a run of its own verb, in a folder of its own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from vitadel.adapters.adapted_model import options_for_features
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError, check_known
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.engine.run import RunOptions, request_from
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.papers.paper_documents import Evaluation
from vitadel.quantities import read_quantity
from vitadel.runtime.distributed import Processes

_QUANTITIES = ("eps", "budgets")


@dataclass(frozen=True)
class Subject:
    """The model of a row: a training's folder or a MODEL with options, and the test data of the row."""

    model: str
    options: Mapping[str, Any]
    data: str | None
    data_root: str | None
    training: Path | None = None
    heads: Callable[[str], Path] | None = None
    """The run folder of an evaluation of this name, a probe, with the head that it trained."""
    other_end: str | None = None
    """Another TORA of the same start: the model is the fusion halfway between both."""

    def target(self, evaluation: Evaluation, *, for_features: bool = False) -> Target:
        data = evaluation.data or self.data
        if data is None:
            raise UserError("neither the evaluation nor the training names test data")
        options = {**self.options, **evaluation.options}
        if self.other_end is not None:
            return self._halfway(self.other_end, data, options)
        if for_features:
            options = options_for_features(self.model, options)
        target = open_target(
            self.model, data, data_root=self.data_root, model_options=options or None, for_features=for_features
        )
        return target if evaluation.branch is None else _at_branch(target, evaluation.branch)

    def _halfway(self, other_end: str, data: str, options: Mapping[str, Any]) -> Target:
        from vitadel.evaluation.trade_off.candidates import open_candidates

        ends = [self.model, other_end]
        candidates = open_candidates(ends, data, data_root=self.data_root, model_options=options or None, knob=1)
        return candidates[-1].target


def _at_branch(target: Target, branch: str) -> Target:
    """The model as seen at one of its heads."""
    from vitadel.evaluation.trade_off.candidates import JOINT, Candidate

    candidate = Candidate(target.model_spec, target)
    check_known("head", branch, (*candidate.branches, JOINT), f" of {target.model_spec}")
    return replace(target, model=cast(Classifier, candidate.output(branch)))


def evaluate(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    """Run one evaluation; its results are in the folder that `options` name."""
    _VERBS[evaluation.run](subject, evaluation, processes, options)


def check_evaluation(evaluation: Evaluation, values: Sequence[str]) -> None:
    """Refuse settings that the verb does not take, and values that an audit of these attacks would not have."""
    settings = read_settings(evaluation.settings)
    if evaluation.run in _REQUESTS:
        place, _, name = _REQUESTS[evaluation.run].rpartition(".")
        request_from(getattr(importlib.import_module(place), name), evaluation.run, settings)
    elif evaluation.run == "study":
        from vitadel.studies import find_study

        request_from(find_study(str(evaluation.name))[0], f"study {evaluation.name}", settings)
    if evaluation.run == "audit":
        attacks = [re.sub(r"^(paper|clean_scaled|balance):", "", value) for value in values if value != "clean"]
        for attack in attacks:
            check_known("attack", attack, settings["attacks"], " of the evaluation")


_REQUESTS = {
    "audit": "vitadel.evaluation.audit.audit.AuditRequest",
    "corruptions": "vitadel.evaluation.corruptions.request.CorruptionRequest",
    "stability": "vitadel.evaluation.stability.run.StabilityRequest",
    "trade-off": "vitadel.evaluation.trade_off.run.TradeOffRequest",
    "threat-levels": "vitadel.threat_levels.request.ThreatLevelsRequest",
}


def read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request from a document: fractions as numbers, lists as tuples."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _QUANTITIES:
            value = tuple(map(read_quantity, value)) if isinstance(value, list | tuple) else read_quantity(value)
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _audit(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    request = request_from(AuditRequest, "audit", read_settings(evaluation.settings))
    run_audit(subject.target(evaluation), request, processes, **options)


def _corruptions(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.evaluation.corruptions.request import CorruptionRequest
    from vitadel.evaluation.corruptions.run import run_corruptions

    request = request_from(CorruptionRequest, "corruptions", read_settings(evaluation.settings))
    run_corruptions(subject.target(evaluation), request, processes, **options)


def _stability(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.evaluation.stability.run import StabilityRequest, run_stability

    request = request_from(StabilityRequest, "stability", read_settings(evaluation.settings))
    run_stability(subject.target(evaluation), request, processes, **options)


def _trade_off(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.evaluation.trade_off.candidates import open_candidates
    from vitadel.evaluation.trade_off.run import TradeOffRequest, run_trade_off

    data = evaluation.data or subject.data
    if data is None:
        raise UserError("neither the evaluation nor the training names test data")
    request = request_from(TradeOffRequest, "trade-off", read_settings(evaluation.settings))
    opened = {**subject.options, **evaluation.options}
    candidates = open_candidates([subject.model], data, data_root=subject.data_root, model_options=opened)
    run_trade_off(candidates, request, processes, **options)


def _threat_levels(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.heads.linear_probe import load_head
    from vitadel.threat_levels.request import ThreatLevelsRequest
    from vitadel.threat_levels.run import run_threat_levels

    request = request_from(ThreatLevelsRequest, "threat-levels", read_settings(evaluation.settings))
    if request.features_only:
        from vitadel.threat_levels.feature_levels import run_feature_levels

        run_feature_levels(subject.target(evaluation, for_features=True), request, processes, **options)
        return
    head = None
    if evaluation.head is not None and subject.heads is not None:
        head = partial(load_head, subject.heads(evaluation.head))
    target = subject.target(evaluation, for_features=head is not None)
    run_threat_levels(target, request, processes, head=head, **options)


def _study(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.studies import find_study

    make_request, measure = find_study(str(evaluation.name))
    request = request_from(make_request, f"study {evaluation.name}", read_settings(evaluation.settings))
    measure(subject.target(evaluation), request, processes, **options)


def _probe(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.heads.probe import run_probe
    from vitadel.heads.probe_recipe import build_probe, with_tokens
    from vitadel.reproduce.jobs import below_root
    from vitadel.training.recipes.compose import compose

    recipe, _, row = str(evaluation.recipe).partition("#")
    document = compose(recipe, row or None, evaluation.settings)
    moved = {
        f"data.{key}": below_root(value, subject.data_root)
        for key, value in document["data"].items()
        if isinstance(value, str)
    }
    document = compose(recipe, row or None, {**evaluation.settings, **moved})
    tokens = None if subject.training is None else subject.training / "weights" / "best.safetensors"
    built = build_probe(with_tokens(document, tokens), recipe)
    run_probe(built, recipe, processes, data_root=subject.data_root, allow_readable=True, **options)


def _activations(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.evaluation.activations import run_inspection

    settings = {"data": evaluation.data or subject.data, "data_root": subject.data_root, **subject.options}
    defaults = {"limit": 100, "batch_size": 32, "eps": "8/255", "norm": "linf", "device": str(processes.device)}
    own = {**defaults, **evaluation.settings}
    run_inspection(subject.model, "features-30", {**own, **settings}, {*settings}, **options)


def _model(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    from vitadel.reproduce.model_size import run_model_size

    run_model_size(subject.model, subject.options, processes, **options)


def _nothing(subject: Subject, evaluation: Evaluation, processes: Processes, options: RunOptions) -> None:
    """What a column reads from the training itself is there already."""


_VERBS = {
    "audit": _audit,
    "corruptions": _corruptions,
    "stability": _stability,
    "trade-off": _trade_off,
    "threat-levels": _threat_levels,
    "study": _study,
    "probe": _probe,
    "activations": _activations,
    "model": _model,
    "training": _nothing,
}
