"""What a climb needs before it begins: token sets that are there, and those that must be trained or fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier
from vitadel.adapters.tokens.token_files import load_tokens
from vitadel.data.overlap import same_images
from vitadel.errors import UserError
from vitadel.evaluation.engine.calibration import CalibrationImages, calibration_images
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import progress
from vitadel.runtime.run_folder import RunFolder
from vitadel.threat_levels.controls import controls
from vitadel.threat_levels.extraction import EXPOSED, Extracted, extract_tokens, read_extracted, save_extracted
from vitadel.threat_levels.levels import AttackerAssets
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.token_training import TokenRecipe, Trainer, TrainingRun, control_changes, read_recipe
from vitadel.training.recipes.check import read_data_spec
from vitadel.types import Source

__all__ = ["Armed", "Supplies", "arm", "gather", "planned"]

_BATCH = 16  # images to fit tokens to, at once
_SETS = "sets"  # where in the run folder tokens are kept
_SURROGATES, _BANK, _CONTROLS, _EXTRACTION = 1, 101, 201, 301  # what is added to the seed for each


@dataclass(frozen=True, eq=False)
class Supplies:
    """What is there before anything is trained: the recipe, by what to train which sets ("surrogates", "bank" and
    "controls", as far as there are any to train), sets from files, and the images that tokens are fitted to (T7)."""

    recipe: TokenRecipe | None = None
    lessons: Mapping[str, TrainingRun] = field(default_factory=dict)
    surrogates: tuple[TokenClassifier, ...] = ()
    bank: tuple[TokenClassifier, ...] = ()
    images: tuple[Source, Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        """What a resumed climb must agree with; `control_data` None means the recipe's own images."""
        controls = self.lessons.get("controls")
        return {
            "surrogate_sets": _names(self.surrogates),
            "bank_sets": _names(self.bank),
            "control_data": None if controls is None else controls.data,
        }


@dataclass(frozen=True, eq=False)
class Armed:
    """Everything that the chosen levels need; `witnesses` are the controls, judged on the images of T2."""

    arms: AttackerAssets
    witnesses: dict[str, nn.Module] = field(default_factory=dict)
    extracted: dict[str, Extracted] = field(default_factory=dict)


def gather(
    target: Target, arms: AttackerAssets, request: ThreatLevelsRequest, indices: Tensor, processes: Processes
) -> Supplies:
    """Open what is given and refuse what makes no sense, before a run folder exists or an hour is spent."""
    recipe = None if request.recipe is None else read_recipe(request.recipe)
    own = None if arms.own_head is None else arms.own_head(arms.victim.classifier)
    for what, model in (("the other model", arms.other), ("the attacker's own head", own)):
        if model is not None:
            _check_classes(what, model, target)
    if request.attacker_data is not None:
        _refuse_audited(f"--attacker-data {request.attacker_data}", request.attacker_data, target, target.data_root)
    levels, victim = set(request.levels), arms.victim
    surrogates = _read(victim, request.surrogates, request.allow_readable) if {"T3", "T4"} & levels else ()
    bank = _read(victim, request.bank, request.allow_readable) if "T8" in levels else ()
    _refuse_equal(victim, {"--surrogates": surrogates, "--bank": bank})
    _refuse_no_bank(victim, bank)
    images = _images_to_fit(target, request, indices) if "T7" in levels else None
    lessons = {} if recipe is None else _lessons(target, victim, request, recipe, processes)
    if "surrogates" in lessons and recipe is not None and request.attacker_data is None:
        data = recipe.built().data
        where = f"the images that {request.recipe} trains surrogates on, {data.train},"
        _refuse_audited(where, data.train, target, target.data_root or data.root)
    return Supplies(recipe, lessons, surrogates, bank, images)


def _images_to_fit(target: Target, request: ThreatLevelsRequest, indices: Tensor) -> tuple[Source, Tensor]:
    """Some to ask about, and a batch more to measure the fit by."""
    wanted, seed = request.extraction[0] + _BATCH, request.seed + _EXTRACTION
    source, rows = calibration_images(target, indices, request.attacker_data, wanted, seed, "--attacker-data")
    if len(rows) <= _BATCH:
        where = request.attacker_data or f"{target.data_spec}, beside the audited ones,"
        raise UserError(
            f"token extraction (T7) asks about some images and measures its fit by {_BATCH} others, but {where} has "
            f"{len(rows)}. Give more with --attacker-data, audit fewer with --limit, or leave T7 out with --levels."
        )
    return source, rows


