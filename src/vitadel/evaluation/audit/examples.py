"""Adversarial images in the run folder: as floats, because 8 bits can undo an attack, and as pictures, judged again."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from vitadel.data.batches import Batch, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import NOTE, MemberResult, RunContext, Verdict, rules_of
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically
from vitadel.types import Attack

__all__ = ["ExampleSaver", "count_saved", "example_arrays", "in_8_bits"]

IMAGES, PICTURES = "adversarial", "png"
_EXAMPLES = 8  # samples with their perturbed versions, for the report
PNG_HOLDS = "png_holds"
"""The note of a saved image: the model classifies its 8-bit version correctly."""


def in_8_bits(z: Tensor, x: Tensor) -> Tensor:
    """The nearest 8-bit image that is no farther from `x` than `z` is, where there is one."""
    levels = z * 255
    towards = torch.where(z > x, (levels + 1e-3).floor(), (levels - 1e-3).ceil())
    return torch.where(z == x, levels.round(), towards).clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class ExampleSaver:
    """Writes what fooled `model` into a folder: one safetensors file per batch, one picture per image."""

    folder: Path
    model: nn.Module
    png: bool = False

    def save(self, stage: str, number: int, batch: Batch, z: Tensor, verdict: Verdict) -> dict[str, Tensor]:
        """Save the successes of a batch; with pictures, the note `PNG_HOLDS` of every sample."""
        fooled = ~verdict.held
        name = re.sub(r"[^a-zA-Z0-9.-]+", "-", stage).strip("-")
        if bool(fooled.any()):
            tensors = {
                "images": z[fooled],
                "clean": batch.x[fooled],
                "index": batch.indices[fooled.cpu()],
                "label": batch.y[fooled],
                "prediction": verdict.prediction[fooled],
            }
            content = save_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
            write_atomically(self.folder / IMAGES / f"{name}-{number:05d}.safetensors", content)
        if not self.png:
            return {}
        pictures = in_8_bits(z, batch.x)
        with torch.no_grad():
            right = self.model(pictures.to(z.dtype) / 255).argmax(1) == batch.y
        for row in fooled.nonzero()[:, 0].tolist():
            buffer = io.BytesIO()
            Image.fromarray(pictures[row].permute(1, 2, 0).cpu().numpy()).save(buffer, format="PNG")
            write_atomically(self.folder / PICTURES / f"{int(batch.indices[row]):06d}-{name}.png", buffer.getvalue())
        return {PNG_HOLDS: right & fooled}


def count_saved(members: Sequence[MemberResult], png: bool) -> dict[str, Any]:
    """How many images were saved, and of how many the 8-bit picture no longer fools the model."""
    records = [record for member in members for record in member.records]
    lost = sum(int(record[f"{NOTE}{PNG_HOLDS}"].sum()) for record in records) if png else None
    return {
        "images": sum(member.broken for member in members),
        "folder": IMAGES,
        "pictures": PICTURES if png else None,
        "undone_by_8_bits": lost,
    }


def example_arrays(context: RunContext, verdicts: Verdicts, name: str, attack: Attack) -> bytes | None:
    """`examples.npz`: a few samples, clean and as this attack perturbs them, for the report. It runs once more."""
    rows = verdicts.index[verdicts.correct][:_EXAMPLES].tolist()
    if not rows:
        return None
    (batch,) = read_batches(context.source, [rows], context.preprocess, skip_bad=context.skip_bad)
    batch = batch.to(context.processes.device)
    with context.arithmetic():
        z = attack(context.model, batch.x, batch.y, SampleRNG.of_samples(context.seed, batch.indices, batch.x.device))
        with torch.no_grad():
            prediction = context.model(z).argmax(1)
        try:
            shown = {"attention_x": batch.x, "attention_z": z}
            maps = {key: attention_over_patches(context.model, images) for key, images in shown.items()}
        except UserError:  # no attention maps over patches
            maps = {}
    arrays = {"index": batch.indices, "x": batch.x, "z": z, "label": batch.y, "prediction": prediction, **maps}
    about = {"attack": np.asarray(name), "own_rules": np.asarray(rules_of(attack) is not None)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **(about | {key: tensor.cpu().numpy() for key, tensor in arrays.items()}))
    return buffer.getvalue()
