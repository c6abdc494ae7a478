"""Tiny random vision transformers of transformers and torchvision, with lively weights and five classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import SwinTransformerBlockV2

__all__ = ["HUGGING_FACE", "OTHERS", "Other", "make_other", "pixels_for"]

CLASSES = 5


@dataclass(frozen=True)
class Other:
    """How to build a model, and what is known about it beforehand."""

    family: str
    build: Callable[[], nn.Module]
    heads: tuple[int, ...]
    blocks: int
    prefix: int
    takes_tokens: bool = True
    windows: bool = False


def _hugging_face(start: str, **more: Any) -> Callable[[], nn.Module]:
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    shape |= {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, **more}
    config = getattr(transformers, f"{start}Config")
    return lambda: getattr(transformers, f"{start}ForImageClassification")(config(**shape))


def _tower(start: str) -> Callable[[], nn.Module]:
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    config = getattr(transformers, f"{start}Config")

    def build() -> nn.Module:
        made = config(vision_config={**shape, "image_size": 32, "patch_size": 8}, text_config=shape, num_labels=CLASSES)
        model: nn.Module = getattr(transformers, f"{start}ForImageClassification")(made)
        return model

    return build


def _torchvision_swin(block: Any = None) -> nn.Module:
    more = {} if block is None else {"block": block}
    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, **more)


_SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}

HUGGING_FACE = {
    "vit": Other("hf-vit", _hugging_face("ViT"), (3, 3), 2, 1),
    "deit": Other("hf-deit", _hugging_face("DeiT"), (3, 3), 2, 2),
    "beit": Other("hf-beit", _hugging_face("Beit", use_relative_position_bias=True), (3, 3), 2, 1, False),
    "dinov2": Other("hf-dinov2", _hugging_face("Dinov2", mlp_ratio=2), (3, 3), 2, 1),
    "registers": Other("hf-dinov2-registers", _hugging_face("Dinov2WithRegisters", mlp_ratio=2), (3, 3), 2, 5),
    "clip": Other("hf-clip", _tower("CLIP"), (3, 3), 2, 1, False),
    "siglip": Other("hf-siglip", _tower("Siglip"), (3, 3), 2, 0),
    "swin": Other(
        "hf-swin",
        lambda: transformers.SwinForImageClassification(
            transformers.SwinConfig(image_size=32, num_labels=CLASSES, **_SWIN)
        ),
        (2, 2, 4, 4),
        4,
        0,
        False,
        True,
    ),
}
OTHERS = {
    **{f"{name}-{how}": other for name, other in HUGGING_FACE.items() for how in ("eager", "sdpa")},
    "torchvision": Other(
        "torchvision-vit", lambda: VisionTransformer(32, 8, 2, 3, 24, 32, num_classes=CLASSES), (3, 3), 2, 1
    ),
    "torchvision-swin": Other("torchvision-swin", _torchvision_swin, (2, 2, 4, 4), 4, 0, False, True),
    "torchvision-swin-v2": Other(
        "torchvision-swin", lambda: _torchvision_swin(SwinTransformerBlockV2), (2, 2, 4, 4), 4, 0, False, True
    ),
}
"""By name; those of transformers with each implementation of attention."""


def make_other(name: str) -> nn.Module:
    """The model in eval mode and float64, for comparisons down to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OTHERS[name].build()
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "mask_token" not in key:
                fan = parameter[0].numel() if key.endswith("weight") else 4
                attends = any(part in key for part in ("q_proj", "k_proj", "in_proj", "qkv"))
                nn.init.normal_(parameter, std=((6.0 if attends else 2.0) / fan) ** 0.5)
    how = name.rpartition("-")[2]
    if how in ("eager", "sdpa"):
        model.set_attn_implementation(how)
    return model.eval().double()


def pixels_for(batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
