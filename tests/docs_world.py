"""The small world in which the commands of the docs run: stand-ins for large models, data sets and long searches.

The tables below define it. They change sizes and provide the files a command expects; verbs, flags, recipes, attacks,
kinds of data and model names reach the program as they are written, and so do their errors.
"""

from __future__ import annotations

import inspect
import io
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
import torchvision.datasets
from PIL import Image

import vitadel.data.spec
import vitadel.diagnosis.precheck
import vitadel.diagnosis.run
import vitadel.heads.probe
import vitadel.reproduce.jobs
import vitadel.threat_levels.token_training
import vitadel.training.run
from films import write_video
from vitadel.attacks.registry import ATTACKS, PREFIXES
from vitadel.diagnosis import examination
from vitadel.evaluation.audit import protocols
from vitadel.evaluation.stability import run as stability
from vitadel.threat_levels import levels as level_attacks
from vitadel.threat_levels import request as levels
from vitadel.training.recipes import compose as recipes

__all__ = ["FLAGS", "IN_SNIPPETS", "KEPT_FLAGS", "LISTED", "MOST", "NAMES", "TINY", "shrink"]

NAMES = {
    "BACKBONE": "deit_tiny_patch16_224",
    "cuda:1": "cpu",
}
"""Words of a command that are replaced."""

IMAGES = 16
"""Images in the test split of CIFAR and ImageNet stand-ins, and in every protocol."""
EXAMINED = 4
"""Images of a diagnosis, and of the checks before every audit."""

FLAGS = {"limit": 4, "diagnose.limit": EXAMINED, "surrogates": 1, "bank": 1, "port": 0, "severities": "1,5"}
FLAGS |= {"within": 45}
"""Values of these flags for any verb; port 0 is any free port. Under a protocol all images are used."""
KEPT_FLAGS = {"batch_size", "seed", "input_size", "num_classes", "difficulty", "patch_side"}
"""Integer flags that are not sizes. All others, given or default, are limited to MOST."""
MOST = 2

RECIPES = {
    "train.epochs": 1,
    "train.steps": 2,
    "train.batch_size": 8,
    "data.limit": 16,
    "data.held_out": 8,
    "data.workers": 0,
    "data.easier_epochs": 1,
    "schedule.warmup_epochs": 0,
    "schedule.cooldown_epochs": 0,
    "validation.limit": 4,
    "audit.limit": 4,
    "audit.batch_size": 4,
}
"""Upper limits for recipe settings."""

KEPT_SETTINGS = {"side", "patches", "blocks", "layer", "tokens", "factor"}
"""Integer settings of attacks and prefixes that are not sizes. All others are limited to MOST."""

TINY: dict[str, dict[str, Any]] = {
    "vit": {"depth": 4, "embed_dim": 48, "num_heads": 3, "patch_size": 32},
    "deit": {"depth": 4, "embed_dim": 48, "num_heads": 3, "patch_size": 32},
    "deit3": {"depth": 4, "embed_dim": 48, "num_heads": 3, "patch_size": 32},
    "xcit": {"depth": 1, "embed_dim": 48, "num_heads": 3},
    "fan": {"depth": 1, "embed_dim": 48, "num_heads": 3},
    "rvt": {"depths": (1,), "widths": (48,), "heads": (3,), "scaled_blocks": 1},
}
"""Arguments for models of timm and of ours, by the first word of their name; weights are random, not downloaded."""

TENCH, GOOSE, STINGRAY = "n01440764", "n01855672", "n01498041"


@dataclass(frozen=True)
class ShortPatches(stability.StabilityRequest):
    """Patches that are learned in a few steps."""

    training_steps: int = MOST


@dataclass(frozen=True)
class ShortExtraction(levels.ThreatLevelsRequest):
    extraction: tuple[int, int] = (EXAMINED, MOST)


