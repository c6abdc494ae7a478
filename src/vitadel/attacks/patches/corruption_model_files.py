"""Corruption models in files: an opponent of one training can be tried on other models."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vitadel.attacks.patches.corruption_model import CorruptionModel
from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically

__all__ = ["load_corruption_model", "save_corruption_model"]

_KEY = "vitadel.corruption_model"


def save_corruption_model(model: CorruptionModel, path: Path) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, {_KEY: json.dumps([model.rows, model.columns, model.side])}))


def load_corruption_model(path: str | Path) -> CorruptionModel:
    """On the CPU, and not to be trained further."""
    try:
        with safe_open(str(path), "pt") as file:
            grid = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file: {error}") from error
    if grid is None or set(tensors) != {"look", "mix"}:
        raise UserError(
            f"{path} holds no corruption model; give weights/corruption-model.safetensors of a run that trained by afat"
        )
    rows, columns, side = _grid_in(path, grid, tensors)
    model = CorruptionModel(rows, columns, side, tensors["look"].shape[1])
    model.load_state_dict(tensors)
    return model.requires_grad_(False)


def _grid_in(path: str | Path, text: str, tensors: dict[str, Tensor]) -> tuple[int, int, int]:
    """(rows, columns, side) as the file tells them, if its weights are of that size: before anything is made of it."""
    look, mix = tensors["look"], tensors["mix"]
    try:
        rows, columns, side = (int(each) for each in json.loads(text))
    except (ValueError, TypeError):
        raise _damaged(path, f"its grid of patches is {text[:40]!r}") from None
    if min(rows, columns, side) < 1 or mix.shape != (rows * columns,) * 2 or look.shape != (1, 3, side, side):
        raise _damaged(
            path,
            f"weights of {tuple(look.shape)} and {tuple(mix.shape)} do not fit its grid of {rows} x {columns} patches "
            f"of side {side}",
        )
    if not all(each.is_floating_point() and bool(each.isfinite().all()) for each in (look, mix)):
        raise _damaged(path, "its weights are not finite numbers")
    return rows, columns, side


def _damaged(path: str | Path, how: str) -> UserError:
    return UserError(f"{path} is damaged: {how}. Copy it anew, or train the corruption model again.")
