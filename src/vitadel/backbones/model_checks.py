"""Checks of a model's inputs and outputs: pixels, image size, logits, train mode."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from vitadel.errors import UserError

__all__ = [
    "check_image_size",
    "check_images_fit",
    "check_logits",
    "check_multiple",
    "check_pixels",
    "looks_like_probabilities",
    "modules_in_train_mode",
]

_BOX_SLACK = 1e-6  # rounding errors of float32 around 1

Size = tuple[int, int]


def check_pixels(x: Tensor) -> None:
    """Refuse a batch whose values are not pixels in [0, 1], or whose channels come last.

    Any other shape passes: attacks also run on toy models that take vectors.
    """
    if x.ndim == 4 and x.shape[3] == 3 and x.shape[1] not in (1, 3):
        raise UserError(
            f"model expects images of shape (batch, 3, height, width), got {tuple(x.shape)}. "
            "Move the channels to the front: x.permute(0, 3, 1, 2)."
        )
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(f"model expects floating-point pixels in [0, 1], got {kind}. Convert them: x.float() / 255.")
    if x.numel() == 0:
        return
    broken = int((~x.isfinite()).sum())
    if broken:
        raise UserError(
            f"model expects pixels in [0, 1], got {broken} values that are NaN or infinite. Check the images."
        )
    low, high = x.amin().item(), x.amax().item()
    if low < -_BOX_SLACK or high > 1 + _BOX_SLACK:
        advice = (
            "Divide by 255." if low >= 0 else "Drop Normalize from the transform; the classifier normalizes itself."
        )
        raise UserError(f"model expects pixels in [0, 1], got range [{low:.4g}, {high:.4g}]. {advice}")


def check_logits(logits: Tensor, num_classes: int | None = None) -> None:
    """Refuse outputs that no attack or accuracy can be computed from."""
    if logits.ndim != 2:
        raise UserError(
            f"model must return logits of shape (batch, classes), got {tuple(logits.shape)}. "
            "Give a classifier, not a backbone that returns features."
        )
    if logits.shape[1] < 2:
        raise UserError(
            f"model returns {logits.shape[1]} class; at least 2 are needed. "
            "Turn a single score z of a yes/no model into the two logits (0, z)."
        )
    if num_classes is not None and logits.shape[1] != num_classes:
        raise UserError(f"model returns {logits.shape[1]} classes, {num_classes} were announced. Check --num-classes.")
    broken = int((~logits.isfinite()).any(1).sum())
    if broken:
        raise UserError(
            f"model returns NaN or infinite logits for {broken} of {len(logits)} images. "
            "Check its weights and precision (fp16 overflows where bf16 and fp32 do not)."
        )


def looks_like_probabilities(logits: Tensor) -> bool:
    """Whether a softmax was applied already: all values in [0, 1] and each row sums to 1 within 1e-4.

    Losses on logits then have almost no gradient, and an attack fails for the wrong reason.
    """
    if logits.ndim != 2 or logits.numel() == 0:
        return False
    values = logits.detach().double()
    inside = bool(((values >= 0) & (values <= 1)).all())
    return inside and bool(((values.sum(1) - 1).abs() <= 1e-4).all())


def modules_in_train_mode(model: nn.Module) -> list[str]:
    """Names of all modules with `training` set; the model itself is called '(model)'."""
    return [name or "(model)" for name, module in model.named_modules() if module.training]


def check_image_size(backbone: nn.Module, size: Size, name: str) -> None:
    """Refuse a size, (height, width), that the backbone's patch embedding cannot take."""
    error = _size_error(getattr(backbone, "patch_embed", None), size, name)
    if error is not None:
        raise error


def check_images_fit(model: nn.Module, size: Size, name: str) -> None:
    """The same for a model under any wrappers. These may resize images, so a doubtful size is tried with one image."""
    for module in model.modules():
        size_error = _size_error(module, size, name)
        if size_error is None:
            continue
        like = next(model.parameters())
        try:
            with torch.no_grad():
                model(torch.full((1, 3, *size), 0.5, device=like.device))
        except (AssertionError, UserError) as error:
            raise size_error from error


def check_multiple(size: Size, patch: Size, name: str) -> None:
    """Refuse a size that is not a whole number of patches."""
    if size[0] % patch[0] or size[1] % patch[1]:
        raise _not_a_multiple(size, patch, name)


def _not_a_multiple(size: Size, patch: Size, name: str) -> UserError:
    below: Size = (size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1])
    above: Size = (-(-size[0] // patch[0]) * patch[0], -(-size[1] // patch[1]) * patch[1])
    nearest = _text(above) if min(below) == 0 else f"{_text(below)} and {_text(above)}"
    return UserError(
        f"images of {_text(size)} pixels cannot be cut into patches of {_text(patch)} by '{name}': pixels would be "
        f"left over. The nearest sizes are {nearest}; resize images with --input-size (in recipes model.input_size, in "
        "Python load_model(..., input_size=...))."
    )


def _size_error(embed: object, size: Size, name: str) -> UserError | None:
    """`embed` is a patch embedding of timm, or of ours with `needs_whole_patches`; other modules take any size."""
    if isinstance(embed, nn.Module) and getattr(embed, "needs_whole_patches", False):
        patch = int(embed.patch_size)  # type: ignore[arg-type]
        return _not_a_multiple(size, (patch, patch), name) if size[0] % patch or size[1] % patch else None
    if not isinstance(embed, PatchEmbed):
        return None
    own, (tall, wide) = embed.img_size, embed.patch_size
    if own == size:
        return None  # even if pixels are left over: SigLIP at 384 pixels was trained with patches of 14
    if (size[0] % tall or size[1] % wide) and not embed.dynamic_img_pad:
        return _not_a_multiple(size, (tall, wide), name)
    if own is None or not embed.strict_img_size:
        return None
    return UserError(
        f"images of {_text(size)} pixels were given to '{name}', which is built for {_text(own)}. Resize the images, "
        f"or load the model for theirs: --input-size {size[0]} (in Python load_model(..., input_size={size[0]}))."
    )


def _text(size: Size) -> str:
    return f"{size[0]} x {size[1]}"
