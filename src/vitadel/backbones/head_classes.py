"""A classifier for some of its classes: rows of its last layer, in a given order, for data that have only those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vitadel.errors import UserError

__all__ = ["keep_classes"]


def keep_classes(backbone: nn.Module, classes: Sequence[int], spec: str) -> None:
    """Leave the model, in place, with the logits of these classes; all others go, and softmax is over what stays."""
    get: Any = getattr(backbone, "get_classifier", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"classes of '{spec}' cannot be chosen: its head is {_kind(head)}, and only one linear layer can be cut. "
            "Choose among its logits in your own code, or take a new head."
        )
    wrong = sorted({each for each in classes if not 0 <= each < head.out_features})
    if wrong or len(set(classes)) != len(classes) or len(classes) < 2:
        told = f"there is none of {', '.join(map(str, wrong))}" if wrong else "each once, and at least two"
        raise UserError(
            f"classes to keep of '{spec}' are numbers from 0 to {head.out_features - 1}: {told}; got {list(classes)}."
        )
    reset: Any = backbone.reset_classifier
    reset(len(classes))
    cut = get()
    rows = torch.tensor(list(classes))
    with torch.no_grad():
        cut.weight.copy_(head.weight[rows])
        if head.bias is not None:
            cut.bias.copy_(head.bias[rows])
    cut.to(head.weight)


def _kind(head: object) -> str:
    return "not known" if head is None else f"made of {type(head).__name__}"
