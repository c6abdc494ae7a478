"""What a model and its inputs should look like before any number is believed."""

from __future__ import annotations

from torch import Tensor, nn

from vitadel.errors import UserError

__all__ = ["check_logits", "check_pixels", "looks_like_probabilities", "modules_in_train_mode"]

_BOX_SLACK = 1e-6  # a rounding error of float32 around 1 is no mistake


def check_pixels(x: Tensor) -> None:
    """Refuse a batch whose values are not pixels in [0, 1], or whose channels come last.

    Otherwise any shape will do: attacks also run on toy models that eat vectors.
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
        if low >= 0:
            advice = "Divide by 255."
        else:
            advice = "Drop Normalize from the transform; the classifier normalises itself."
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
    """Names of all modules with `training` set; the model itself is called '(model)'. Empty is what one wants."""
    return [name or "(model)" for name, module in model.named_modules() if module.training]