def _lessons(
    target: Target, victim: TokenClassifier, request: ThreatLevelsRequest, recipe: TokenRecipe, processes: Processes
) -> dict[str, TrainingRun]:
    """For every kind of sets to train, with its images opened once: to find out later would cost hours.

    Attackers train on their own images. The bank is the defender's, so it is trained on the recipe's. Controls stand
    beside the victim: on the recipe's, too; but where these are not at hand, what an attacker has says almost as much.
    """
    levels, lessons = set(request.levels), dict[str, TrainingRun]()

    def lesson(
        what: str, advice: str, choices: Sequence[str | None], variants: Mapping[str, Mapping[str, Any]]
    ) -> TrainingRun:
        """On the first of the `choices` that can be opened."""
        for data in choices:
            made = TrainingRun(victim, recipe, data, target.data_root)
            try:
                made.check(processes, variants)
                return made
            except UserError as mistake:
                reason = mistake
        raise UserError(f"the ladder cannot train {what} by '{recipe.text}': {reason} {advice}") from reason

    theirs = request.attacker_data
    other = f"{'Say on which images' if theirs is None else 'Give other images'} with --attacker-data SPEC, or"
    if {"T3", "T4"} & levels and _to_train(request.surrogates):
        advice = f"{other} bring token files with --surrogates."
        lessons["surrogates"] = lesson("surrogates (T3, T4)", advice, [theirs], {"surrogate": {}})
    if "T8" in levels and _to_train(request.bank):
        advice = (
            "A bank is the defender's and trained on the recipe's own images, whatever --attacker-data says: bring "
            "token files with --bank, name a recipe with other data, or leave T8 out with --levels."
        )
        lessons["bank"] = lesson("sets for a bank (T8)", advice, [None], {"bank": {}})
    if "T2" in levels:
        choices = [None] if theirs is None else [None, theirs]
        advice = f"{other} leave T2 out with --levels."
        lessons["controls"] = lesson("controls (T2)", advice, choices, control_changes(recipe))
    return lessons


def planned(arms: AttackerAssets, request: ThreatLevelsRequest) -> AttackerAssets:
    """The arms as far as their number goes, with the victim in place of sets to come: enough to count passes."""
    levels, victim = set(request.levels), arms.victim
    surrogates = _count(request.surrogates) if {"T3", "T4"} & levels else 0
    bank = _count(request.bank) if "T8" in levels else 0
    return dataclasses.replace(
        arms,
        surrogates=(victim,) * surrogates,
        extracted=tuple((name, victim) for name in EXPOSED) if "T7" in levels else (),
        bank=(victim,) * (bank + 1) if bank else (),
    )


def arm(
    context: RunContext, request: ThreatLevelsRequest, arms: AttackerAssets, supplies: Supplies, run: RunFolder
) -> Armed:
    """Train and fit what the chosen levels need; and the controls, if the paper's setting is among them."""
    victim, device, lessons = arms.victim, context.processes.device, supplies.lessons
    trainer = Trainer(run.path / _SETS, context.processes, context.show_progress)
    surrogates, bank = supplies.surrogates, supplies.bank
    if "surrogates" in lessons:
        count = _to_train(request.surrogates)
        surrogates = trainer.several(lessons["surrogates"], "surrogate", count, request.seed + _SURROGATES)
    if "bank" in lessons:
        bank = trainer.several(lessons["bank"], "bank", _to_train(request.bank), request.seed + _BANK)
    _refuse_equal(victim, {"surrogates": surrogates, "bank": bank})
    extracted = {} if supplies.images is None else _fit(context, request, arms, supplies.images, run)
    witnesses: dict[str, nn.Module] = {}
    if "T2" in request.levels:
        scale = {} if supplies.recipe is None else {"scale": supplies.recipe.scale}
        witnesses = controls(victim, arms.head, request.seed + _CONTROLS, **scale)
    if "controls" in lessons:
        trained = trainer.controls(lessons["controls"], request.seed + _CONTROLS + 1)
        witnesses |= {name: arms.head(each) for name, each in trained.items()}
    ready = dataclasses.replace(
        arms,
        other=None if arms.other is None else arms.other.to(device),
        surrogates=surrogates,
        extracted=tuple((name, each.model) for name, each in extracted.items()),
        bank=(victim, *bank) if bank else (),
    )
    return Armed(ready, {name: each.to(device) for name, each in witnesses.items()}, extracted)


