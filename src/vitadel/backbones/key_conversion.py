"""Rename the keys of a weight file to those of a model: prefixes of wrappers, normalization layers, other layouts.

Nothing is resampled and no weight is dropped. What a model computes by itself is ignored by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.backbones.foreign_layouts import LAYOUTS

_PREFIXES = (
    *("module.", "_orig_mod.", "base_model.", "model.", "net.", "network.", "backbone.", "visual.", "image_encoder."),
    *("_forward_module.", "classifier.model.", "vision_encoder.", "encoder_q."),
)
_MOST_LAYERS = 5  # of prefixes around the weights
# Buffers that models compute when they are built, and counters that no forward pass reads.
_COMPUTED = re.compile(
    r"(\.attn_mask|\.relative_position_index|\.relative_coords_table|\.position_ids|\.num_batches_tracked"
    r"|\.rel_indices|\.(flag_update_statistics|batch_num|momentum|epsilon))$"
)


@dataclass(frozen=True)
class Fitted:
    """Weights whose keys are those of the model. `normalizer` is the (mean, std) layer that was saved around it."""

    weights: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    normalizer: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def convert_keys(module: nn.Module, weights: Mapping[str, Tensor]) -> Fitted:
    """The first renaming whose keys, and if possible shapes, are those of the model; else the closest one.

    Tried in this order: without the prefixes that wrappers add and without a normalization layer that was saved in
    front of the model; without computed buffers; renamed from a known layout; renamed by timm's converter for the
    family (only if no number is lost).
    """
    own = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    seen: list[Fitted] = []
    for candidate in _candidates(module, dict(weights), own):
        if {key: tuple(value.shape) for key, value in candidate.weights.items()} == own:
            return candidate
        seen.append(candidate)
    return max(seen, key=lambda fit: (set(fit.weights) == set(own), len(own.keys() & fit.weights.keys())))


def _candidates(module: nn.Module, weights: dict[str, Tensor], own: Mapping[str, tuple[int, ...]]) -> Iterator[Fitted]:
    starts = [fit for start in _without_normalizer(weights) for fit in _without_prefixes(start)]
    for start in starts:
        yield start
        yield _without_computed(start, own)
    for start in starts:
        for layout in LAYOUTS:
            converted = layout.convert(start.weights, own)
            if converted is not None:
                noted = replace(start, weights=converted, notes=(*start.notes, f"keys renamed from {layout.name}"))
                yield _without_computed(noted, own)
    for start in starts:
        yield from _by_timm(module, start)


def _without_normalizer(weights: dict[str, Tensor]) -> list[Fitted]:
    """The weights, and the weights without a pair `X.mean`, `X.std` of three numbers each."""
    found = [Fitted(weights)]
    for key in weights:
        owner, _, last = key.rpartition(".")
        pair = (key, f"{owner}.std" if owner else "std")
        if last == "mean" and pair[1] in weights and all(weights[name].numel() == 3 for name in pair):
            rest = {name: value for name, value in weights.items() if name not in pair}
            mean, std = (tuple(float(v) for v in weights[name].flatten()) for name in pair)
            found.append(Fitted(rest, (f"normalization taken from '{key}' and '{pair[1]}'",), (mean, std)))
            break
    return found


def _without_prefixes(start: Fitted) -> list[Fitted]:
    """The weights as they are and after removing one known prefix after another, while all keys share one."""
    found = [start]
    for _ in range(_MOST_LAYERS):
        last = found[-1]
        numbered = re.match(r"\d+\.", next(iter(last.weights), ""))  # nn.Sequential(normalizer, model)
        prefixes = (*_PREFIXES, numbered.group()) if numbered and last.normalizer else _PREFIXES
        shared = next((p for p in prefixes if last.weights and all(key.startswith(p) for key in last.weights)), None)
        if shared is None:
            break
        weights = {key.removeprefix(shared): value for key, value in last.weights.items()}
        found.append(replace(last, weights=weights, notes=(*last.notes, f"prefix '{shared}' removed from all keys")))
    return found


def _without_computed(start: Fitted, own: Mapping[str, tuple[int, ...]]) -> Fitted:
    """Without buffers that the model computes itself, by their names; with a zero for counters that old files lack."""
    extra = [key for key in start.weights if key not in own and _COMPUTED.search(key)]
    weights = {key: value for key, value in start.weights.items() if key not in extra}
    counters = [key for key in own if key not in weights and key.endswith(".num_batches_tracked")]
    weights |= {key: torch.zeros((), dtype=torch.int64) for key in counters}
    names = sorted({key.rpartition(".")[2] for key in extra})
    note = (f"computed buffers ignored: {', '.join(names)}",) if extra else ()
    return replace(start, weights=weights, notes=(*start.notes, *note))


def _other_windows(module: nn.Module, start: Fitted) -> bool:
    """Whether the file has attention windows of another size: timm's converter would resample their tables, slowly."""
    own = module.state_dict()
    tables = [key for key in start.weights if key.endswith("relative_position_bias_table") and key in own]
    return any(own[key].shape != start.weights[key].shape for key in tables)


def _by_timm(module: nn.Module, start: Fitted) -> list[Fitted]:
    """The keys renamed by timm's converter for this family; nothing if there is none or it changes numbers."""
    home = type(module).__module__
    convert = getattr(sys.modules.get(home), "checkpoint_filter_fn", None) if home.startswith("timm.models.") else None
    if convert is None or _other_windows(module, start):
        return []
    try:
        converted = convert(dict(start.weights), module)
    except (KeyError, AttributeError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return []  # a layout that the converter does not know: the mismatch itself is reported instead
    # The converters also resample position embeddings; equal counts leave only renaming, splitting and reshaping.
    counts = [sum(value.numel() for value in side.values()) for side in (converted, start.weights)]
    if counts[0] != counts[1]:
        return []
    return [
        replace(start, weights=dict(converted), notes=(*start.notes, "keys renamed by timm's rules for this family"))
    ]
