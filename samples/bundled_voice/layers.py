"""Transformer pieces that the codec and the DualAR share, with the published names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rope_table(length: int, width: int, base: float) -> Tensor:
    """cos and sin as the runtime multiplies them, rounded to bfloat16: [length, width / 2, 2]."""
    frequency = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
    phase = torch.arange(length).float()[:, None] * frequency
    return torch.stack((phase.cos(), phase.sin()), -1).bfloat16().float()


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs. x: [batch, time, heads, width];
    rope: [time, width / 2, 2]."""
    cosine, sine = rope[:, None].unbind(-1)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1)
    return turned.flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, out: torch.dtype | None = None) -> Tensor:
        """Normalised in float32, given back as `out` or as x came."""
        kind = out or x.dtype
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return normed.to(kind) * self.weight.to(kind)


class Attention(nn.Module):
    """Grouped-query attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, groups: int, head: int, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, head
        self.wqkv = nn.Linear(width, (heads + 2 * groups) * head, bias=bias)
        self.wo = nn.Linear(heads * head, width, bias=False)

    def split(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [batch, heads or groups, time, head]."""
        mixed = self.wqkv(x).unflatten(-1, (self.heads + 2 * self.groups, self.head))
        turned = rotated(mixed[:, :, : self.heads + self.groups], rope)
        queries, keys = turned[:, :, : self.heads], turned[:, :, self.heads :]
        values = mixed[:, :, self.heads + self.groups :]
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """mask: True where a query may look, or None for causal."""
        repeat = self.heads // self.groups
        if repeat > 1:
            keys = keys.repeat_interleave(repeat, 1)
            values = values.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
