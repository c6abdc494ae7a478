"""What a climb needs before it begins: token sets that are there, and those that must be trained or fitted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.adapters.robustness_tokens import Tokened
from vitadel.adapters.token_files import load_tokens
from vitadel.defenses.checking import read_data_spec
from vitadel.defenses.same_images import same_images
from vitadel.errors import Mistake
from vitadel.evaluation.calibration import CalibrationImages, calibration_images
from vitadel.evaluation.stages import Bench
from vitadel.evaluation.subject import Subject
from vitadel.ladder.controls import controls
from vitadel.ladder.extraction import EXPOSED, Extracted, extract_tokens
from vitadel.ladder.levels import Arms
from vitadel.ladder.order import LadderOrder
from vitadel.ladder.training import Trainer
from vitadel.runtime.progress import progress
from vitadel.types import Source

__all__ = ["Armed", "Supplies", "arm", "gather", "planned"]

_BATCH = 16  # images to fit tokens to, at once
_SURROGATES, _BANK, _CONTROLS, _EXTRACTION = 1, 101, 201, 301  # what is added to the seed for each


@dataclass(frozen=True, eq=False)
class Supplies:
    """What is there before anything is trained: sets from files, and the images that tokens are fitted to (T7)."""

    surrogates: tuple[Tokened, ...] = ()
    bank: tuple[Tokened, ...] = ()
    images: tuple[Source, Tensor] | None = None

    def fingerprints(self) -> dict[str, list[str]]:
        return {"surrogate_sets": _names(self.surrogates), "bank_sets": _names(self.bank)}


@dataclass(frozen=True, eq=False)
class Armed:
    """Everything that the chosen levels need; `witnesses` are the controls, judged on the images of T2."""

    arms: Arms
    witnesses: dict[str, nn.Module] = field(default_factory=dict)
    extracted: dict[str, Extracted] = field(default_factory=dict)


def gather(subject: Subject, arms: Arms, order: LadderOrder, indices: Tensor) -> Supplies:
    """Open what is given and refuse what makes no sense, before a run folder exists or an hour is spent."""
    if arms.other is not None:
        _check_classes(arms.other, subject)
    if order.attacker_data is not None and not subject.given_as_object:
        root = None if subject.data_root is None else str(subject.data_root)
        if same_images(*(read_data_spec(spec, root) for spec in (order.attacker_data, subject.data_spec))):
            raise Mistake(
                f"--attacker-data {order.attacker_data} are the audited images, {subject.data_spec}: an attacker who "
                "trained on them would know too much. Choose another split."
            )
    levels, victim = set(order.levels), arms.victim
    surrogates = _read(victim, order.surrogates, order.allow_readable) if {"T3", "T4"} & levels else ()
    bank = _read(victim, order.bank, order.allow_readable) if "T8" in levels else ()
    _refuse_equal(victim, {"--surrogates": surrogates, "--bank": bank})
    images = None
    if "T7" in levels:
        wanted, seed = order.extraction[0] + _BATCH, order.seed + _EXTRACTION
        images = calibration_images(subject, indices, order.attacker_data, wanted, seed, "--attacker-data")
    return Supplies(surrogates, bank, images)


def planned(arms: Arms, order: LadderOrder) -> Arms:
    """The arms as far as their number goes, with the victim in place of sets to come: enough to count passes."""
    levels, victim = set(order.levels), arms.victim
    surrogates = _count(order.surrogates) if {"T3", "T4"} & levels else 0
    bank = _count(order.bank) if "T8" in levels else 0
    return dataclasses.replace(
        arms,
        surrogates=(victim,) * surrogates,
        extracted=tuple((name, victim) for name in EXPOSED) if "T7" in levels else (),
        bank=(victim,) * (bank + 1) if bank else (),
    )


def arm(bench: Bench, subject: Subject, order: LadderOrder, arms: Arms, supplies: Supplies, folder: Path) -> Armed:
    """Train and fit what the chosen levels need; and the controls, if the paper's setting is among them."""
    levels, victim, device = set(order.levels), arms.victim, bench.processes.device

    def trainer(data: str | None) -> Trainer:
        return Trainer(
            victim, order.recipe, data, subject.data_root, folder / "sets", bench.processes, order.skip_bad, bench.shown
        )

    surrogates, bank = supplies.surrogates, supplies.bank
    if isinstance(order.surrogates, int) and {"T3", "T4"} & levels:
        surrogates = trainer(order.attacker_data).several("surrogate", order.surrogates, order.seed + _SURROGATES)
    if isinstance(order.bank, int) and "T8" in levels:
        bank = trainer(None).several("bank", order.bank, order.seed + _BANK)
    _refuse_equal(victim, {"surrogates": surrogates, "bank": bank})
    extracted = {} if supplies.images is None else _fit(bench, order, arms, supplies.images)
    witnesses: dict[str, nn.Module] = {}
    if "T2" in levels:
        own = trainer(None)
        witnesses = controls(victim, arms.head, order.seed + _CONTROLS, own.scale)
        witnesses |= {name: arms.head(each) for name, each in own.controls(order.seed + _CONTROLS + 1).items()}
    ready = dataclasses.replace(
        arms,
        other=None if arms.other is None else arms.other.to(device),
        surrogates=surrogates,
        extracted=tuple((name, each.model) for name, each in extracted.items()),
        bank=(victim, *bank) if bank else (),
    )
    return Armed(ready, {name: each.to(device) for name, each in witnesses.items()}, extracted)


