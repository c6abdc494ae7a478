"""Tiny random vision transformers of transformers and torchvision, with lively weights and five classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2

__all__ = ["HUGGING_FACE", "OTHERS", "Other", "last_layer", "make_other", "one_of_each_family", "pixels_for"]

CLASSES = 5

Build = Callable[[int, float], nn.Module]
"""From the number of classes and a rate of dropout."""


@dataclass(frozen=True)
class Other:
    """How to build a model, and what is known about it beforehand."""

    family: str
    build: Build
    heads: tuple[int, ...]
    blocks: int
    prefix: int
    takes_tokens: bool = True
    windows: bool = False


_SHAPE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}


def _hugging_face(start: str, shape: dict[str, Any] = _SHAPE, **more: Any) -> Build:
    def build(classes: int, dropout: float) -> nn.Module:
        places = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
        drops = dict.fromkeys(places, dropout)
        settings = {"image_size": 32, "patch_size": 8, "num_labels": classes, **shape, **drops, **more}
        config = getattr(transformers, f"{start}Config")(**settings)
        model: nn.Module = getattr(transformers, f"{start}ForImageClassification")(config)
        return model

    return build


def _tower(start: str) -> Build:
    def build(classes: int, dropout: float) -> nn.Module:
        seen = {**_SHAPE, "image_size": 32, "patch_size": 8, "attention_dropout": dropout}
        config = getattr(transformers, f"{start}Config")(vision_config=seen, text_config=_SHAPE, num_labels=classes)
        model: nn.Module = getattr(transformers, f"{start}ForImageClassification")(config)
        return model

    return build


def _torchvision(classes: int, dropout: float) -> nn.Module:
    return VisionTransformer(32, 8, 2, 3, 24, 32, dropout, dropout, num_classes=classes)


def _torchvision_swin(block: Any = SwinTransformerBlock) -> Build:
    def build(classes: int, dropout: float) -> nn.Module:
        drops = {"dropout": dropout, "stochastic_depth_prob": dropout}
        return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=classes, block=block, **drops)

    return build


_SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_WINDOWED = {"heads": (2, 2, 4, 4), "blocks": 4, "prefix": 0, "takes_tokens": False, "windows": True}

HUGGING_FACE = {
    "vit": Other("hf-vit", _hugging_face("ViT"), (3, 3), 2, 1),
    "deit": Other("hf-deit", _hugging_face("DeiT"), (3, 3), 2, 2),
    "beit": Other("hf-beit", _hugging_face("Beit", use_relative_position_bias=True), (3, 3), 2, 1, False),
    "dinov2": Other("hf-dinov2", _hugging_face("Dinov2", mlp_ratio=2), (3, 3), 2, 1),
    "registers": Other("hf-dinov2-registers", _hugging_face("Dinov2WithRegisters", mlp_ratio=2), (3, 3), 2, 5),
    "clip": Other("hf-clip", _tower("CLIP"), (3, 3), 2, 1, False),
    "siglip": Other("hf-siglip", _tower("Siglip"), (3, 3), 2, 0),
    "swin": Other("hf-swin", _hugging_face("Swin", _SWIN), **_WINDOWED),
}
OTHERS = {
    **{f"{name}-{how}": other for name, other in HUGGING_FACE.items() for how in ("eager", "sdpa")},
    "torchvision": Other("torchvision-vit", _torchvision, (3, 3), 2, 1),
    "torchvision-swin": Other("torchvision-swin", _torchvision_swin(), **_WINDOWED),
    "torchvision-swin-v2": Other("torchvision-swin", _torchvision_swin(SwinTransformerBlockV2), **_WINDOWED),
}
"""By name; those of transformers with each implementation of attention."""


def one_of_each_family(turn: int) -> list[str]:
    """A model of every family; those of transformers with eager attention, or fused, by turns."""
    how = [("eager", "sdpa")[(turn + row) % 2] for row in range(len(HUGGING_FACE))]
    named = [f"{name}-{each}" for name, each in zip(HUGGING_FACE, how, strict=True)]
    return [*named, *(name for name in OTHERS if name.startswith("torchvision"))]


def make_other(name: str, classes: int = CLASSES, dropout: float = 0.0) -> nn.Module:
    """The model in eval mode and float64, for comparisons down to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OTHERS[name].build(classes, dropout)
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


def last_layer(model: nn.Module) -> nn.Linear:
    """The layer that gives the logits."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
