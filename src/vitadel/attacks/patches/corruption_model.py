"""AFAT's corruption model (CVPR 2023): a small network that selects the patches a classifier depends on most.

The attacker of adversarial feature alignment training: it maps images to masks and is trained against a classifier.
With a few thousand weights it also serves as an attack on a frozen model, see `learned_patches`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.goals import gradient
from vitadel.attacks.patches.patch_threat import patches_in, pixel_mask, strongest
from vitadel.attacks.patches.random_patches import normalization_of
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically

_KEY = "vitadel.corruption_model"  # of the metadata in files


def normalize_like(model: nn.Module, x: Tensor) -> Tensor:
    """The images in the model's normalization."""
    mean, std = normalization_of(model)
    return (x - mean.to(x)) / std.to(x)


def keep_mask(scores: Tensor, count: int) -> Tensor:
    """1 where a patch is kept, 0 at the `count` lowest scores of each row; gradients pass straight through.

    By rank, not by a quantile: exactly `count`, also for equal scores, and none for a count of 0.
    """
    hard = (~strongest(-scores.detach(), count)).to(scores.dtype)
    return hard + (scores - scores.detach())


def credited_scores(scores: Tensor, damage: Callable[[Tensor], Tensor], count: int, rng: SampleRNG) -> Tensor:
    """The sum of scores times each patch's part in the damage, for random patches at a random strength of the noise.

    `damage` maps a mask (batch, patches), 1 where a patch is kept, to a number. Averaged over strengths, gradients
    times changes add up to the damage (integrated gradients, Sundararajan et al. 2017). Ascending this sum lowers the
    scores of patches that do more damage than others. The straight-through gradient of `keep_mask` cannot: around a
    patch without noise the distance to the clean features has no first-order term of that patch, so only patches that
    are chosen already are judged.
    """
    noisy = (rng.stream("patches").permutation(scores.shape[1]) < count).to(scores.dtype)
    keep = (1 - rng.stream("strength").uniform(1).to(scores.dtype) * noisy).requires_grad_()
    credit = gradient(damage(keep), keep) * noisy
    credit = noisy * (credit - credit.sum() / noisy.sum().clamp(min=1))  # the common part is the same for all patches
    return (scores * credit).sum()


def corrupted(x: Tensor, keep: Tensor, noise: Tensor, side: int) -> Tensor:
    """`x` with noise in the patches that are not kept; `keep` is (batch, patches) and may require gradients."""
    mask = pixel_mask(keep, x, side).to(x.dtype)
    return mask * x + (1 - mask) * noise


def alignment(features: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The mean squared difference of two lists of block outputs, mean over blocks."""
    gaps = [F.mse_loss(ours, theirs) for ours, theirs in zip(features, others, strict=True)]
    return torch.stack(gaps).mean()


class CorruptionModel(nn.Module):
    """One score per patch: a convolution over single patches, GELU, and a linear map over all patches.

    The input is normalized as for the classifier. Weights are initialized as in torch's own layers, but from
    `generator`, so that the global generator is left alone.
    """

    def __init__(
        self, rows: int, columns: int, side: int, channels: int = 3, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.side = rows, columns, side
        source = torch.Generator().manual_seed(0) if generator is None else generator
        patches, pixels = rows * columns, channels * side**2
        self.look = nn.Parameter(_start((1, channels, side, side), pixels, source))
        self.mix = nn.Parameter(_start((patches, patches), patches, source))

    def forward(self, x: Tensor) -> Tensor:
        """Scores, (batch, patches) row by row; the lowest are the patches to corrupt."""
        rows, columns = patches_in(x, self.side)
        if (rows, columns) != (self.rows, self.columns):
            raise UserError(
                f"this corruption model was made for {self.rows} x {self.columns} patches of side {self.side}, and the "
                f"images of shape {tuple(x.shape)} have {rows} x {columns}; give such images, or train a new model"
            )
        # In half precision scores tie, and the position of a patch would break the tie.
        with torch.autocast(x.device.type, enabled=False):
            seen = F.gelu(F.conv2d(x.to(self.look.dtype), self.look, stride=self.side))
            return F.linear(seen.flatten(1), self.mix)


def _start(shape: tuple[int, ...], inputs: int, source: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=source)


def save_corruption_model(model: CorruptionModel, path: Path) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, {_KEY: json.dumps([model.rows, model.columns, model.side])}))


def load_corruption_model(path: str | Path) -> CorruptionModel:
    """The model in a file of `save_corruption_model`, on the CPU and without gradients."""
    try:
        with safe_open(str(path), "pt") as file:
            grid = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
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
    """(rows, columns, side) from the file's metadata, checked against the shapes of its weights."""
    look, mix = tensors["look"], tensors["mix"]
    try:
        rows, columns, side = (int(each) for each in json.loads(text))
    except (ValueError, TypeError, RecursionError):
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
    return UserError(f"{path} is damaged: {how}. Copy it again, or train a new corruption model.")