def _fit(bench: Bench, order: LadderOrder, arms: Arms, images: tuple[Source, Tensor]) -> dict[str, Extracted]:
    """By the main process for all of them: rounding on different devices would make different tokens."""
    source, rows = images
    steps, seed, processes = order.extraction[1], order.seed + _EXTRACTION, bench.processes

    def fit(exposed: str) -> dict[str, Any]:
        reading = CalibrationImages(source, rows, bench.preprocess, processes.device, order.skip_bad)
        pixels = torch.cat([x for x, _ in reading]).split(_BATCH)
        with progress(f"fit tokens to {exposed}", steps, bench.shown) as meter:
            found = extract_tokens(
                arms.victim, pixels, exposed, steps=steps, seed=seed, head=arms.head, told=lambda step: meter.advance(1)
            )
        told = {"queries": found.queries, "cosine": found.cosine, "cosine_before": found.cosine_before}
        return {**told, "tokens": found.model.tokens.detach().cpu()}

    extracted = {}
    for exposed in EXPOSED:
        told = processes.on_main(lambda exposed=exposed: fit(exposed))  # type: ignore[misc]
        tokens = told.pop("tokens").to(processes.device)
        model = Tokened(arms.victim.classifier, tokens, placement=arms.victim.placement).eval()
        extracted[exposed] = Extracted(model, **told)
    return extracted


def _names(sets: tuple[Tokened, ...]) -> list[str]:
    return [each.fingerprint for each in sets]


def _count(wanted: int | tuple[str, ...]) -> int:
    return wanted if isinstance(wanted, int) else len(wanted)


def _read(victim: Tokened, wanted: int | tuple[str, ...], allow_readable: bool) -> tuple[Tokened, ...]:
    files = () if isinstance(wanted, int) else wanted
    return tuple(load_tokens(file, victim.classifier, allow_readable=allow_readable).eval() for file in files)


def _refuse_equal(victim: Tokened, groups: dict[str, tuple[Tokened, ...]]) -> None:
    """Compared by their numbers: salts give equal sets different names."""
    known: list[tuple[str, Tokened]] = [("the victim's own tokens", victim)]
    for name, sets in groups.items():
        for number, each in enumerate(sets, start=1):
            for what, other in known:
                if torch.equal(each.tokens.cpu(), other.tokens.cpu()):
                    raise Mistake(
                        f"set {number} of {name} is the same as {what}. Sets must be trained with seeds of their own; "
                        "who has the secret itself is the attacker of T6."
                    )
            known.append((f"set {number} of {name}", each))


def _check_classes(other: nn.Module, subject: Subject) -> None:
    ours = subject.model.record.num_classes
    theirs = getattr(other, "record", subject.model.record).num_classes
    if theirs != ours:
        raise Mistake(
            f"the other model has {theirs} classes, the victim {ours}; images crafted on it only say something about "
            "the victim if the classes are the same"
        )
