"""Settings of TORA (Li & Xu, CVPR 2023) and of its baselines, and the models it can be added to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vitadel.backbones.anatomy import ANATOMIES, backbone_of, family_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError, check_known

KINDS = ("tora", "adapterfusion", "single", "head")
"""TORA; AdapterFusion instead of gated fusion; one adapter, token and head for both losses; heads only."""

SLOTS = ("shared", "separate")
"""Frozen blocks see one class token, the mean of both branches, or both as two tokens."""

SOFTMAXES = ("adapter", "token", "joint", "adapterfusion")
"""What the softmax of scores runs over: the two adapters, for each pair of tokens; all keys of one adapter; all keys of
both; the two adapters, for each token with itself only."""

JOINTS = ("logits", "probabilities")
"""What the joint prediction averages."""

BRANCHES = ("acc", "rob")

LOSSES_AT = ("own", "joint")
"""Where the losses of a training look: each at the head of its own branch, or both at the joint prediction."""


@dataclass(frozen=True)
class ToraSettings:
    """What is added to the backbone; see `KINDS`, `SLOTS`, `SOFTMAXES` and `JOINTS`.

    Adapters are `reduction` times narrower than the backbone, or wider if it is below 1; `heads` split the fusion's
    scores.
    """

    kind: str = "tora"
    slot: str = "shared"
    softmax: str = "adapter"
    heads: int = 1
    reduction: float = 16
    joint: str = "logits"

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("slot", SLOTS), ("softmax", SOFTMAXES), ("joint", JOINTS)):
            check_known(name, getattr(self, name), known, " of TORA")
        if self.heads < 1:
            raise UserError(f"heads of TORA must be at least 1, got {self.heads}.")
        if not 0 < self.reduction < math.inf:
            raise UserError(
                f"reduction of TORA must be above 0, got {self.reduction}: 16 gives adapters a sixteenth as wide as "
                "the backbone, 0.5 twice as wide ones."
            )
        if self.reduction == int(self.reduction):  # 16 and 16.0 are the same setting, in files, too
            object.__setattr__(self, "reduction", int(self.reduction))
        if self.kind != "tora" and (self.softmax, self.heads) != ("adapter", 1):
            raise UserError(
                f"kind '{self.kind}' has no gated fusion, so softmax '{self.softmax}' and heads {self.heads} have no "
                "effect. Remove both, or use kind 'tora'."
            )
        if not self.fuses and self.slot != "shared":
            raise UserError(f"kind '{self.kind}' has one class token, so slot '{self.slot}' has no effect. Remove it.")

    @property
    def fuses(self) -> bool:
        return self.kind in ("tora", "adapterfusion")

    @property
    def adapts(self) -> bool:
        return self.kind != "head"

    @property
    def branches(self) -> tuple[str, ...]:
        return ("single",) if self.kind == "single" else BRANCHES


def check_trade_off(trade_off: float) -> float:
    """Check lambda, the weight of the robust loss; the clean loss has weight 1 - lambda."""
    if not 0 <= trade_off <= 1:  # NaN, too
        raise UserError(
            f"lambda, the weight of the robust loss, must be in [0, 1], got {trade_off}: 0 trains for accuracy only, 1 "
            "for robustness only; the paper uses 0.1 to 0.9."
        )
    return float(trade_off)


def describe(settings: ToraSettings) -> str:
    """A short description, for notes and `repr`."""
    if settings.kind == "tora":
        heads = "1 head" if settings.heads == 1 else f"{settings.heads} heads"
        return f"tora ({settings.slot} slot, {settings.softmax} softmax, {heads})"
    return f"{settings.kind} ({settings.slot} slot)" if settings.fuses else settings.kind


_USE = "Use a ViT or DeiT such as deit_tiny_patch16_224."
_EVA = "it rotates queries and keys by position (RoPE), or has other blocks"


def check_host(classifier: Classifier) -> None:
    """Refuse models other than plain ViTs: absolute positions, one class token that is classified, no more modules."""
    if not isinstance(classifier, Classifier):
        raise UserError(
            f"TORA needs a Classifier, got {type(classifier).__name__}. Load the model with `load_model`, or convert "
            "it with `wrap`."
        )
    backbone: Any = backbone_of(classifier)
    family, name = family_of(classifier), classifier.record.name
    if family != "vit":
        reason = ANATOMIES[family].no_tokens or _EVA
        raise UserError(f"TORA needs a plain ViT; '{name}' is of family '{family}': {reason}. {_USE}")
    if backbone is not classifier.backbone:
        raise UserError(
            f"TORA runs the ViT itself and would skip the modules around it in '{name}' "
            f"({type(classifier.backbone).__name__}). Wrap only the ViT. {_USE}"
        )
    if hasattr(backbone, "dist_token"):
        raise UserError(
            f"'{name}' is distilled: it has a second class token with its own head, but TORA replaces one class token "
            f"by two. {_USE}"
        )
    if type(backbone).__module__.partition(".")[0] != "timm":
        raise UserError(
            f"'{name}' is a {type(backbone).__name__}, which may run differently from timm's VisionTransformer. {_USE}"
        )
    if getattr(backbone, "rope", None) is not None:
        raise UserError(f"'{name}' rotates queries and keys by position (RoPE). TORA needs absolute positions. {_USE}")
    if not backbone.has_class_token or backbone.global_pool != "token":
        raise UserError(
            f"'{name}' does not classify by a class token (global_pool '{backbone.global_pool}'), but TORA needs "
            f"one. Load it with kwargs global_pool='token' if it has one. {_USE}"
        )