def shrink(world: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the data below `world` and apply the tables."""
    _shrink_models(patch)
    _shrink_attacks(patch)
    _shrink_recipes(patch)
    _shrink_data(world, patch)
    for name, level in examination.LEVELS.items():
        patch.setitem(examination.LEVELS, name, replace(level, images=EXAMINED, directions=1, student_epochs=1))
    patch.setattr(vitadel.diagnosis.precheck, "IMAGES", EXAMINED)
    for home in (examination, vitadel.diagnosis.run):
        patch.setattr(home, "FEWEST", EXAMINED)
    small = {name: replace(each, images=IMAGES, image_list=None) for name, each in protocols.protocols().items()}
    patch.setattr(protocols, "protocols", lambda: small)
    patch.setattr(stability, "StabilityRequest", ShortPatches)
    patch.setattr(levels, "ThreatLevelsRequest", ShortExtraction)


def _shrink_models(patch: pytest.MonkeyPatch) -> None:
    build = timm.create_model

    def create_model(name: str, pretrained: bool = False, **settings: Any) -> Any:
        family = name.replace(".", "_").split("_")[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()))
            return build(name, pretrained=False, **{**TINY.get(family, {}), **settings})

    patch.setattr(timm, "create_model", create_model)


def _shrink_attacks(patch: pytest.MonkeyPatch) -> None:
    for name, preset in ATTACKS.items():
        patch.setitem(ATTACKS, name, replace(preset, build=_cut(preset.build)))
    for name, prefix in PREFIXES.items():
        patch.setitem(PREFIXES, name, replace(prefix, wrap=_cut(prefix.wrap)))
    pgd = level_attacks._pgd  # keeps the number of steps in its name, which tables ask for
    patch.setattr(level_attacks, "_pgd", lambda steps, stops=False: pgd(min(steps, MOST), stops))


def _cut(build: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(build)

    @wraps(build)
    def smaller(around: Any, **settings: Any) -> Any:
        bound = signature.bind(around, **settings)
        bound.apply_defaults()
        given = {
            key: min(value, MOST) if type(value) is int and key not in KEPT_SETTINGS else value
            for key, value in list(bound.arguments.items())[1:]
        }
        return build(around, **given)

    return smaller


def _shrink_recipes(patch: pytest.MonkeyPatch) -> None:
    whole = recipes.compose

    @wraps(whole)
    def compose(*words: Any, **named: Any) -> dict[str, Any]:
        document = whole(*words, **named)
        for key, most in RECIPES.items():
            section, _, name = key.partition(".")
            if name in document.get(section, {}) or (key == "data.limit"):
                given = document[section].get(name)
                document[section][name] = most if given is None else min(given, most)
        for plugin in document.get("plugins", {}).values():
            plugin |= {key: MOST * 2 for key in ("images",) if key in (plugin or {})}
        if "attention_scaling" in document.get("plugins", {}):
            document["plugins"]["attention_scaling"]["gap"] = 1  # no longer than the training
        return document

    homes = (recipes, vitadel.training.run, vitadel.heads.probe, vitadel.threat_levels.token_training)
    for home in (*homes, vitadel.reproduce.jobs):
        patch.setattr(home, "compose", compose)


def _shrink_data(world: Path, patch: pytest.MonkeyPatch) -> None:
    """Replace every path of `--data` by the stand-in of its kind, and every root by the folder with CIFAR."""
    written: dict[str, Path] = {}
    parse = vitadel.data.spec.parse_spec

    def parse_spec(spec: str, **more: Any) -> Any:
        request = parse(spec, **more)
        if request.kind.startswith("cifar"):
            return replace(request, root=_once(written, world, "cifar", _cifar))
        if request.argument and request.kind in vitadel.data.spec.DATA_KINDS:
            assert request.kind in STAND_INS, f"no stand-in for --data {spec}: add {request.kind} to STAND_INS"
            whole = request.kind == "folder" and Path(request.argument).name == "imagenet"
            kind = "folder of imagenet" if whole else request.kind  # whose classes a model's own head knows
            place = _once(written, world, kind, STAND_INS[kind])
            return replace(request, argument=str(place))
        return request

    def _cifar(place: Path) -> Path:
        return _write_cifar(place, patch)

    patch.setattr(vitadel.data.spec, "parse_spec", parse_spec)


def _once(written: dict[str, Path], world: Path, kind: str, write: Callable[[Path], Path]) -> Path:
    if kind not in written:
        place = world / "data" / kind
        place.mkdir(parents=True)
        written[kind] = write(place)
    return written[kind]


def _picture(number: int, size: int = 32) -> Image.Image:
    """A single color with some noise."""
    rng = np.random.default_rng(number)
    color = rng.integers(20, 236, (1, 1, 3))
    return Image.fromarray((color + rng.integers(-20, 20, (size, size, 3))).astype(np.uint8))


def _write_pictures(folder: Path, classes: tuple[str, ...], each: int) -> Path:
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            _picture(place + len(classes) * number).save(folder / name / f"{number:02d}.png")
    return folder


def _write_folder(place: Path) -> Path:
    for split in ("train", "val"):
        _write_pictures(place / split, ("tabby", "tench"), 12)  # names that ImageNet's classes have, too
    return place


def _write_thousand(place: Path) -> Path:
    for split in ("train", "val"):
        _write_pictures(place / split, tuple(f"class{number:03d}" for number in range(1000)), 1)
    return place


def _write_imagenet(place: Path) -> Path:
    _write_pictures(place / "train", (TENCH, GOOSE), 12)
    return _write_pictures(place / "val", (TENCH, GOOSE), IMAGES // 2).parent


def _write_imagenet_c(place: Path) -> Path:
    for corruption in ("fog", "contrast"):
        for severity in "15":
            _write_pictures(place / corruption / severity, (TENCH, GOOSE), 1)
    return place


def _write_imagenet_p(place: Path) -> Path:
    for number, wnid in enumerate((TENCH, GOOSE)):
        write_video(place / "tilt" / wnid / f"{number}.mp4", [40, 60, 210])
    return place


def _write_parquet(place: Path) -> Path:
    def encoded(number: int) -> dict[str, bytes]:
        buffer = io.BytesIO()
        _picture(number).save(buffer, "PNG")
        return {"bytes": buffer.getvalue()}

    table = pa.table({"image": [encoded(n) for n in range(24)], "label": [n % 2 for n in range(24)]})
    pq.write_table(table, place / "pictures.parquet")
    return place / "pictures.parquet"


def _write_npz(place: Path) -> Path:
    images = np.stack([np.asarray(_picture(n)) for n in range(24)])
    np.savez(place / "pictures.npz", images=images, labels=np.arange(24) % 10)
    return place / "pictures.npz"


def _write_cifar(place: Path, patch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 and CIFAR-10-C in the layout of their files; torchvision gets their checksums."""
    folder = place / "cifar-10-batches-py"
    folder.mkdir()

    def put(name: str, content: Mapping[str, Any]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, md5((folder / name).read_bytes()).hexdigest()]

    def batch(first: int, count: int) -> dict[str, Any]:
        rows = [np.asarray(_picture(n)).transpose(2, 0, 1).ravel() for n in range(first, first + count)]
        return {"data": np.stack(rows), "labels": [n % 10 for n in range(count)]}

    sets = torchvision.datasets.CIFAR10
    patch.setattr(sets, "train_list", [put("data_batch_1", batch(0, 30))])
    patch.setattr(sets, "test_list", [put("test_batch", batch(100, IMAGES))])
    _, digest = put("batches.meta", {"label_names": list("abcdefghij")})
    patch.setattr(sets, "meta", {"filename": "batches.meta", "key": "label_names", "md5": digest})
    corrupted = place / "CIFAR-10-C"
    corrupted.mkdir()
    np.save(corrupted / "fog.npy", np.stack([np.asarray(_picture(n)) for n in range(20)]))
    np.save(corrupted / "labels.npy", np.tile(np.arange(4), 5))
    return place


STAND_INS: dict[str, Callable[[Path], Path]] = {
    "folder": _write_folder,
    "folder of imagenet": _write_thousand,
    "parquet": _write_parquet,
    "npz": _write_npz,
    "imagenet": _write_imagenet,
    "imagenet-a": lambda place: _write_pictures(place, (STINGRAY, GOOSE), 2),
    "imagenet-r": lambda place: _write_pictures(place, (STINGRAY, GOOSE), 2),
    "imagenet-c": _write_imagenet_c,
    "imagenet-p": _write_imagenet_p,
}
"""What is opened for a path, by kind of data; other kinds are refused."""


LISTED = tuple(f"{wnid}/{number:02d}.png" for wnid in (TENCH, GOOSE) for number in range(IMAGES // 2))
"""Contents of a list of ImageNet images: all of the stand-in's."""

IN_SNIPPETS = {r"\b(limit|knob)=\d+": r"\1=2"}
"""Replacements in Python snippets: pattern to text."""
