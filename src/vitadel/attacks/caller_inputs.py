"""What a Python caller gives to an attack: tensors, arrays or lists become tensors that the model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.errors import UserError


def as_tensors(model: nn.Module, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and labels as tensors; arrays and lists go to the model's device, in its precision."""
    some = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.zeros(()))
    pixels = x if isinstance(x, Tensor) else _tensor(x, "images").to(some.device)
    labels = (y if isinstance(y, Tensor) else _tensor(y, "labels")).to(pixels.device)
    shape = tuple(pixels.shape)
    if pixels.ndim == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        raise UserError(
            f"images must have shape (n, channels, height, width), got {shape}: the channels are last. Move them: "
            "x.permute(0, 3, 1, 2), or x.transpose(0, 3, 1, 2) for an array."
        )
    if pixels.ndim == 3:
        raise UserError(f"images of shape (n, channels, height, width) are needed, got {shape}: x[None] for one")
    if not pixels.is_floating_point():
        raise UserError(f"images must be floating point in [0, 1], got {pixels.dtype}. Convert them: x / 255.")
    if pixels.numel():
        low, high = (float(end) for end in pixels.detach().aminmax())
        if not (low >= -1e-6 and high <= 1 + 1e-6):
            raise UserError(_range_problem(low, high))
    if labels.ndim == 1 and len(labels) != len(pixels):
        raise UserError(f"there must be one label per image: {len(pixels)} images, {len(labels)} labels")
    if labels.ndim == 1 and labels.dtype != torch.int64:
        labels = _whole_numbers(labels)
    return pixels if isinstance(x, Tensor) else pixels.to(some.dtype), labels


def _tensor(value: Any, what: str) -> Tensor:
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return torch.stack(list(value))
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{what} of type {type(value).__name__} cannot be read: {error}. An attack takes tensors, arrays or lists; "
            "for a Dataset, a DataLoader or a path use vitadel.attack(model, data)."
        ) from error


def _range_problem(low: float, high: float) -> str:
    given = f"images must be pixels in [0, 1], got {low:.4g} to {high:.4g}"
    if low < 0:
        return f"{given}: they are normalized already. Normalize in the model: vitadel.wrap(model, mean=..., std=...)."
    return f"{given}. Divide by 255." if high > 1 else f"{given}. Check how they were loaded."


def _whole_numbers(labels: Tensor) -> Tensor:
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise UserError("labels must be whole numbers, the numbers of the model's outputs")
    return labels.to(torch.int64)