def _fit(
    context: RunContext,
    request: ThreatLevelsRequest,
    arms: AttackerAssets,
    images: tuple[Source, Tensor],
    run: RunFolder,
) -> dict[str, Extracted]:
    """By the main process for all of them, and kept: another device or number of threads would round to others."""
    source, rows = images
    steps, seed, processes = request.extraction[1], request.seed + _EXTRACTION, context.processes

    def fit(exposed: str) -> Extracted:
        reading = CalibrationImages(source, rows, context.preprocess, processes.device, request.skip_bad)
        pixels = torch.cat([x for x, _ in reading]).split(_BATCH)
        with progress(f"fit tokens to {exposed}", steps, context.show_progress) as meter:
            return extract_tokens(
                arms.victim, pixels, exposed, steps=steps, seed=seed, head=arms.head, told=lambda step: meter.advance(1)
            )

    def kept_or_fitted(exposed: str) -> dict[str, Any]:
        file = run.path / _SETS / f"extracted-from-{exposed}.safetensors"
        if not file.exists():
            _refuse_verdicts_about_others(run, exposed)
            save_extracted(fit(exposed), file)
        found = read_extracted(file, arms.victim.classifier)
        return {**found.numbers(), "tokens": found.model.tokens.detach().cpu()}

    extracted = {}
    for exposed in EXPOSED:
        told = processes.on_main(lambda exposed=exposed: kept_or_fitted(exposed))  # type: ignore[misc]
        tokens = told.pop("tokens").to(processes.device)
        model = TokenClassifier(arms.victim.classifier, tokens, placement=arms.victim.placement).eval()
        model.tokens.requires_grad_(False)
        extracted[exposed] = Extracted(model, **told)
    return extracted


def _refuse_verdicts_about_others(run: RunFolder, exposed: str) -> None:
    """Folders of earlier versions have verdicts of T7 and not the tokens that they are about."""
    pieces = run.batch_file("T7", 0).parents[1]
    if any(pieces.glob(f"T7_*_from_{exposed}_at_*")):
        raise UserError(
            f"{run.path} has verdicts about tokens fitted to {exposed} (T7), but not these tokens: it was begun by an "
            f"earlier version, or they were deleted. Fitted again they might be others. Delete {pieces}/T7_* to have "
            "T7 done anew, or begin with another --out."
        )


def _names(sets: tuple[TokenClassifier, ...]) -> list[str]:
    return [each.fingerprint for each in sets]


def _count(wanted: int | tuple[str, ...]) -> int:
    return wanted if isinstance(wanted, int) else len(wanted)


def _to_train(wanted: int | tuple[str, ...]) -> int:
    return wanted if isinstance(wanted, int) else 0


def _read(victim: TokenClassifier, wanted: int | tuple[str, ...], allow_readable: bool) -> tuple[TokenClassifier, ...]:
    files = () if isinstance(wanted, int) else wanted
    return tuple(load_tokens(file, victim.classifier, allow_readable=allow_readable).eval() for file in files)


def _refuse_equal(victim: TokenClassifier, groups: dict[str, tuple[TokenClassifier, ...]]) -> None:
    """Compared by their numbers: salts give equal sets different names."""
    known: list[tuple[str, TokenClassifier]] = [("the victim's own tokens", victim)]
    for name, sets in groups.items():
        for number, each in enumerate(sets, start=1):
            for what, other in known:
                if torch.equal(each.tokens.cpu(), other.tokens.cpu()):
                    raise UserError(
                        f"set {number} of {name} is the same as {what}. Sets must be trained with seeds of their own; "
                        "who has the secret itself is the attacker of T6."
                    )
            known.append((f"set {number} of {name}", each))


def _refuse_no_bank(victim: TokenClassifier, bank: tuple[TokenClassifier, ...]) -> None:
    """Sets that no `TokenBank` could hold: every image of a batch runs beside as many tokens, at the same place."""
    for number, each in enumerate(bank, start=1):
        here, there = ((len(one.tokens), one.placement) for one in (each, victim))
        if here != there:
            raise UserError(
                f"set {number} of --bank has {here[0]} tokens ({here[1]}), the victim {there[0]} ({there[1]}): the "
                "sets of a bank must have the same number at the same place. Train them by one recipe."
            )


def _refuse_audited(what: str, spec: str, target: Target, root: str | Path | None) -> None:
    if target.given_as_object:
        return
    where = None if root is None else str(root)
    if same_images(*(read_data_spec(each, where) for each in (spec, target.data_spec))):
        raise UserError(
            f"{what} are the audited images, {target.data_spec}: an attacker who trained on them would know too much. "
            "Choose another split, or other images with --attacker-data."
        )


def _check_classes(what: str, model: nn.Module, target: Target) -> None:
    ours = target.model.record.num_classes
    theirs = getattr(model, "record", target.model.record).num_classes
    if theirs != ours:
        raise UserError(
            f"{what} has {theirs} classes, the victim {ours}; images crafted on it only say something about the victim "
            "if the classes are the same"
        )
