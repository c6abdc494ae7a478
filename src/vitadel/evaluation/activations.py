"""Massive activations over many images: clean and attacked, without and with robustness tokens.

The analysis of Robustness Tokens (Pulfer et al., ECCV 2024, section 4.8), which shows one image per model. Here every
layer has a median and quartiles over images, and the places of the maxima are counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of, training_form
from vitadel.attacks.threats import make_threat
from vitadel.backbones.anatomy import blocks_of
from vitadel.data.batches import Batch, read_batches
from vitadel.data.subset import balanced_subset
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.batch_cache import BatchRecord, FolderCache
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import heading
from vitadel.instrument.hooks import frozen
from vitadel.instrument.massive_activations import CLASS, EXTRA, REGISTER, massive_activations, quartiles
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.environment import environment
from vitadel.runtime.progress import FOUND_AGAIN, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder, open_run, write_json
from vitadel.types import Attack, Calibrated

__all__ = ["ENOUGH", "ActivationsRequest", "Condition", "conditions_of", "inspect_activations", "look_at", "summary"]

ENOUGH = 100
"""Images below which medians are told with a warning."""

_STAGE = "activations"
_KINDS = {CLASS: "class", REGISTER: "register", EXTRA: "extra"}


@dataclass(frozen=True)
class ActivationsRequest:
    """What to look at. Labels play no part: an attack that wants some is given the model's own answers."""

    attack: str = "features-30"
    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = ENOUGH
    batch_size: int = 32
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {self.batch_size}")
        self.make()  # a wrong name, norm or budget is told before anything is loaded

    def make(self) -> Attack:
        """The attack, going all the way: an image that fools is not yet one that has moved features far."""
        attack = make(self.attack, eps=self.eps, norm=self.norm)
        made: object = attack
        if isinstance(made, Calibrated):
            raise UserError(
                f"'{self.attack}' first studies the model on other images; take one that does not, such as features-30"
            )
        return training_form(attack)


@dataclass(frozen=True)
class Condition:
    """A curve: which model looks, without or with tokens, and at which images."""

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


def look_at(bare: nn.Module, tokened: nn.Module | None, x: Tensor, attack: Attack, rng: SampleRNG) -> BatchRecord:
    """Of one batch, for every condition: the largest values, their patches and channels, each (layers, images)."""
    images = {"clean": x}
    with torch.no_grad():
        y = bare(x).argmax(1)
    images["attacked"] = attack(bare, x, y, rng)
    if tokened is not None:
        with torch.no_grad():
            y = tokened(x).argmax(1)
        images["adaptive"] = attack(tokened, x, y, rng)
    piece: BatchRecord = {}
    for number, condition in enumerate(conditions_of(tokened is not None)):
        model = tokened if condition.tokens and tokened is not None else bare
        seen = massive_activations(model, images[condition.images])
        piece[f"{number} values"] = seen.values.float().cpu().numpy()
        piece[f"{number} patches"] = seen.patches.to(torch.int32).cpu().numpy()
        piece[f"{number} channels"] = seen.channels.to(torch.int32).cpu().numpy()
    for name in [name for name in images if name != "clean"]:
        piece[f"change {name}"] = (images[name] - x).abs().flatten(1).amax(1).cpu().numpy()
    return piece


def summary(pieces: Sequence[BatchRecord], layers: Sequence[str], with_tokens: bool) -> list[dict[str, Any]]:
    """Per condition: median and quartiles of every layer over all images, and where the maxima sit."""
    told = []
    for number, condition in enumerate(conditions_of(with_tokens)):
        values, patches, channels = (
            np.concatenate([piece[f"{number} {part}"] for piece in pieces], axis=1)
            for part in ("values", "patches", "channels")
        )
        lower, median, upper = quartiles(torch.from_numpy(values)).tolist()
        change = [piece[f"change {condition.images}"] for piece in pieces if condition.images != "clean"]
        told.append(
            {
                **dataclasses.asdict(condition),
                "lower": lower,
                "median": median,
                "upper": upper,
                "places": [_places(*rows) for rows in zip(patches.tolist(), channels.tolist(), strict=True)],
                "largest_change": float(np.concatenate(change).max()) if change else 0.0,
            }
        )
    assert all(len(entry["median"]) == len(layers) for entry in told)
    return told


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


