"""Features of a frozen transformer for heads: normed class and patch tokens of its last blocks, as in DINOv2's probes.

Registers and tokens of `extra_tokens` take part in the model's computation but are not returned, so that a mean over
patches is one over patches only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitadel.adapters.adapter_file import backbone_fingerprint
from vitadel.backbones.anatomy import Part, anatomy_of, backbone_of, blocks_of, family_of, prefix_tokens_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.instrument.tokens import own_tokens

_FAMILIES = ("vit", "eva", "beit")  # prefix and patch tokens go side by side through every block


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A frozen classifier that heads are trained on, alone or with secret tokens."""

    model: Classifier  # whose features are used: the classifier itself, or the classifier with tokens
    classifier: Classifier  # the public part
    tokens: str | None = None  # the fingerprint of the tokens

    @property
    def fingerprint(self) -> str:
        return backbone_fingerprint(self.classifier)


class BlockTokens(NamedTuple):
    """Tokens of one block after the final norm, in at least float32."""

    class_token: Tensor  # (batch, dim)
    patch_tokens: Tensor  # (batch, patches, dim), row by row


def token_features(model: nn.Module, x: Tensor, blocks: int = 1) -> list[BlockTokens]:
    """Tokens of the last `blocks` blocks, the last one last, each with the model's final norm applied.

    `class_token` is the mean of both where there are two (distilled DeiT). Where there is none, or the final norm comes
    after pooling (`fc_norm`) so that a class token never meets it, it is what the model's head would get from that
    block: patches, pooled and normed. Patch tokens are then normed by `fc_norm` too.

    One pass of the whole model, in the mode it is in, with its graph if gradients are on.
    """
    chosen, backbone, prefix = _last_blocks(model, blocks), backbone_of(model), prefix_tokens_of(model)
    found: dict[int, BlockTokens] = {}
    with own_tokens(model) as own:

        def keep(place: int) -> Callable[[Tensor], None]:
            # Inside the pass, where what surrounds it, e.g. scaled attention or autocast, holds for pooling as well.
            def see(output: Tensor) -> None:
                found[place] = _split(backbone, own(output), prefix)

            return see

        with hooked(model, [Edge(part.name, part.module, keep(place)) for place, part in enumerate(chosen)]):
            model(x)
    return [found[place] for place in range(blocks)]


def feature_width(model: nn.Module) -> int:
    """The number of channels of every token that `token_features` returns."""
    _last_blocks(model, 1)
    backbone: Any = backbone_of(model)
    return int(backbone.num_features)


def _last_blocks(model: nn.Module, count: int) -> list[Part]:
    family, parts = family_of(model), blocks_of(model)
    if family not in _FAMILIES:
        why = anatomy_of(model).no_tokens
        raise UserError(
            f"no class and patch tokens to take from family '{family}'{f': {why}' if why else ''}. "
            f"Families that have them in every block: {', '.join(_FAMILIES)}."
        )
    if not 1 <= count <= len(parts):
        raise UserError(
            f"features of the last {count} blocks were asked for; the model has {len(parts)}, give 1 or more."
        )
    return parts[len(parts) - count :]


def _split(backbone: Any, tokens: Tensor, prefix: int) -> BlockTokens:
    # `forward`, past the hooks: those on the norm are for the model's own pass, and `extra_tokens` drops tokens there.
    normed: Tensor = backbone.norm.forward(tokens)
    patch_tokens, late = normed[:, prefix:], isinstance(backbone.norm, nn.Identity)
    registers = getattr(backbone, "reg_token", None)
    own = prefix - (registers.shape[1] if isinstance(registers, Tensor) else 0)
    if own == 0 or late:
        class_token = _pooled(backbone, normed)
    else:
        class_token = normed[:, :own].mean(1)
    return BlockTokens(
        _precise(class_token), _precise(backbone.fc_norm.forward(patch_tokens) if late else patch_tokens)
    )


def _pooled(backbone: Any, tokens: Tensor) -> Tensor:
    pooled: Tensor = backbone.forward_head(tokens, pre_logits=True)
    if pooled.dim() != 2:
        raise UserError(
            "the model has no normed class token and was built without pooling (global_pool=''), so nothing says what "
            "stands for the whole image. Build it with global_pool='avg', or as its weights were trained."
        )
    return pooled


def _precise(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))
