"""The last layer of a backbone: keep some of its classes, or keep CLIP's projection when a new head replaces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.errors import UserError

_WEIGHT, _BIAS = "projection_weight", "projection_bias"


def keep_classes(backbone: nn.Module, classes: Sequence[int], spec: str) -> None:
    """Reduce the head, in place, to the logits of these classes in this order."""
    get: Any = getattr(backbone, "get_classifier", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Linear):
        kind = "not known" if head is None else f"made of {type(head).__name__}"
        raise UserError(
            f"classes of '{spec}' cannot be chosen: its head is {kind}, and only one linear layer can be cut. "
            "Choose among its logits in your own code, or take a new head."
        )
    wrong = sorted({each for each in classes if not 0 <= each < head.out_features})
    if wrong or len(set(classes)) != len(classes) or len(classes) < 2:
        reason = f"there is none of {', '.join(map(str, wrong))}" if wrong else "each once, and at least two"
        raise UserError(
            f"classes to keep of '{spec}' are numbers from 0 to {head.out_features - 1}: {reason}; got {list(classes)}."
        )
    reset: Any = backbone.reset_classifier
    reset(len(classes))
    reduced = get()
    rows = torch.tensor(list(classes))
    with torch.no_grad():
        reduced.weight.copy_(head.weight[rows])
        if head.bias is not None:
            reduced.bias.copy_(head.bias[rows])
    reduced.to(head.weight)


def project(backbone: nn.Module, pooled: Tensor) -> Tensor:
    """Apply CLIP's projection into the space it shares with texts to pooled features; other models have none."""
    head = _projection(backbone)
    if head is not None:
        return F.linear(pooled, head.weight, head.bias)
    weight = getattr(backbone, _WEIGHT, None)
    return F.linear(pooled, weight, getattr(backbone, _BIAS, None)) if isinstance(weight, Tensor) else pooled


def keep_projection(backbone: nn.Module) -> None:
    """Copy CLIP's projection to buffers that are not saved; call this before a new head replaces it."""
    head = _projection(backbone)
    if head is not None:
        bias = None if head.bias is None else head.bias.detach().clone()
        backbone.register_buffer(_WEIGHT, head.weight.detach().clone(), persistent=False)
        backbone.register_buffer(_BIAS, bias, persistent=False)


def _projection(backbone: nn.Module) -> nn.Linear | None:
    """timm keeps the projection of a CLIP image tower where other models have their classifier, until fine-tuning."""
    config, head = getattr(backbone, "pretrained_cfg", None), getattr(backbone, "head", None)
    if not isinstance(config, Mapping) or not isinstance(head, nn.Linear):
        return None
    of_clip = "_clip_" in str(config.get("architecture")) and "_ft_" not in str(config.get("tag"))
    return head if of_clip and config.get("num_classes") == head.out_features else None
