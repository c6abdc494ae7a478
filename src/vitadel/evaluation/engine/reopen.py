"""Model and images of an earlier audit, opened again; or a model, opened as its settings say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitadel.errors import UserError
from vitadel.quantities import read_quantity
from vitadel.runtime.opening import Opening, recorded_opening
from vitadel.runtime.run_folder import read_command
from vitadel.runtime.trusted_code import check_code_trusted

if TYPE_CHECKING:
    from torch import nn

    from vitadel.evaluation.engine.target import Target


_OPENING = [*(each.name for each in fields(Opening)), "no_normalize", "model_kwargs"]  # two flags set other fields
_FIXED_BY_AN_AUDIT = {*_OPENING, "limit", "eps", "norm"} - {"device"}
OPENING_SETTINGS = sorted({*_FIXED_BY_AN_AUDIT, "device"} - {"model"})
"""Settings that `reopen` reads; all others belong to the caller."""
_ABOUT_THE_MODEL = {*_OPENING} - {"model", "data", "data_root", "skip_bad", "batch_size", "seed", "device"}
_MODEL_VERBS = ("harden", "probe")  # their run folders are models


@dataclass(frozen=True)
class Reopened:
    """A model with its images, not opened yet, and what an audit asked of them.

    `recorded` are the settings of the audit whose run folder was named, `given` the settings that take precedence.
    """

    opening: Opening
    request: Mapping[str, Any]
    given: Collection[str] = ()
    recorded: Mapping[str, Any] | None = None
    model: nn.Module | None = None  # where it is no name, but an object
    data: Any = None

    def open_target(self, *, for_features: bool = False) -> Target:
        """Open model and data; a `UserError` if they have changed since the audit and no setting asked for others."""
        from vitadel.evaluation.engine.target import apply_class_subset, open_as

        target = open_as(self.opening, self.model, self.data, for_features=for_features)
        recorded = self.recorded
        if recorded is None:
            return target
        if not _ABOUT_THE_MODEL & {*self.given}:
            if "opened_fingerprint" in recorded:  # threat levels may put a head on the model that they open
                then, now = recorded["opened_fingerprint"], target.model_fingerprint()
            else:
                then, now = recorded.get("model_fingerprint"), apply_class_subset(target).model_fingerprint()
            _check_unchanged("model", str(recorded["model"]), then, now)
        if not {*self.given} & {"data", "data_root"}:
            limit, seed = recorded.get("limit"), int(recorded.get("seed", 0))
            indices, _ = target.selection(limit, seed, bool(recorded.get("skip_bad")))
            now = target.data_fingerprint(indices)
            _check_unchanged("data", str(recorded["data"]), recorded.get("data_fingerprint"), now)
        return target


def reopen(run_or_model: str | Path | nn.Module, settings: Mapping[str, Any], given: Collection[str]) -> Reopened:
    """`settings` for a model; for the run folder of an audit, those of the audit, except for the settings `given`."""
    known: dict[str, Any] = {**settings, "model": str(run_or_model) if isinstance(run_or_model, Path) else run_or_model}
    command = _audit_command(Path(known["model"])) if isinstance(known["model"], str) else None
    recorded = None
    if command is not None:
        recorded = command["settings"]
        single = {name: value for name, value in recorded.items() if not isinstance(value, list | dict)}
        fixed = {**recorded_opening(command).to_json(), **single}  # a suite has several eps: the caller's holds
        taken = (_FIXED_BY_AN_AUDIT - {*given}) | {"model"}
        known |= {name: value for name, value in fixed.items() if name in taken}
        model = str(known["model"])
        check_code_trusted(model if model.startswith("python:") else None, f"the run folder '{run_or_model}'")
    if isinstance(known["data"], Path):
        known["data"] = str(known["data"])
    objects = {name: known[name] for name in ("model", "data") if not isinstance(known[name], str)}
    opening = Opening.read(**{**known, **dict.fromkeys(objects)})
    request = {
        "limit": known.get("limit"),
        "batch_size": opening.batch_size,
        "seed": opening.seed,
        "skip_bad": opening.skip_bad,
        "eps": read_quantity(str(known["eps"]), "eps"),
        "norm": known["norm"],
    }
    return Reopened(opening, request, given, recorded, **objects)


def _audit_command(folder: Path) -> dict[str, Any] | None:
    """The command.json of an audit; None for anything that is opened as a model."""
    command = read_command(folder)
    if command is None or command["verb"] in _MODEL_VERBS or (folder / "recipe.yaml").exists():
        return None
    verb, settings = command["verb"], command["settings"]
    if verb != "audit" or not isinstance(settings, dict) or not {"model", "data"} <= settings.keys():
        raise UserError(f"{folder} holds a run of 'vitadel {verb}'. Give the run folder of an audit, or a MODEL.")
    return command


def _check_unchanged(what: str, name: str, then: object, now: str) -> None:
    if then != now:
        raise UserError(
            f"the {what} {name} has changed since the audit: its fingerprint is {now}, in the audit it was {then}. "
            f"Restore the old {what}, audit the new one, or give MODEL and --data instead of the run folder."
        )
