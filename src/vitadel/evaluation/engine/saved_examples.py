"""Adversarial images kept on disk: as floats, because 8 bits can undo an attack, or also as pictures, judged again."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from vitadel.data.batches import Batch
from vitadel.evaluation.engine.judge import Verdict
from vitadel.runtime.run_folder import write_atomically

__all__ = ["IMAGES", "PICTURES", "PNG_HOLDS", "ExampleSaver", "in_8_bits"]

IMAGES, PICTURES = "adversarial", "png"
PNG_HOLDS = "png_holds"
"""The note of a kept image: its 8-bit version no longer fools the model."""


def in_8_bits(z: Tensor, x: Tensor) -> Tensor:
    """The nearest image of whole grey levels that is no farther from `x` than `z` is, where there is one."""
    levels = z * 255
    towards = torch.where(z > x, (levels + 1e-3).floor(), (levels - 1e-3).ceil())
    return torch.where(z == x, levels.round(), towards).clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class ExampleSaver:
    """Writes what fooled `model` into a folder: one safetensors file per batch, one picture per image."""

    folder: Path
    model: nn.Module
    png: bool = False

    def keep(self, stage: str, number: int, batch: Batch, z: Tensor, verdict: Verdict) -> dict[str, Tensor]:
        """Save the batch's successes; with pictures, a note for every sample says whose picture fools no more."""
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
            content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
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
