"""CLIP's projection into the space it shares with texts, which timm keeps where other models have their classifier."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["keep_projection", "projected"]

_WEIGHT, _BIAS = "projection_weight", "projection_bias"


def projected(backbone: nn.Module, pooled: Tensor) -> Tensor:
    """What the model's own projection makes of pooled features; of a model that has none, those themselves."""
    head = _projection(backbone)
    if head is not None:
        return F.linear(pooled, head.weight, head.bias)
    weight = getattr(backbone, _WEIGHT, None)
    return F.linear(pooled, weight, getattr(backbone, _BIAS, None)) if isinstance(weight, Tensor) else pooled


def keep_projection(backbone: nn.Module) -> None:
    """To be called before a new head takes its place. It stays beside the weights and is not saved with them."""
    head = _projection(backbone)
    if head is not None:
        bias = None if head.bias is None else head.bias.detach().clone()
        backbone.register_buffer(_WEIGHT, head.weight.detach().clone(), persistent=False)
        backbone.register_buffer(_BIAS, bias, persistent=False)


def _projection(backbone: nn.Module) -> nn.Linear | None:
    """The head, if it is no classifier: that of a CLIP image tower as released, not fine-tuned on classes."""
    told, head = getattr(backbone, "pretrained_cfg", None), getattr(backbone, "head", None)
    if not isinstance(told, Mapping) or not isinstance(head, nn.Linear):
        return None
    of_clip = "_clip_" in str(told.get("architecture")) and "_ft_" not in str(told.get("tag"))
    return head if of_clip and told.get("num_classes") == head.out_features else None
