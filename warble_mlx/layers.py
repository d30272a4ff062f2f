"""RoPE, attention and SwiGLU, shared by the slow AR, the fast AR and the codec's transformers.

Shapes use B rows, T positions, H query heads, K key/value heads, h = head_dim, S cache slots.
Every function takes and returns arrays only, so that whole steps can be traced once.

Exact rewritings of the reference keep the number of kernels per block low:

* queries, keys and values come out of one projection; its bias is added and RoPE applied in one
  elementwise expression, in which value heads meet the identity (see `rotation_for`);
* with one position, the query heads that share a key head are given to the attention kernel as
  positions of that head (see `Attention.mix`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx import cuda_kernels
from warble_mlx.config import TransformerConfig
from warble_mlx.errors import WarbleError


def rope_table(length: int, head_dim: int, base: float) -> mx.array:
    """RoPE table, float32 [length, head_dim / 2, (cos, sin)], rounded to bfloat16.

    Angle of position t and pair j: t * base ** (-2 j / head_dim). The reference stores cosine
    and sine in bfloat16 and multiplies by those, whatever the model's dtype, so the rounding is
    part of the model. To equal its table bit for bit, frequencies and angles are rounded to
    float32 and the rest is done by NumPy in float64: MLX's functions are float32 even of a
    float64 argument, and a last bit can flip a bfloat16 rounding.
    """
    exponents = np.arange(0, head_dim, 2) / head_dim
    frequencies = np.float32(1) / np.power(float(base), exponents).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
    exact = np.stack([np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)], axis=-1)
    table = mx.array(exact.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)
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


@lru_cache(maxsize=64)
def places(length: int) -> mx.array:
    """0 … length - 1, int32. Kept, so that a traced step holds it as a constant."""
    result = mx.arange(length)
    mx.eval(result)
    return result


def entry(x: mx.array, index: int) -> mx.array:
    """x[index] along the first axis as a view; indexing by a number would copy (a gather)."""
    return x[index : index + 1].squeeze(0)


def side_by_side(values: list[mx.array]) -> mx.array:
    """Arrays [B] as columns [B, n]: elementwise, so that it is one kernel and not n copies."""
    place = places(len(values))
    row = values[0][:, None]
    for i, value in enumerate(values[1:], 1):
        row = mx.where(place < i, row, value[:, None])
    return row


def rotation_for(rows: mx.array, config: TransformerConfig) -> tuple[mx.array, mx.array]:
    """Turn RoPE table rows [..., h / 2, 2] into the two factors that `rotate` multiplies by.

    Returns two float32 arrays [..., H + 2 K, h / 2, 2] for the joint qkv projection: the factor
    of a pair's first and of its second element. Value heads get the identity. Elementwise only,
    so that it melts into the expression that uses it.
    """
    first = rows[..., None, :, :]
    cos, sin = first[..., 0:1], first[..., 1:2]
    lane = places(2)
    second = mx.where(lane == 0, -sin, cos)
    heads = places(config.n_head + 2 * config.n_kv_head)
    turned = (heads < config.n_head + config.n_kv_head)[:, None, None]
    one, other = (lane == 0).astype(mx.float32), (lane == 1).astype(mx.float32)
    return mx.where(turned, first, one), mx.where(turned, second, other)


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


def add_norm(x: mx.array, y: mx.array, norm: nn.Module) -> tuple[mx.array, mx.array]:
    """The residual sum x + y and its RMSNorm, both [..., D]."""
    if cuda_kernels.available():
        return cuda_kernels.add_norm(x, y, norm["weight"], norm.eps)
    total = x + y
    return total, norm(total)


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

    def heads(self, x: mx.array, factors: tuple[mx.array, mx.array]) -> mx.array:
        """Queries, keys and values of x [B, T, D], rotated: [B, T, H + 2 K, h / 2, 2]."""
        c = self.config
        shape = (c.n_head + 2 * c.n_kv_head, c.head_dim // 2, 2)
        pairs = project(self.wqkv, x).reshape(*x.shape[:2], *shape)
        if "bias" in self.wqkv:
            pairs = pairs + self.wqkv["bias"].reshape(shape)
        if c.qk_norm:
            heads = pairs.reshape(*x.shape[:2], shape[0], c.head_dim)
            q, k, v = mx.split(heads, [c.n_head, c.n_head + c.n_kv_head], axis=2)
            heads = mx.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
            pairs = heads.reshape(pairs.shape)
        return rotate(pairs, factors)

    def split(self, pairs: mx.array) -> tuple[mx.array, mx.array]:
        """Queries [B, H, T, h], and keys above values [2, B, K, T, h], of what `heads` returns."""
        c = self.config
        rows, length = pairs.shape[:2]
        q = pairs[:, :, : c.n_head].reshape(rows, length, c.n_head, c.head_dim)
        kv = pairs[:, :, c.n_head :].reshape(rows, length, 2, c.n_kv_head, c.head_dim)
        return q.swapaxes(1, 2), kv.transpose(2, 0, 3, 1, 4)

    def project_out(self, out: mx.array) -> mx.array:
        """What the heads found, [B, T, H * h], to [B, T, D]."""
        out = project(self.wo, out)
        return out + self.wo["bias"] if "bias" in self.wo else out

    def attend(self, q: mx.array, kv: mx.array, mask: mx.array | str | None) -> mx.array:
        """Attention of q [B, H, T, h] over kv [2, B, K, S, h], and the output projection.

        `mask`: None, "causal", or an array that broadcasts to [B, 1, T, S], bool (True = attend)
        or added to the scores; every query must see a key. Returns [B, T, D].
        """
        return self.project_out(self.mix(q, kv, mask))

    def mix(self, q: mx.array, kv: mx.array, mask: mx.array | str | None) -> mx.array:
        """What the heads find, [B, T, H * h]: `attend` before its output projection.

        With T = 1 the H / K query heads that share a key head become its positions: the same
        sums, and a shape for which MLX has a masked kernel on every backend.
        """
        c = self.config
        rows, _, length, _ = q.shape
        if length == 1:
            q = q.reshape(rows, c.n_kv_head, c.n_head // c.n_kv_head, c.head_dim)
        out = mx.fast.scaled_dot_product_attention(
            q, entry(kv, 0), entry(kv, 1), scale=1 / math.sqrt(c.head_dim), mask=mask
        )
        if length > 1:
            out = out.swapaxes(1, 2)
        return out.reshape(rows, length, -1)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), with w1 and w3 as one matrix (rows of w1 first)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w13 = nn.Linear(config.dim, 2 * config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return project(self.w2, self.gated(x))

    def gated(self, x: mx.array) -> mx.array:
        """What w2 is given, silu(w1 x) * w3 x: [..., D] to [..., ffn]."""
        gate, value = mx.split(project(self.w13, x), 2, axis=-1)
        gated: mx.array = nn.silu(gate) * value
        return gated


class Block(nn.Module):
    """One pre-norm transformer block. The caller runs its parts, see `dual_ar` and the codec."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