def inspect_activations(
    target: Target,
    tokened: nn.Module | None,
    look: ActivationsRequest,
    processes: Processes,
    *,
    out: Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> tuple[dict[str, Any], RunFolder]:
    """Look in a run folder; `subject` is the model without tokens, `tokened` the same with them."""
    if processes.count > 1:
        raise UserError("inspect works in one process; start it without a launcher")
    blocks_of(target.model)  # a model of no known family is told before anything is written
    labels = target.source.labels()
    indices = balanced_subset(labels, look.limit, look.seed, torch.arange(len(labels)))
    settings = {
        "model": target.model_spec,
        "model_fingerprint": target.model_fingerprint(),
        "tokens": getattr(tokened, "fingerprint", None),
        "data": target.data_spec,
        "data_fingerprint": target.data_fingerprint(indices),
        **dataclasses.asdict(look),
        "eps": quantity_text(look.eps),
    }
    preprocess = target.preprocess
    run = open_run("inspect", target.model_spec, settings, out=out, resume=resume, argv=list(argv or sys.argv))
    if run.complete:
        return json.loads((run.path / "results.json").read_text()), run
    write_json(run.path / "environment.json", environment(processes.device, 1))
    cache, attack = FolderCache(run), look.make()
    bare = target.model.to(processes.device)
    tokened = None if tokened is None else tokened.to(processes.device)

    def work(batch: Batch) -> BatchRecord:
        batch = batch.to(processes.device)
        rng = SampleRNG.of_samples(look.seed, batch.indices, batch.x.device)
        return look_at(bare, tokened, batch.x, attack, rng) | {"bad": np.asarray(len(batch.bad))}

    chunks = [part.tolist() for part in indices.split(look.batch_size)]
    todo = [number for number in range(len(chunks)) if cache.find(_STAGE, number) is None]
    try:
        with frozen(bare if tokened is None else tokened), progress(_STAGE, len(indices), shown) as meter:
            found = len(indices) - sum(len(chunks[number]) for number in todo)
            if found:
                meter.advance(found, FOUND_AGAIN)
            stream = read_batches(target.source, [chunks[k] for k in todo], preprocess, skip_bad=look.skip_bad)
            for number, batch in zip(todo, stream, strict=True):
                cache.save(_STAGE, number, work(batch))
                meter.advance(len(chunks[number]))
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    pieces = [cast(BatchRecord, cache.find(_STAGE, number)) for number in range(len(chunks))]
    results = _results(target, tokened, look, attack, settings, pieces)
    write_json(run.path / "results.json", results)
    run.finish()
    return results, run


def _results(
    target: Target,
    tokened: nn.Module | None,
    look: ActivationsRequest,
    attack: Attack,
    settings: Mapping[str, Any],
    pieces: Sequence[BatchRecord],
) -> dict[str, Any]:
    n = sum(piece["0 values"].shape[1] for piece in pieces)
    if n == 0:
        raise UserError("no sample could be read, so there is nothing to look at; see the reasons with --skip-bad off")
    blocks = [block.name for block in blocks_of(target.model)]
    layers = [f"input of {blocks[0]}", *blocks]
    few = f"n = {n} is too few to tell how models behave, and the paper's n = 1 is no evidence; look at {ENOUGH} images"
    return {
        **heading(look.seed),
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
            "left_out": sum(int(piece["bad"]) for piece in pieces),
        },
        "threat": {"norm": look.norm, "eps": make_threat(look.norm, look.eps).eps, "eps_text": settings["eps"]},
        "batch_size": look.batch_size,
        "activations": {
            "n": n,
            "attack": {"name": look.attack, "settings": settings_of(attack)},
            "excluded": "registers and robustness tokens, by index",
            "layers": layers,
            "conditions": summary(pieces, layers, tokened is not None),
            "warning": few if n < ENOUGH else None,
        },
    }
