"""RoPE, attention and SwiGLU, shared by the slow AR, the fast AR and the codec's transformers.

Shapes use B rows, T positions, H query heads, K key/value heads, h = head_dim, S cache slots.
Every function takes and returns arrays only, so that whole steps can be traced once.

Two exact rewritings of the reference keep the number of kernels per block low:

* queries, keys and values come out of one projection and are rotated by one elementwise
  expression, in which value heads meet the identity (see `rotation_for`);
* the bias of that projection is added inside the same expression.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx.config import TransformerConfig
from warble_mlx.errors import WarbleError


def rope_table(length: int, head_dim: int, base: float) -> mx.array:
    """RoPE table, float32 [length, head_dim / 2, (cos, sin)], rounded to bfloat16.

    Angle of position t and pair j: t * base ** (-2 j / head_dim), in float32. The reference
    stores cosine and sine in bfloat16 and multiplies by those, whatever the model's dtype, so
    the rounding is part of the model. Cosine and sine of the float32 angle are NumPy's, in
    float64: then the values equal the reference's bit for bit. MLX's are float32 even of a
    float64 argument, and after rounding one of 131,072 is off by a bfloat16 step.
    """
    with mx.stream(mx.cpu):
        pairs = mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
        frequencies = 1.0 / mx.power(mx.array(base, dtype=mx.float32), pairs)
        angles = mx.arange(length, dtype=mx.float32)[:, None] * frequencies[None]
        exact = np.array(angles).astype(np.float64)
        values = np.stack([np.cos(exact), np.sin(exact)], axis=-1).astype(np.float32)
        table = mx.array(values).astype(mx.bfloat16).astype(mx.float32)
        mx.eval(table)
    check_rope_table(table)
    return table


def check_rope_table(table: mx.array) -> None:
    """Raise WarbleError unless `table` [length, h / 2, 2] looks like cosines and sines.

    A table of zeros or of uninitialised memory gives plausible, wrong codes that no statistic
    reveals, so it is looked at here.
    """
    with mx.stream(mx.cpu):
        norm = mx.square(table).sum(axis=-1)
        # bfloat16 keeps 8 bits: each factor is off by at most 2**-9 of itself.
        good = (mx.abs(norm - 1) < 2**-7).all() & (table[0] == mx.array([1.0, 0.0])).all()
        if not good.item():
            raise WarbleError(
                "a RoPE table does not hold cosines and sines: this MLX build computes wrong"
                " values; run `warble doctor`, or install another MLX version"
            )


def rotation_for(rows: mx.array, config: TransformerConfig) -> tuple[mx.array, mx.array]:
    """Turn RoPE table rows [..., h / 2, 2] into the two factors that `rotate` multiplies by.

    Returns two float32 arrays [..., H + 2 K, h / 2, 2] for the joint qkv projection: the factor
    of a pair's first and of its second element. Value heads get the identity.
    """
    cos, sin = rows[..., None, :, 0:1], rows[..., None, :, 1:2]
    first = mx.concatenate([cos, sin], axis=-1)
    second = mx.concatenate([-sin, cos], axis=-1)
    heads = config.n_head + 2 * config.n_kv_head
    turned = (mx.arange(heads) < config.n_head + config.n_kv_head)[:, None, None]
    return (
        mx.where(turned, first, mx.array([1.0, 0.0])),
        mx.where(turned, second, mx.array([0.0, 1.0])),
    )


def rotate(x: mx.array, factors: tuple[mx.array, mx.array]) -> mx.array:
    """Interleaved RoPE on pairs (x[2 j], x[2 j + 1]), in float32, cast back to x's dtype.

    `x` is [..., heads, h / 2, 2]; `factors` come from `rotation_for`, of a shape that broadcasts.
    """
    first, second = factors
    even, odd = x[..., 0:1].astype(mx.float32), x[..., 1:2].astype(mx.float32)
    return (even * first + odd * second).astype(x.dtype)


def project(linear: nn.Module, x: mx.array) -> mx.array:
    """x [..., in] times the weight of a (quantised) Linear, [..., out], without its bias."""
    weight: mx.array = linear["weight"]
    if not isinstance(linear, nn.QuantizedLinear):
        return x @ weight.T
    return mx.quantized_matmul(
        x,
        weight,
        scales=linear["scales"],
        biases=linear.get("biases"),
        transpose=True,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )


class Attention(nn.Module):
    """Causal grouped-query attention over a cache that the caller owns."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.wqkv = nn.Linear(config.dim, config.qkv_rows, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_head * config.head_dim, config.dim, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def queries_and_kv(
        self, x: mx.array, factors: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Rotated queries [B, H, T, h], and keys above values [B, 2 K, T, h], of x [B, T, D]."""
        c = self.config
        rows, length, _ = x.shape
        qkv = project(self.wqkv, x)
        if "bias" in self.wqkv:
            qkv = qkv + self.wqkv["bias"]
        heads = qkv.reshape(rows, length, c.n_head + 2 * c.n_kv_head, c.head_dim)
        if c.qk_norm:
            q, k, v = mx.split(heads, [c.n_head, c.n_head + c.n_kv_head], axis=2)
            heads = mx.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
        pairs = heads.reshape(*heads.shape[:-1], c.head_dim // 2, 2)
        heads = rotate(pairs, factors).reshape(heads.shape).swapaxes(1, 2)
        return heads[:, : c.n_head], heads[:, c.n_head :]

    def attend(self, q: mx.array, kv: mx.array, mask: mx.array | None) -> mx.array:
        """Attention of q [B, H, T, h] over kv [B, 2 K, S, h], then the output projection.

        `mask` broadcasts to [B, H, T, S], True = attend; every query must see a key. [B, T, D].
        """
        c = self.config
        out = mx.fast.scaled_dot_product_attention(
            q,
            kv[:, : c.n_kv_head],
            kv[:, c.n_kv_head :],
            scale=1 / math.sqrt(c.head_dim),
            mask=mask,
        )
        rows, _, length, _ = q.shape
        out = project(self.wo, out.swapaxes(1, 2).reshape(rows, length, -1))
        return out + self.wo["bias"] if "bias" in self.wo else out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), with w1 and w3 as one matrix (rows of w1 first)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, value = mx.split(project(self.w13, x), 2, axis=-1)
        return project(self.w2, nn.silu(gate) * value)


class Block(nn.Module):
    """One pre-norm transformer block. The caller runs its parts, see `dual_ar` and the codec."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
