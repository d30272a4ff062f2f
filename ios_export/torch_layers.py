"""Transformer blocks in PyTorch for tracing: the arithmetic of `layers`, Core ML's operations.

Attention is written out (two products and a softmax) instead of one fused operation, and the query
heads that share a key head are folded into its positions, so that keys are never repeated. Masks
are added and finite: minus infinity becomes a NaN in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from warble_mlx.config import TransformerConfig
from warble_mlx.layers import rope_table

MASKED = -1e4

Weights = Callable[[str], npt.NDArray[np.float32]]
"""Name in a bundle's file -> float32 values in the bundle's layout."""


def below(weights: Weights, place: str) -> Weights:
    """The same weights by their names below `place`."""
    return lambda name: weights(place + name)


def rope_tables(length: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The runtime's cosines and sines, rounded as it rounds them, each [length, head_dim / 2]."""
    table = np.array(rope_table(length, head_dim, base))
    return torch.from_numpy(table[..., 0].copy()), torch.from_numpy(table[..., 1].copy())


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, weight: npt.NDArray[np.float32], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight.copy()))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.eps) * self.weight


def linear(weights: Weights, name: str, bias: str | None = None) -> nn.Linear:
    """A Linear from `name`.weight [out, in], and `bias` if one is named."""
    weight = weights(f"{name}.weight")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = nn.Parameter(torch.from_numpy(weight.copy()))
    if bias is not None:
        module.bias = nn.Parameter(torch.from_numpy(weights(bias).copy()))
    return module


class Attention(nn.Module):
    """Grouped-query attention over keys and values that the caller keeps."""

    def __init__(self, config: TransformerConfig, weights: Weights) -> None:
        super().__init__()
        self.config = config
        bias = "attention.wqkv.bias" if config.qkv_bias else None
        self.wqkv = linear(weights, "attention.wqkv", bias)
        self.wo = linear(weights, "attention.wo", "attention.wo.bias" if config.o_bias else None)

    def heads(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [1, H, T, h], keys and values [1, K, T, h] of x [1, T, D]; queries and keys
        turned by cos and sin [T, h / 2]."""
        c = self.config
        length = x.shape[1]
        sizes = [c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim]
        parts = torch.split(self.wqkv(x), sizes, -1)
        q, k, v = (
            part.view(1, length, size // c.head_dim, c.head_dim).transpose(1, 2)
            for part, size in zip(parts, sizes, strict=True)
        )
        return _turn(q, cos, sin), _turn(k, cos, sin), v

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of q [1, H, T, h] over [1, K, S, h] with an added mask [T, S], and the output
        projection: [1, T, D]."""
        c = self.config
        length, group = q.shape[2], c.n_head // c.n_kv_head
        folded = q.reshape(1, c.n_kv_head, group * length, c.head_dim)
        scores = torch.matmul(folded, keys.transpose(-1, -2)) * (1 / math.sqrt(c.head_dim))
        if mask is not None:
            shape = (c.n_kv_head, group, length, keys.shape[2])
            scores = (scores.view(shape) + mask).view(1, c.n_kv_head, group * length, -1)
        found = torch.matmul(torch.softmax(scores, -1), values)
        found = found.view(1, c.n_head, length, c.head_dim).transpose(1, 2)
        result: torch.Tensor = self.wo(found.reshape(1, length, c.n_head * c.head_dim))
        return result


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            linear(weights, f"feed_forward.{name}") for name in ("w1", "w2", "w3")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """The parts of one pre-norm block; the caller runs them."""

    def __init__(self, config: TransformerConfig, weights: Weights) -> None:
        super().__init__()
        self.attention = Attention(config, weights)
        self.feed_forward = FeedForward(weights)
        self.attention_norm = RMSNorm(weights("attention_norm.weight"), config.norm_eps)
        self.ffn_norm = RMSNorm(weights("ffn_norm.weight"), config.norm_eps)
