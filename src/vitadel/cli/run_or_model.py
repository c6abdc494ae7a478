"""A study's model and images: a MODEL, or what an earlier audit was asked for, with flags that win over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from vitadel.cli import audit, run_verb
from vitadel.cli.flag_groups import flags_of, given_flags
from vitadel.cli.options import Choice, Running, Sampling, Threat
from vitadel.errors import UserError, nearest_names

if TYPE_CHECKING:
    from torch import nn

    from vitadel.evaluation.engine.run import Outcome
    from vitadel.evaluation.engine.target import Target

__all__ = [
    "IMAGES",
    "Calibration",
    "Opening",
    "RunOrModel",
    "conduct",
    "open_revisited",
    "opened_from_python",
    "revisited",
    "shared_settings",
    "study",
]

RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN-OR-MODEL", help="run folder of an audit, or a MODEL as 'vitadel audit' takes it")
]
Calibration = Annotated[
    str | None,
    typer.Option(help="data that an attack may study first; else the training split or what --limit leaves out"),
]
"""For attacks that first study the model."""
IMAGES = Sampling("shapes", limit=200)
"""What studies look at unless an audit or a flag says otherwise."""

_DEFAULT = "zoo:shapes-robust"
_MODELS = ("harden", "probe")  # whose run folders are models
# What typer raises at words it cannot read, be its click a package or its own.
_Unread: type[Exception] = typer.BadParameter.__mro__[1]
_B = TypeVar("_B", Choice, Sampling, Threat, Running)


@dataclass(frozen=True)
class Opening:
    """What is studied; `recorded` are the settings of the audit that it was taken from."""

    model: str | nn.Module
    sampling: Sampling
    threat: Threat
    choice: Choice
    recorded: Mapping[str, Any] | None = None


def revisited(opening: Opening, given: set[str]) -> Opening:
    """As it is for a MODEL; for the folder of an audit, what that was asked for, except for the flags `given`."""
    command = _command_in(Path(opening.model)) if isinstance(opening.model, str) else None
    if command is None:
        return opening
    asked, argv = command["settings"], [str(word) for word in command.get("argv") or []]
    # The settings know what flags, defaults or a protocol came to. How files are opened only the flags know, which an
    # audit that was called from Python does not have.
    flags = _parsed(argv[1:], str(opening.model)) if argv[:1] == ["audit"] else {}
    single = {name: value for name, value in asked.items() if not isinstance(value, list | dict)}  # a suite has several
    if isinstance(asked.get("eps"), list):  # budgets of a suite: the command's own default holds
        flags.pop("eps", None)
    known = {**flags, **single}
    return Opening(
        model=str(asked["model"]),
        sampling=_taken(opening.sampling, known, given),
        threat=_taken(opening.threat, known, given),
        choice=_taken(opening.choice, flags, given),
        recorded=asked,
    )


def _command_in(folder: Path) -> dict[str, Any] | None:
    """What the audit was asked whose folder this is; None for anything that is opened as a model."""
    try:
        command = json.loads((folder / "command.json").read_text("utf-8"))
        verb, settings = command["verb"], command["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if verb in _MODELS or (folder / "recipe.yaml").exists():
        return None
    if verb != "audit" or not isinstance(settings, dict) or not {"model", "data"} <= settings.keys():
        raise UserError(f"{folder} holds a run of 'vitadel {verb}'; name the folder of an audit, or a MODEL")
    return cast(dict[str, Any], command)


def _parsed(words: list[str], folder: str) -> dict[str, Any]:
    """The flags of an audit by the audit's own parser, so that a study opens what it opened."""
    alone = typer.Typer(add_completion=False)
    alone.command("audit")(audit.audit)
    try:
        return dict(typer.main.get_command(alone).make_context("audit", words).params)
    except _Unread as error:
        raise UserError(
            f"the command of {folder} is not one that this version knows: {error}. Name model and data by themselves."
        ) from None


def _taken(bundle: _B, known: Mapping[str, Any], given: set[str]) -> _B:
    """The bundle with what is known of its flags, except for those `given`."""
    return replace(
        bundle, **{name: known[name] for name in flags_of(type(bundle)) if name in known and name not in given}
    )


