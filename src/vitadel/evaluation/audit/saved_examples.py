"""Saved adversarial examples: what fooled a model, as floats and as 8-bit pictures, in the run folder."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from vitadel.data.batches import Batch
from vitadel.evaluation.engine.stages import NOTE, MemberResult, Verdict
from vitadel.runtime.run_folder import write_atomically

IMAGES, PICTURES = "adversarial", "png"  # folders of saved examples
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
    classes: Sequence[str] = ()

    def _class_name(self, number: int) -> str:
        """For the name of a file: letters, digits and hyphens."""
        name = self.classes[number] if number < len(self.classes) else f"class-{number}"
        return re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-")[:30] or f"class-{number}"

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
            classes = (self._class_name(int(each[row])) for each in (batch.y, verdict.prediction))
            file = f"{int(batch.indices[row]):06d}-{'-as-'.join(classes)}-{name}.png"
            write_atomically(self.folder / PICTURES / file, buffer.getvalue())
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
