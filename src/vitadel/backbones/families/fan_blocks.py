"""The block of FAN (Zhou et al., ICML 2022, arXiv:2204.12451): attention over tokens, then a gate over channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import DropPath, use_fused_attn
from timm.models.xcit import LPI
from torch import Tensor, nn

__all__ = ["ChannelProcessing", "ConvMlp", "FanBlock", "TokenAttention"]


class TokenAttention(nn.Module):
    """Multi-head self-attention with queries of one projection and keys and values of another."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.0, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.fused_attn = use_fused_attn()
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            maps = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
            mixed = self.attn_drop(maps) @ v
        out: Tensor = self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return out


class ConvMlp(nn.Module):
    """An MLP whose only nonlinearity is a local one: depthwise convolutions over the grid of tokens, with a skip."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.local = LPI(hidden)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        hidden = self.fc1(x)
        hidden = self.gamma * self.local(hidden, *grid) + hidden
        out: Tensor = self.drop(self.fc2(self.drop(hidden)))
        return out


class ChannelProcessing(nn.Module):
    """The MLP's output, each channel times a gate: how alike the channel's and its head's share of tokens are.

    Equation 7 of the paper, of linear cost; the matrix of channels by channels of equation 6 is not what was trained.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1))
        self.mlp = ConvMlp(dim, int(dim * mlp_ratio), drop)
        self.norm_v = nn.LayerNorm(dim, eps=1e-6)

    def gate(self, x: Tensor) -> Tensor:
        """(batch, tokens, channels) -> (batch, 1, channels)."""
        q = self.q(x).softmax(dim=1).unflatten(-1, (self.num_heads, -1))
        k = x.softmax(dim=1).unflatten(-1, (self.num_heads, -1)).mean(dim=-1, keepdim=True)
        alike: Tensor = (q * k).sum(dim=1, keepdim=True)
        return (alike.sigmoid() * self.temperature).flatten(2)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        out: Tensor = self.gate(x) * self.norm_v(self.mlp(x, grid))
        return out


class FanBlock(nn.Module):
    """Token attention and channel processing, each on a residual branch with a scale per channel."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = TokenAttention(dim, num_heads, attn_drop, proj_drop)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.channels = ChannelProcessing(dim, num_heads, mlp_ratio, proj_drop)
        self.gamma2 = nn.Parameter(torch.ones(dim))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.gamma1 * self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.gamma2 * self.channels(self.norm2(x), grid))
        return out
