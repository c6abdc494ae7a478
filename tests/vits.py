"""Tiny timm models of every family with lively weights: fresh ones attend almost uniformly and would hide mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.backbones.timm_models import create_backbone

__all__ = ["VITS", "Tiny", "make_vit", "pixels", "precise_vit"]


@dataclass(frozen=True)
class Tiny:
    """How to build a tiny model, and what is known about it beforehand."""

    family: str
    timm_name: str
    settings: dict[str, Any]
    heads: tuple[int, ...]
    """Of every softmax attention, in running order."""

    blocks: int
    prefix: int
    size: int = 32
    other_softmaxes: int = 0
    """In gates of channels and in class attention that is not counted: of no interest to instruments."""


def _plain(**more: Any) -> dict[str, Any]:
    return {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, **more}


_SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
_HYBRID = {"stem_dims": (8, 16), "stem_depths": (1, 1)}
_RVT = {"img_size": 32, "patch_size": 8, "depths": (1, 2), "widths": (24, 48), "heads": (3, 6), "scaled_blocks": 2}
_LEVIT = {"img_size": 64, "embed_dim": (64, 96), "num_heads": (2, 3), "depth": (1, 1), "key_dim": 8}

VITS = {
    "vit": Tiny("vit", "vit_tiny_patch16_224", _plain(), (3, 3), 2, 1),
    "deit_distilled": Tiny("vit", "deit_tiny_distilled_patch16_224", _plain(), (3, 3), 2, 2),
    "deit3": Tiny("vit", "deit3_small_patch16_224", _plain(), (3, 3), 2, 1),
    "dinov2": Tiny("vit", "vit_small_patch14_dinov2", _plain(), (3, 3), 2, 1),
    "dinov2_registers": Tiny("vit", "vit_small_patch14_reg4_dinov2", _plain(), (3, 3), 2, 5),
    "clip": Tiny("vit", "vit_base_patch16_clip_224", _plain(), (3, 3), 2, 1),
    "siglip": Tiny("vit", "vit_base_patch16_siglip_224", _plain(), (3, 3, 3), 2, 0),
    "parallel": Tiny("vit", "vit_small_patch16_18x2_224", _plain(), (3, 3, 3, 3), 2, 1),
    "eva02": Tiny("eva", "eva02_tiny_patch14_224", _plain(), (3, 3), 2, 1),
    "dinov3": Tiny("eva", "vit_small_patch16_dinov3", _plain(), (3, 3), 2, 5),
    "beit": Tiny("beit", "beit_base_patch16_224", _plain(), (3, 3), 2, 1),
    "pit": Tiny(
        "pit",
        "pit_ti_224",
        {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (8, 8), "depth": (1, 2), "heads": (2, 4)},
        (2, 4, 4),
        3,
        1,
    ),
    "cait": Tiny("cait", "cait_xxs24_224", _plain(), (3, 3, 3, 3), 4, 0),
    "xcit": Tiny("xcit", "xcit_nano_12_p16_224", _plain(), (3, 3, 3, 3), 4, 0),
    "swin": Tiny("swin", "swin_tiny_patch4_window7_224", {**_SWIN, "patch_size": 4}, (2, 2, 4, 4), 4, 0),
    "swinv2": Tiny("swinv2", "swinv2_tiny_window8_256", {**_SWIN, "patch_size": 4}, (2, 2, 4, 4), 4, 0),
    "levit": Tiny("levit", "levit_128s", _LEVIT, (2, 8, 3), 3, 0, size=64),
    "levit_conv": Tiny("levit", "levit_conv_128s", _LEVIT, (2, 8, 3), 3, 0, size=64),
    "fan": Tiny("fan", "fan_tiny_12_p16_224", _plain(), (3, 3), 2, 0, other_softmaxes=6),
    "fan_hybrid": Tiny("fan", "fan_tiny_8_p4_hybrid", _plain(**_HYBRID), (3, 3), 2, 0, other_softmaxes=6),
    "convstem": Tiny("vit", "convstem_vit_small", _plain(stem=((6, 2), (8, 2), (16, 2))), (3, 3), 2, 1),
    "rvt": Tiny("rvt", "rvt_tiny_plus", _RVT, (3, 6, 6), 3, 0),
}


def make_vit(name: str, fused: bool | None = None, seed: int = 0, classes: int = 5, **settings: Any) -> nn.Module:
    """The model in eval mode; `fused` switches fused attention where there is any, None leaves timm's choice."""
    tiny = VITS[name]
    model = create_backbone(tiny.timm_name, classes, {**tiny.settings, **settings})
    _enliven(model, torch.Generator().manual_seed(seed))
    if fused is not None:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused  # type: ignore[assignment]
    return model.eval()


def pixels(name: str, batch: int = 2, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    size = VITS[name].size
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def precise_vit(name: str, fused: bool | None = None, **settings: Any) -> tuple[nn.Module, Tensor]:
    """Model and pixels in float64, for comparisons down to rounding."""
    return make_vit(name, fused, **settings).double(), pixels(name, dtype=torch.float64)


def _enliven(model: nn.Module, source: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=source)
            if name.endswith(("temperature", "logit_scale")):
                parameter.copy_(1.5 + 0.3 * noise)
            elif parameter.dim() >= 2 and name.endswith("weight"):
                attends = any(part in name for part in (".qkv.", ".q.", ".k.", ".kv."))
                parameter.copy_(noise * ((6.0 if attends else 2.0) / parameter[0].numel()) ** 0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(0.5 * noise)  # position embeddings and biases, class tokens
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(0.8 + 0.2 * noise)  # norm weights and layer scales
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=source))
