"""Which models TORA can be put on: plain ViTs with absolute positions, whose class token is what is classified."""

from __future__ import annotations

from typing import Any

from vitadel.backbones.anatomy import ANATOMIES, backbone_of, family_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError

__all__ = ["check_host"]

_USE = "Use a ViT or DeiT such as deit_tiny_patch16_224."
_EVA = "it rotates queries and keys by place (RoPE), or has blocks of its own kind"


def check_host(classifier: Classifier) -> None:
    """Refuse what has no class token that passes all blocks, or is more than embedding, blocks, norm and head."""
    if not isinstance(classifier, Classifier):
        raise UserError(
            f"TORA goes around a Classifier, got {type(classifier).__name__}. Load the model with `load_model`, or "
            "make it one with `wrap`."
        )
    backbone: Any = backbone_of(classifier)
    family, name = family_of(classifier), classifier.record.name
    if family != "vit":
        reason = ANATOMIES[family].no_tokens or _EVA
        raise UserError(f"TORA needs a plain ViT; '{name}' is of family '{family}': {reason}. {_USE}")
    if backbone is not classifier.backbone:
        raise UserError(
            f"TORA runs the ViT itself and would leave out what stands around it in '{name}' "
            f"({type(classifier.backbone).__name__}). Wrap the ViT alone. {_USE}"
        )
    if hasattr(backbone, "dist_token"):
        raise UserError(
            f"'{name}' is distilled: it has a second class token with a head of its own, and TORA puts two in place of "
            f"one. {_USE}"
        )
    if type(backbone).__module__.partition(".")[0] != "timm":
        raise UserError(
            f"'{name}' is a {type(backbone).__name__}, which may run otherwise than timm's VisionTransformer. {_USE}"
        )
    if getattr(backbone, "rope", None) is not None:
        raise UserError(f"'{name}' rotates queries and keys by place (RoPE). TORA needs absolute positions. {_USE}")
    if not backbone.has_class_token or backbone.global_pool != "token":
        raise UserError(
            f"'{name}' does not classify by a class token (global_pool '{backbone.global_pool}'), and TORA works with "
            f"two of them. Load it with kwargs global_pool='token' if it has one. {_USE}"
        )