def open_revisited(opening: Opening, given: set[str], *, for_features: bool = False) -> Target:
    """Model and data; a `UserError` if they are no more what the audit had, and no flag asked for others."""
    target = run_verb.open_chosen(
        cast(str, opening.model), opening.choice, opening.sampling, for_features=for_features
    )  # a module is taken as it is
    if opening.recorded is None:
        return target
    from vitadel.evaluation.engine.class_subset import apply_class_subset

    asked = opening.recorded
    if not given & {*flags_of(Choice)}:
        if "opened_fingerprint" in asked:  # of a climb, which may put a head on what it opened
            then, now = asked["opened_fingerprint"], target.model_fingerprint()
        else:
            then, now = asked.get("model_fingerprint"), apply_class_subset(target).model_fingerprint()
        _check("model", str(asked["model"]), then, now)
    if not given & {"data", "data_root"}:
        indices, _ = target.selection(asked.get("limit"), int(asked.get("seed", 0)), bool(asked.get("skip_bad")))
        _check("data", str(asked["data"]), asked.get("data_fingerprint"), target.data_fingerprint(indices))
    return target


def _check(what: str, name: str, then: object, now: str) -> None:
    if then != now:
        raise UserError(
            f"the {what} {name} is no more what it was in the audit: its fingerprint is {now}, then it was {then}. "
            f"Bring back the old {what}, audit the new one, or name the MODEL and --data by themselves."
        )


def _conducted(
    name: str, opening: Opening, given: set[str], run: Running, own: Mapping[str, Any], *, shown: bool
) -> Outcome:
    """The study of this name, by its module: see `reporting.studies`."""
    from vitadel.quantities import read_quantity
    from vitadel.runtime.distributed import join_processes
    from vitadel.studies import named

    make_request, measure = named(name)
    opening = revisited(opening, given)
    eps = read_quantity(opening.threat.eps, "eps")
    request = make_request(**opening.sampling.for_request(), eps=eps, norm=opening.threat.norm, **own)
    processes = join_processes(run.device)
    target = open_revisited(opening, given)
    argv = sys.argv[1:] if shown else ()
    outcome: Outcome = measure(
        target, request, processes, out=run.out, resume=run.resume, show_progress=shown, argv=argv
    )
    return outcome


def conduct(ctx: typer.Context, name: str, opening: Opening, run: Running, **own: Any) -> None:
    """Run a study by its flags, write its report and tell it; `own` are the fields of its order that others lack."""
    from vitadel.reporting.studies import show_study

    outcome = _conducted(name, opening, given_flags(ctx), run, own, shown=True)
    if outcome.is_main and outcome.folder is not None:
        run_verb.tell(outcome.results, outcome.folder.path, run, show_study)


def study(name: str, run_or_model: str | Path | nn.Module = _DEFAULT, **settings: Any) -> dict[str, Any]:
    """A study of the papers' analyses from Python: `vitadel.study("curves", "runs/audit-...", steps=(1, 10, 100))`.

    `run_or_model` is the run folder of an audit, whose model, data, limit, seed, eps and norm are taken, or any model.
    Settings are the command's flags (`data`, `limit`, `eps`, `out`, ...) and the fields of the study's order. Writes
    `out`, or a new run folder below runs/; returns what `results.json` holds.
    """
    from vitadel.reporting.studies import STUDIES

    if name not in STUDIES:
        raise UserError(f"unknown study {name!r}{nearest_names(name, STUDIES) or '.'} Known: {', '.join(STUDIES)}.")
    opening, run, own = opened_from_python(run_or_model, settings, IMAGES)
    return _conducted(name, opening, set(settings), run, own, shown=False).results


def opened_from_python(
    run_or_model: str | Path | nn.Module, settings: Mapping[str, Any], images: Sampling
) -> tuple[Opening, Running, dict[str, Any]]:
    """What a command's bundles of flags would be for these settings, and the settings that belong to none of them."""
    own = dict(settings)
    taken = {kind: {flag: own.pop(flag) for flag in flags_of(kind) if flag in own} for kind in _BUNDLES}
    opening = Opening(
        str(run_or_model) if isinstance(run_or_model, Path) else run_or_model,
        Sampling(**{**asdict(images), **taken[Sampling]}),
        Threat(**taken[Threat]),
        Choice(**taken[Choice]),
    )
    return opening, Running(**taken[Running]), own


def shared_settings() -> list[str]:
    """Those that `opened_from_python` takes, whatever is studied."""
    return [flag for kind in _BUNDLES for flag in flags_of(kind)]


_BUNDLES: tuple[type[Any], ...] = (Sampling, Threat, Choice, Running)
