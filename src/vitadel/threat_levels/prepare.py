"""What the levels need before attacks run: token sets that are given, and those that must be trained or fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier, with_one_set
from vitadel.adapters.tokens.token_files import load_tokens
from vitadel.data.spec import same_images
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import CalibrationImages, Target, calibration_images
from vitadel.instrument.tokens import token_width
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import progress
from vitadel.runtime.run_folder import RunFolder
from vitadel.threat_levels.controls import untrained_controls
from vitadel.threat_levels.extraction import (
    EXPOSED,
    Extracted,
    extract_tokens,
    read_extracted,
    save_extracted,
)
from vitadel.threat_levels.levels import GUESSED, NEED_TOKENS, AttackerAssets
from vitadel.threat_levels.request import TOKEN_SETS, ThreatLevelsRequest
from vitadel.threat_levels.token_training import TokenRecipe, TokenTraining, Trainer, control_changes, read_recipe
from vitadel.training.recipes.build import read_data_spec
from vitadel.types import Source

_BATCH = 16  # images to fit tokens to, at once
_SETS = "sets"  # folder of token sets in the run folder
_SEEDS = {"surrogates": 1, "bank": 101, "controls": 201, "extraction": 301}  # added to that of the request


@dataclass(frozen=True, eq=False)
class Provided:
    """What is there before anything is trained: the recipe; how to train which sets ("surrogates", "bank", "controls");
    sets from files; and the images that tokens are fitted to (T7)."""

    recipe: TokenRecipe | None = None
    trainings: Mapping[str, TokenTraining] = field(default_factory=dict)
    sets: Mapping[str, tuple[TokenClassifier, ...]] = field(default_factory=dict)
    images: tuple[Source, Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must agree with; `control_data` None means the recipe's own images."""
        controls = self.trainings.get("controls")
        return {
            "surrogate_sets": [each.fingerprint for each in self.sets["surrogates"]],
            "bank_sets": [each.fingerprint for each in self.sets["bank"]],
            "control_data": None if controls is None else controls.data,
        }


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything that the chosen levels need; `controls` are judged on the images of T2."""

    assets: AttackerAssets
    controls: dict[str, nn.Module] = field(default_factory=dict)
    extracted: dict[str, Extracted] = field(default_factory=dict)


def find_victim(target: Target, levels: Sequence[str]) -> TokenClassifier:
    """The model with its tokens. One without any is its own public backbone (T2), at the levels that need no tokens."""
    model = with_one_set(
        target.model,
        "threat levels judge one set of secret tokens, and a bank of them at T8: give one file with --tokens, and the "
        "others with --bank.",
    )
    if model is not None:
        return model
    needed = [level for level in levels if level in NEED_TOKENS]
    if needed:
        raise UserError(
            f"threat levels judge secret tokens, and '{target.model_spec}' has none, which {', '.join(needed)} need. "
            "Give the run folder of `vitadel harden tokens/...`, or a backbone with --tokens FILE; or leave these "
            "levels out with --levels, to judge the model as it is."
        )
    nothing = torch.zeros(1, token_width(target.model))
    return TokenClassifier(target.model, nothing, enabled=False).eval()


def open_provided(
    target: Target, assets: AttackerAssets, request: ThreatLevelsRequest, indices: Tensor, processes: Processes
) -> Provided:
    """Open what is given and refuse what makes no sense, before a run folder exists or time is spent."""
    recipe = None if request.recipe is None else read_recipe(request.recipe)
    own = None if assets.own_head is None else assets.own_head(assets.victim.classifier)
    for what, model in (("the other model", assets.other), ("the attacker's own head", own)):
        if model is not None:
            _check_classes(what, model, target)
    if request.attacker_data is not None:
        _refuse_audited(f"--attacker-data {request.attacker_data}", request.attacker_data, target, target.data_root)
    victim = assets.victim

    def load(file: str) -> TokenClassifier:
        return load_tokens(file, victim.classifier, allow_readable=request.allow_readable).eval()

    sets = {name: tuple(map(load, request.set_files(name))) for name in TOKEN_SETS}
    _refuse_equal(victim, {f"--{name}": each for name, each in sets.items()})
    _refuse_no_bank(victim, sets["bank"])
    images = _images_to_fit(target, request, indices) if "T7" in request.levels else None
    trainings = {} if recipe is None else _plan_trainings(target, victim, request, recipe, processes)
    if "surrogates" in trainings and recipe is not None and request.attacker_data is None:
        data = recipe.build().data
        where = f"the images that {request.recipe} trains surrogates on, {data.train},"
        _refuse_audited(where, data.train, target, target.data_root or data.root)
    return Provided(recipe, trainings, sets, images)


def _images_to_fit(target: Target, request: ThreatLevelsRequest, indices: Tensor) -> tuple[Source, Tensor]:
    """Images to query, and one more batch to measure the fit."""
    wanted, seed = request.extraction[0] + _BATCH, request.seed + _SEEDS["extraction"]
    source, rows = calibration_images(target, indices, request.attacker_data, wanted, seed, "--attacker-data")
    if len(rows) <= _BATCH:
        where = request.attacker_data or f"{target.data_spec}, beside the audited ones,"
        raise UserError(
            f"token extraction (T7) queries some images and measures its fit by {_BATCH} others, but {where} has "
            f"{len(rows)}. Give more with --attacker-data, audit fewer with --limit, or leave T7 out with --levels."
        )
    return source, rows


def _plan_trainings(
    target: Target, victim: TokenClassifier, request: ThreatLevelsRequest, recipe: TokenRecipe, processes: Processes
) -> dict[str, TokenTraining]:
    """How to train each kind of sets; the images of each are opened once, to report errors before hours are spent.

    Attackers train on their own images, the defender's bank on those of the recipe. Controls also use those of the
    recipe; where these cannot be opened, the attacker's are almost as good.
    """
    trainings = dict[str, TokenTraining]()

    def plan(
        what: str, advice: str, choices: Sequence[str | None], variants: Mapping[str, Mapping[str, Any]]
    ) -> TokenTraining:
        """Use the first of the `choices` of data that can be opened."""
        for data in choices:
            training = TokenTraining(victim, recipe, data, target.data_root, as_victim="surrogate" not in variants)
            try:
                training.check(processes, variants)
                return training
            except UserError as mistake:
                reason = mistake
        raise UserError(f"cannot train {what} by '{recipe.text}': {reason} {advice}") from reason

    theirs = request.attacker_data
    other = f"Give {'' if theirs is None else 'other '}images with --attacker-data SPEC, or"
    if request.to_train("surrogates"):
        advice = f"{other} token files with --surrogates."
        guesses = _guesses(request) or [{}]
        variants = {"surrogate": guesses[0], **{f"surrogate {k}": each for k, each in enumerate(guesses[1:], start=2)}}
        trainings["surrogates"] = plan("surrogates (T3, T4)", advice, [theirs], variants)
    if request.to_train("bank"):
        advice = (
            "A bank is the defender's and trained on the recipe's own images, whatever --attacker-data is: give "
            "token files with --bank, a recipe with other data, or leave T8 out with --levels."
        )
        trainings["bank"] = plan("sets for a bank (T8)", advice, [None], {"bank": {}})
    if "T2" in request.levels and victim.enabled:
        choices = [None] if theirs is None else [None, theirs]
        advice = f"{other} leave T2 out with --levels."
        trainings["controls"] = plan("controls (T2)", advice, choices, control_changes(recipe))
    return trainings


def _guesses(request: ThreatLevelsRequest) -> list[dict[str, Any]]:
    """Changes of the recipe for attackers who try numbers of tokens, one after the other."""
    return [{"adapter.count": number} for number in request.guess]


def _fits(request: ThreatLevelsRequest) -> dict[str, tuple[str, int]]:
    """What T7 fits, by name: (what is exposed, how many tokens)."""
    if not request.guess:
        return {exposed: (exposed, GUESSED) for exposed in EXPOSED}
    return {f"{exposed}, {n} tokens": (exposed, n) for exposed in EXPOSED for n in request.guess}


def planned_assets(assets: AttackerAssets, request: ThreatLevelsRequest) -> AttackerAssets:
    """The assets to come, with the victim in place of sets that are not trained yet: enough to count passes."""
    victim = assets.victim
    counts = {name: request.to_train(name) + len(request.set_files(name)) for name in TOKEN_SETS}
    return dataclasses.replace(
        assets,
        surrogates=(victim,) * counts["surrogates"],
        extracted=tuple((name, victim) for name in _fits(request)) if "T7" in request.levels else (),
        bank=(victim,) * (counts["bank"] + 1) if counts["bank"] else (),
    )


def prepare(
    context: RunContext, request: ThreatLevelsRequest, assets: AttackerAssets, provided: Provided, run: RunFolder
) -> Prepared:
    """Train and fit what the chosen levels need, and the controls if T2 is among them."""
    victim, device, trainings = assets.victim, context.processes.device, provided.trainings
    trainer = Trainer(run.path / _SETS, context.processes, context.show_progress)
    sets = dict(provided.sets)
    for name, of_one in (("surrogates", "surrogate"), ("bank", "bank")):
        if name in trainings:
            count, seed = request.to_train(name), request.seed + _SEEDS[name]
            changes = _guesses(request) if name == "surrogates" else []
            sets[name] = trainer.train_several(trainings[name], of_one, count, seed, changes)
    _refuse_equal(victim, sets)
    extracted = {} if provided.images is None else _extract(context, request, assets, provided.images, run)
    controls: dict[str, nn.Module] = {}
    if "T2" in request.levels and victim.enabled:
        scale = {} if provided.recipe is None else {"scale": provided.recipe.scale}
        controls = untrained_controls(victim, assets.head, request.seed + _SEEDS["controls"], **scale)
    if "controls" in trainings:
        trained = trainer.train_controls(trainings["controls"], request.seed + _SEEDS["controls"] + 1)
        controls |= {name: assets.head(each) for name, each in trained.items()}
    ready = dataclasses.replace(
        assets,
        other=None if assets.other is None else assets.other.to(device),
        surrogates=sets["surrogates"],
        extracted=tuple((name, each.model) for name, each in extracted.items()),
        bank=(victim, *sets["bank"]) if sets["bank"] else (),
    )
    return Prepared(ready, {name: each.to(device) for name, each in controls.items()}, extracted)


def _extract(
    context: RunContext,
    request: ThreatLevelsRequest,
    assets: AttackerAssets,
    images: tuple[Source, Tensor],
    run: RunFolder,
) -> dict[str, Extracted]:
    """Fit tokens in the main process for all, and save them: other devices or thread counts round differently."""
    source, rows = images
    fits = _fits(request)
    steps, seed, processes = request.extraction[1], request.seed + _SEEDS["extraction"], context.processes

    def fit(name: str) -> Extracted:
        exposed, count = fits[name]
        reading = CalibrationImages(source, rows, context.preprocess, processes.device, request.skip_bad)
        pixels = torch.cat([x for x, _ in reading]).split(_BATCH)
        with progress(f"fit tokens to {name}", steps, context.show_progress) as meter:
            return extract_tokens(
                assets.victim,
                pixels,
                exposed,
                count=count,
                steps=steps,
                seed=seed,
                head=assets.head,
                on_step=lambda step: meter.advance(1),
            )

    def read_or_fit(name: str) -> dict[str, Any]:
        file = run.path / _SETS / f"extracted-from-{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        if not file.exists():
            _refuse_verdicts_without_tokens(run, name)
            save_extracted(fit(name), file)
        found = read_extracted(file, assets.victim.classifier)
        return {**found.numbers(), "tokens": found.model.tokens.detach().cpu()}

    extracted = {}
    for name in fits:
        numbers = processes.on_main(lambda name=name: read_or_fit(name))  # type: ignore[misc]
        tokens = numbers.pop("tokens").to(processes.device)
        model = TokenClassifier(assets.victim.classifier, tokens).eval()
        model.tokens.requires_grad_(False)
        extracted[name] = Extracted(model, **numbers)
    return extracted


def _refuse_verdicts_without_tokens(run: RunFolder, name: str) -> None:
    """Folders of earlier versions have verdicts of T7 without the tokens that they are about."""
    batches = run.batch_file("T7", 0).parents[1]
    if any(batches.glob(f"T7_*_from_{run.batch_file(name, 0).parent.name}_at_*")):
        raise UserError(
            f"{run.path} has verdicts about tokens fitted to {name} (T7), but not these tokens: it was written by "
            "an earlier version, or they were deleted. A new fit may give other tokens. Delete "
            f"{batches}/T7_* to repeat T7, or start a new run with a different --out."
        )


def _refuse_equal(victim: TokenClassifier, groups: Mapping[str, tuple[TokenClassifier, ...]]) -> None:
    """Compare sets by their values: salts give equal sets different fingerprints."""
    known: list[tuple[str, TokenClassifier]] = [("the victim's own tokens", victim)]
    for name, sets in groups.items():
        for number, each in enumerate(sets, start=1):
            for what, other in known:
                if torch.equal(each.tokens.cpu(), other.tokens.cpu()):
                    raise UserError(
                        f"set {number} of {name} is the same as {what}. Every set must be trained with its own seed; "
                        "an attacker who has the secret is T6."
                    )
            known.append((f"set {number} of {name}", each))


def _refuse_no_bank(victim: TokenClassifier, bank: tuple[TokenClassifier, ...]) -> None:
    """Refuse sets that no `TokenBank` can hold: all sets need the same number of tokens at the same place."""
    for number, each in enumerate(bank, start=1):
        here, there = ((len(one.tokens), one.placement, one.layers) for one in (each, victim))
        if here != there:
            own, other = (f"{n} tokens ({placement}, layers {list(layers)})" for n, placement, layers in (here, there))
            raise UserError(
                f"set {number} of --bank has {own}, the victim {other}: the "
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
