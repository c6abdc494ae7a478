"""Massive activations over many images: clean and attacked, without and with robustness tokens.

The analysis of Robustness Tokens (Pulfer et al., ECCV 2024, section 4.8), which shows one image per model. Here every
layer has a median and quartiles over images, and the places of the maxima are counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import with_one_set
from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of, training_form
from vitadel.attacks.threats import make_threat
from vitadel.backbones.anatomy import blocks_of
from vitadel.data.batches import Batch, balanced_subset
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.reopen import OPENING_SETTINGS, reopen
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, result_header, run_settings
from vitadel.evaluation.engine.stages import BatchRecord, check_any_readable, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.hooks import frozen
from vitadel.instrument.massive_activations import CLASS, EXTRA, REGISTER, quartiles
from vitadel.instrument.massive_activations import massive_activations as largest_activations
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated

ENOUGH = 100
"""The fewest images for which results carry no warning."""

_STAGE = "activations"
_KINDS = {CLASS: "class", REGISTER: "register", EXTRA: "extra"}


@dataclass(frozen=True)
class ActivationsRequest(RunRequest):
    """What to inspect. Labels are not used: attacks get the model's own predictions."""

    attack: str = "features-30"
    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = field(default=ENOUGH, kw_only=True)
    batch_size: int = field(default=32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make()  # reports a wrong name, norm or budget before anything is loaded

    def make(self) -> Attack:
        """The attack, without stopping at success: it is to move the features as far as it can."""
        attack = make(self.attack, eps=self.eps, norm=self.norm)
        made: object = attack
        if isinstance(made, Calibrated):
            raise UserError(
                f"'{self.attack}' is calibrated on other images first; use an attack that is not, such as features-30"
            )
        return training_form(attack)


@dataclass(frozen=True)
class Condition:
    """A curve: a model without or with tokens, and the images it is given."""

    name: str
    tokens: bool
    images: str  # clean, attacked (crafted without the tokens) or adaptive (crafted through them)


def conditions_of(with_tokens: bool) -> tuple[Condition, ...]:
    bare = (Condition("clean", False, "clean"), Condition("attacked", False, "attacked"))
    if not with_tokens:
        return bare
    return (
        *bare,
        Condition("clean, with tokens", True, "clean"),
        Condition("attacked, with tokens", True, "attacked"),
        Condition("attacked through the tokens", True, "adaptive"),
    )


def inspect_batch(bare: nn.Module, tokened: nn.Module | None, x: Tensor, attack: Attack, rng: SampleRNG) -> BatchRecord:
    """For every condition, the largest values of one batch, their patches and channels, each (layers, images)."""
    images = {"clean": x}
    with torch.no_grad():
        y = bare(x).argmax(1)
    images["attacked"] = attack(bare, x, y, rng)
    if tokened is not None:
        with torch.no_grad():
            y = tokened(x).argmax(1)
        images["adaptive"] = attack(tokened, x, y, rng)
    record: BatchRecord = {}
    for number, condition in enumerate(conditions_of(tokened is not None)):
        model = tokened if condition.tokens and tokened is not None else bare
        seen = largest_activations(model, images[condition.images])
        record[f"{number} values"] = seen.values.float().cpu().numpy()
        record[f"{number} patches"] = seen.patches.to(torch.int32).cpu().numpy()
        record[f"{number} channels"] = seen.channels.to(torch.int32).cpu().numpy()
    for name in [name for name in images if name != "clean"]:
        record[f"change {name}"] = (images[name] - x).abs().flatten(1).amax(1).cpu().numpy()
    return record


def summarize(records: Sequence[BatchRecord], layers: Sequence[str], with_tokens: bool) -> list[dict[str, Any]]:
    """Per condition: median and quartiles of every layer over all images, and where the maxima sit."""
    entries = []
    for number, condition in enumerate(conditions_of(with_tokens)):
        values, patches, channels = (
            np.concatenate([record[f"{number} {part}"] for record in records], axis=1)
            for part in ("values", "patches", "channels")
        )
        lower, median, upper = quartiles(torch.from_numpy(values)).tolist()
        change = [record[f"change {condition.images}"] for record in records if condition.images != "clean"]
        entries.append(
            {
                **dataclasses.asdict(condition),
                "lower": lower,
                "median": median,
                "upper": upper,
                "places": [_places(*rows) for rows in zip(patches.tolist(), channels.tolist(), strict=True)],
                "largest_change": float(np.concatenate(change).max()) if change else 0.0,
            }
        )
    assert all(len(entry["median"]) == len(layers) for entry in entries)
    return entries


def _places(patches: Sequence[int], channels: Sequence[int]) -> dict[str, Any]:
    """The commonest kind of token, token, channel, and pair of both, with the share of images that agree in it."""
    kinds = Counter(_KINDS.get(patch, "patch") for patch in patches)
    (kind, of_kind), (channel, of_channel) = kinds.most_common(1)[0], Counter(channels).most_common(1)[0]
    token, of_token = Counter(patches).most_common(1)[0]
    (_, of_pair) = Counter(zip(patches, channels, strict=True)).most_common(1)[0]
    n = len(patches)
    return {
        "kind": kind,
        "kind_share": of_kind / n,
        "channel": channel,
        "channel_share": of_channel / n,
        "token": _KINDS.get(token, f"patch {token}"),
        "token_share": of_token / n,
        "same_place_share": of_pair / n,
    }


def massive_activations(
    run_or_model: str | Path | nn.Module = "zoo:shapes-robust", *, attack: str = "features-30", **settings: Any
) -> dict[str, Any]:
    """Measure the largest activations of every layer, clean and attacked: `vitadel inspect` from Python.

    `run_or_model` is any model, or the run folder of an audit, whose model, data, limit, seed, eps and norm are used.
    Settings are the command's flags (`data`, `limit`, `tokens`, `out`, ...). Writes `out`, or a new run folder below
    runs/; returns what `results.json` holds.
    """
    options = {option: settings.pop(option) for option in ("out", "resume") if option in settings}
    for name in settings:
        if name not in OPENING_SETTINGS:
            known = nearest_names(name, OPENING_SETTINGS) or "."
            raise UserError(f"massive_activations has no setting {name!r}{known}")
    defaults = {"data": "shapes", "limit": ENOUGH, "batch_size": 32, "eps": "8/255", "norm": "linf"}
    return run_inspection(run_or_model, attack, {**defaults, **settings}, {*settings}, **options).results


def run_inspection(
    run_or_model: str | Path | nn.Module,
    attack: str,
    settings: Mapping[str, Any],
    given: Collection[str],
    *,
    show_notes: Callable[[Mapping[str, str]], None] = lambda notes: None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Open a model, or that of an audit, and inspect it; settings that were not `given` come from the audit."""
    reopened = reopen(run_or_model, settings, given)
    request = ActivationsRequest(attack=attack, **reopened.request)
    processes = join_processes(reopened.opening.device)
    target = reopened.open_target(for_features=True)
    show_notes(target.model.record.notes)
    refusal = "activations are those of one set of tokens, not of a random one: give one file with --tokens"
    tokened = with_one_set(target.model, refusal)
    if tokened is not None:
        target = replace(target, model=tokened.classifier)
    return inspect_activations(target, tokened, request, processes, **options)


def inspect_activations(
    target: Target,
    tokened: nn.Module | None,
    request: ActivationsRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Inspect `target`, a model without tokens, and `tokened`, the same model with them."""
    if processes.count > 1:
        raise UserError("inspect works in one process; start it without a launcher")
    blocks_of(target.model)  # refuses a model of an unknown family before anything is written
    labels = target.source.labels()
    indices = balanced_subset(labels, request.limit, request.seed, torch.arange(len(labels)))
    settings = run_settings(target, request, indices, tokens=getattr(tokened, "fingerprint", None))

    def work(run: Run) -> dict[str, Any]:
        context, attack = run.context(target, request), request.make()
        bare = context.model
        extended = None if tokened is None else tokened.to(processes.device)

        def inspect(number: int, batch: Batch) -> BatchRecord:
            rng = SampleRNG.of_samples(request.seed, batch.indices, batch.x.device)
            return inspect_batch(bare, extended, batch.x, attack, rng) | {"bad": np.asarray(len(batch.bad))}

        with frozen(bare if extended is None else extended):
            records = run_stage(context, _STAGE, indices, inspect)
        return _results(target, extended, request, attack, settings, records)

    return execute("inspect", target.model_spec, settings, processes, work, target=target, **options)


def _results(
    target: Target,
    tokened: nn.Module | None,
    request: ActivationsRequest,
    attack: Attack,
    settings: Mapping[str, Any],
    records: Sequence[BatchRecord],
) -> dict[str, Any]:
    n = sum(record["0 values"].shape[1] for record in records)
    check_any_readable(n)
    blocks = [block.name for block in blocks_of(target.model)]
    layers = [f"input of {blocks[0]}", *blocks]
    few = f"n = {n} is too few to say how models behave, and the paper's n = 1 is no evidence; inspect {ENOUGH} images"
    return {
        **result_header(request.seed),
        "model": {
            "spec": target.model_spec,
            "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "family": target.family,
            "fingerprint": settings["model_fingerprint"],
            "tokens": settings["tokens"],
        },
        "data": {
            "spec": target.data_spec,
            "n": n,
            "classes": len(target.source.classes),
            "left_out": sum(int(record["bad"]) for record in records),
        },
        "threat": {
            "norm": request.norm,
            "eps": make_threat(request.norm, request.eps).eps,
            "eps_text": settings["eps"],
        },
        "batch_size": request.batch_size,
        "activations": {
            "n": n,
            "attack": {"name": request.attack, "settings": settings_of(attack)},
            "excluded": "registers and robustness tokens, by index",
            "layers": layers,
            "conditions": summarize(records, layers, tokened is not None),
            "warning": few if n < ENOUGH else None,
        },
    }
