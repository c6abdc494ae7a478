"""Whether a model can cut images of a size into its patches: told before a pass, not from deep inside it."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from torch import nn

from vitadel.backbones.families.fan_stems import HybridEmbed
from vitadel.backbones.families.rvt import Stem
from vitadel.errors import UserError

__all__ = ["check_image_size", "check_images_fit", "not_a_multiple"]


def check_image_size(backbone: nn.Module, size: tuple[int, int], name: str) -> None:
    """Refuse a size, (height, width), that the patch embedding of a timm backbone cannot take; others take any."""
    complaint = _complaint(getattr(backbone, "patch_embed", None), size, name)
    if complaint is not None:
        raise complaint


def check_images_fit(model: nn.Module, size: tuple[int, int], name: str) -> None:
    """The same for a model under any wrappers, which may resize on their way: an image is only sent if in doubt."""
    for module in model.modules():
        complaint = _complaint(module, size, name)
        if complaint is None:
            continue
        like = next(model.parameters())
        try:
            with torch.no_grad():
                model(torch.full((1, 3, *size), 0.5, device=like.device))
        except (AssertionError, UserError) as error:
            raise complaint from error


def not_a_multiple(size: tuple[int, int], patch: tuple[int, int], name: str) -> UserError:
    """What is said of a size that leaves pixels over."""
    near = [_nearest(side, step) for side, step in zip(size, patch, strict=True)]
    below, above = (_text((near[0][way], near[1][way])) for way in (0, 1))
    return UserError(
        f"images of {_text(size)} pixels cannot be cut into patches of {_text(patch)} by '{name}': something would be "
        f"left over. The nearest sizes are {above if min(near[0][0], near[1][0]) == 0 else f'{below} and {above}'}; "
        "images are brought to such a size by --input-size (in recipes model.input_size, in Python "
        "load_model(..., input_size=...))."
    )


def _complaint(embed: object, size: tuple[int, int], name: str) -> UserError | None:
    if isinstance(embed, HybridEmbed | Stem) and (size[0] % embed.patch_size or size[1] % embed.patch_size):
        return not_a_multiple(size, (embed.patch_size, embed.patch_size), name)  # the rest would not be looked at
    if not isinstance(embed, PatchEmbed):
        return None
    own, (tall, wide) = embed.img_size, embed.patch_size
    if own == size:
        return None  # even if pixels are left over: SigLIP at 384 pixels was trained with patches of 14
    if (size[0] % tall or size[1] % wide) and not embed.dynamic_img_pad:
        return not_a_multiple(size, (tall, wide), name)
    if own is None or not embed.strict_img_size:
        return None
    return UserError(
        f"images of {_text(size)} pixels were given to '{name}', which is built for {_text(own)}. Resize the images, "
        f"or load the model for theirs: --input-size {size[0]} (in Python load_model(..., input_size={size[0]}))."
    )


def _nearest(side: int, step: int) -> tuple[int, int]:
    """The multiples at or below and at or above."""
    below = side // step * step
    return below, below if below == side else below + step


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
