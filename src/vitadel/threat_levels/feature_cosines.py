"""How far attacks move features: cosines of attacked features, per image, with the tokens and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.attacks.features import feature_cosine, final_features
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.verdicts import parquet_bytes
from vitadel.threat_levels.levels import AttackerAssets

COSINES_FILE = "cosines.parquet"
PREFIX = "cosine:"  # of these columns in the records of a stage

_COSINES = {"tokens": {"token": "token", "channel": "channel"}, "pooled": {"token": "pooled"}}
"""Kind of features -> the axes that they are compared along, and the names of these cosines."""


@torch.no_grad()
def measured_cosines(assets: AttackerAssets, x: Tensor, z: Tensor) -> dict[str, NDArray[np.float32]]:
    """Cosines of attacked features with the tokens to those of the bare backbone (the paper's text) and to the
    victim's own (the released code), and without tokens; per token, and per channel as in the released code; of pooled
    features, too, if the defense compares those. Names have `PREFIX`."""
    victim, bare = assets.victim, assets.victim.classifier
    found: dict[str, Tensor] = {}
    for kind in dict.fromkeys(("tokens", assets.features)):
        clean, own = final_features(bare, x, kind), final_features(victim, x, kind)
        with_tokens, without = final_features(victim, z, kind), final_features(bare, z, kind)
        pairs = {"to bare": (with_tokens, clean), "to own": (with_tokens, own), "no tokens": (without, clean)}
        for axis, name_of_axis in _COSINES[kind].items():
            found |= {f"{name}, {name_of_axis}": feature_cosine(*pair, axis) for name, pair in pairs.items()}
    return {f"{PREFIX}{name}": each.cpu().numpy() for name, each in found.items()}


def cosine_columns(records: Sequence[BatchRecord]) -> dict[str, NDArray[np.float32]]:
    """The cosines of all images of a stage, by name."""
    names = [name for name in (records[0] if records else {}) if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): np.concatenate([record[name] for record in records]) for name in names}


def cosines_table(index: Any, by_attack: Mapping[str, Mapping[str, NDArray[np.float32]]]) -> bytes:
    """`COSINES_FILE`: one row per image, one column 'ATTACK: COSINE' per attack and cosine."""
    columns = {f"{attack}: {name}": values for attack, each in by_attack.items() for name, values in each.items()}
    return parquet_bytes({"index": index, **columns})
