"""Analyses of the papers, on any model: each is a function `study_NAME` in a module of its name, and a command."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitadel.errors import check_known

if TYPE_CHECKING:
    from torch import nn

    from vitadel.evaluation.engine.run import Outcome

_STUDIES = (
    *("curves", "saturation", "gradients", "scaled-blocks"),
    *("perturbations", "accumulation", "attention", "corruption-masks"),
)
_MODULES = [name.replace("-", "_") for name in _STUDIES]
_DEFAULTS = {"data": "shapes", "limit": 200, "eps": "8/255", "norm": "linf"}

__all__ = ["accumulation", "attention", "corruption_masks", "curves", "find_study", "gradients", "perturbations"]
__all__ += ["run_study", "saturation", "scaled_blocks", "study"]


def study(name: str, run_or_model: str | Path | nn.Module = "zoo:shapes-robust", **settings: Any) -> dict[str, Any]:
    """Run one of the papers' analyses: `vitadel.study("curves", "runs/audit-...", steps=(1, 10, 100))`.

    `run_or_model` is any model, or the run folder of an audit, whose model, data, limit, seed, eps and norm are used.
    Settings are the command's flags (`data`, `limit`, `eps`, `out`, ...) and the fields of the study's request. Writes
    `out`, or a new run folder below runs/; returns what `results.json` holds.
    """
    values = dict(settings)
    options = {option: values.pop(option) for option in ("out", "resume") if option in values}
    return run_study(name, run_or_model, {**_DEFAULTS, **values}, {*values}, **options).results


def run_study(
    name: str, run_or_model: str | Path | nn.Module, settings: Mapping[str, Any], given: Collection[str], **options: Any
) -> Outcome:
    """Run a study by its command's name; settings that were not `given` come from the audit if a run folder is named.

    `options` are those of the run engine.
    """
    from vitadel.evaluation.engine.reopen import OPENING_SETTINGS, reopen
    from vitadel.runtime.distributed import join_processes

    make_request, measure = find_study(name)
    reopened = reopen(run_or_model, settings, given)
    # A setting of None is one that was not given: the request has its default.
    own = {field: value for field, value in settings.items() if field not in OPENING_SETTINGS and value is not None}
    request = make_request(**reopened.request, **own)
    processes = join_processes(reopened.opening.device)
    outcome: Outcome = measure(reopened.open_target(), request, processes, **options)
    return outcome


def find_study(name: str) -> tuple[Any, Any]:
    """Return request and function of a study by its command's name: CurvesRequest and study_curves for curves."""
    check_known("study", name, _STUDIES)
    idea = name.replace("-", "_")
    module = importlib.import_module(f"vitadel.studies.{idea}")
    request = "".join(part.capitalize() for part in idea.split("_")) + "Request"
    return getattr(module, request), getattr(module, f"study_{idea}")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"vitadel.studies.{name}")
    raise AttributeError(f"module 'vitadel.studies' has no attribute {name!r}")
