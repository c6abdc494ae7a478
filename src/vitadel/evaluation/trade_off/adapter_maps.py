"""Gate maps of TORA's adapters, and a deletion and insertion check of them.

The check (Petsiuk et al., BMVC 2018): hide the patches that a map ranks first, and measure how fast the probability of
the model's own answer falls; or show them first on a gray image, and measure how fast it rises. A map that shows what
matters does better than a random order. The robustness adapter's map is one minus the accuracy adapter's, so its order
is the reverse, and deletion by one is insertion by the other, up to the rounding of parts: there is one check for both.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.adapters.tora.tora_vit import Tora, gate_maps
from vitadel.data.batches import Batch, balanced_subset
from vitadel.evaluation.engine.stages import BatchRecord, RunContext, refuse_lost_images, run_stage
from vitadel.evaluation.trade_off.candidates import Candidate
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_mean

PARTS = 10
"""Into how many parts the patches are cut: the first is hidden, then the first two, and so on to all."""

RANDOM = 3
"""Random orders of the patches for each image, whose areas are averaged."""

_KEPT = 8  # images whose maps are kept for figures


def evaluate_maps(
    context: RunContext, candidates: Sequence[Candidate], index: Tensor, label: Tensor, count: int
) -> tuple[dict[str, Any] | None, bytes | None]:
    """The result field `maps` for all candidates with a fusion, and the arrays of a few images for figures."""
    numbered = list(enumerate(candidates, start=1))
    fused = [(n, each, each.tora) for n, each in numbered if each.tora and each.tora.settings.fuses and not each.knob]
    if not fused or count == 0:
        return None, None
    chosen = balanced_subset(label, count, context.seed, index)
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, candidate, tora in fused:
        # Two names may become the same folder name; numbers do not.
        title = f"maps {number:02d} {candidate.name}"
        records = _stage(dataclasses.replace(context, model=candidate.target.model), tora, title, chosen)
        entries.append({"name": candidate.name, "lambda": tora.trade_off, **_summary(records, context.seed)})
        maps = np.concatenate([record["maps"] for record in records], 1)[:, :_KEPT]
        arrays |= {"x": np.concatenate([record["x"] for record in records])[:_KEPT], f"maps:{candidate.name}": maps}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return {"n": len(chosen), "parts": PARTS, "random_orders": RANDOM, "contenders": entries}, buffer.getvalue()


def _stage(context: RunContext, tora: Tora, title: str, chosen: Tensor) -> list[BatchRecord]:
    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, batch.x.device)
        with frozen(tora), torch.no_grad():
            maps = gate_maps(tora, batch.x)
            answer = context.model(batch.x).argmax(1)
            record = {"maps": maps.cpu().numpy(), "x": (255 * batch.x).round().to(torch.uint8).cpu().numpy()}
            for name, orders in patch_orders(tora, batch.x, maps, rng).items():
                grid, fill = (maps.shape[2], maps.shape[3]), tora.record.mean
                curves = [deletion_and_insertion(context.model, batch.x, answer, order, grid, fill) for order in orders]
                for kind, found in zip(("deletion", "insertion"), zip(*curves, strict=True), strict=True):
                    areas = torch.stack([area(each) for each in found]).mean(0)
                    record[f"{kind}:{name}"] = areas.cpu().numpy()
        return record

    return run_stage(context, title, chosen, work)


def patch_orders(tora: Tora, x: Tensor, maps: Tensor, rng: SampleRNG) -> dict[str, list[Tensor]]:
    """Orders of the patches, the first to be hidden first: by the mean map of all layers, by the last block's
    attention of the class token, and at random."""
    patches = maps.shape[2] * maps.shape[3]
    with attention_maps(tora) as seen:
        tora(x)
    attention = seen[-1][:, :, 0, -patches:].mean(1)
    return {
        "map": [maps.mean(0).flatten(1).argsort(stable=True, dim=1, descending=True)],
        "attention": [attention.argsort(stable=True, dim=1, descending=True)],
        "random": [rng.stream("patches", turn).permutation(patches) for turn in range(RANDOM)],
    }


def deletion_and_insertion(
    model: nn.Module, x: Tensor, y: Tensor, order: Tensor, grid: tuple[int, int], fill: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The probability of class `y` with the first 0, 1, ..., `PARTS` tenths of the patches hidden, and with the same
    shown alone, each (images, PARTS + 1). What is hidden has the color `fill`."""
    rank = order.argsort(1)  # which place each patch has in the order
    gray = torch.tensor(tuple(fill), dtype=x.dtype, device=x.device).view(1, 3, 1, 1).expand_as(x)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part in range(PARTS + 1):
        first = (rank < round(part * order.shape[1] / PARTS)).view(-1, 1, *grid)
        mask = nn.functional.interpolate(first.to(x.dtype), x.shape[-2:], mode="nearest").bool()
        for values, images in zip(found, (torch.where(mask, gray, x), torch.where(mask, x, gray)), strict=True):
            values.append(model(images).softmax(1).gather(1, y[:, None])[:, 0])
    return torch.stack(found[0], 1), torch.stack(found[1], 1)


def area(curve: Tensor) -> Tensor:
    """Under each row of a curve over [0, 1], by trapezia."""
    return torch.trapezoid(curve.double(), dx=1 / (curve.shape[1] - 1), dim=1)


def _summary(records: Sequence[BatchRecord], seed: int) -> dict[str, Any]:
    """Areas by order, and how much the map's differ from the others' on the same images; gates by layer."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([record[name] for record in records])

    def mean(values: np.ndarray) -> dict[str, Any]:
        return {"mean": float(values.mean()), "ci95": list(bootstrap_mean(values, seed))}

    maps = torch.from_numpy(np.concatenate([record["maps"] for record in records], 1)).double()
    summary: dict[str, Any] = {
        "share_by_layer": maps.mean((1, 2, 3)).tolist(),
        "range": [float(maps.min()), float(maps.max())],
    }
    for kind in ("deletion", "insertion"):
        areas = {name: column(f"{kind}:{name}") for name in ("map", "attention", "random")}
        summary[kind] = {name: mean(values) for name, values in areas.items()}
        summary[f"{kind}_differences"] = {
            f"map - {name}": mean(areas["map"] - areas[name]) for name in ("random", "attention")
        }
    return summary
