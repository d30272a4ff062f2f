"""Rotary position embedding: pairs (x[2j], x[2j + 1]), tables rounded to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(length: int, head_dim: int, base: float) -> Tensor:
    """Cosine and sine of positions 0..length - 1: float32 [length, head_dim / 2, 2].

    Frequencies base ** (-2j / head_dim) and angles are float32; the values are rounded to bfloat16
    whatever the model's dtype, which is part of the model. Always computed on the CPU, so that a
    GPU multiplies by the same numbers.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / base**exponents
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return table.to(torch.bfloat16).to(torch.float32)


def rotate(x: Tensor, rows: Tensor) -> Tensor:
    """Turn x [B, heads, T, h] by table rows [B or 1, T, h / 2, 2], in float32, cast back."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rows[:, None].unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
