"""Window transformer of the codec: causal attention over the last `window` positions.

Keys and values of the last window - 1 positions are carried, so that nothing is computed twice.
Positions are absolute: the bfloat16 rounding of RoPE makes rotations only nearly relative.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from warble_mlx.codec.carry import Carry
from warble_mlx.config import TransformerConfig
from warble_mlx.layers import Block, rope_table, rotation_for


def rope_rows(positions: mx.array, head_dim: int, base: float) -> mx.array:
    """RoPE rows of int32 `positions` [...], float32 [..., head_dim / 2, (cos, sin)].

    The same values as `layers.rope_table`, but computed inside the step from positions that only
    the state knows, so there is no table that grows with the length. On the CPU, whose cosine and
    sine are accurate for long angles too; published values are met bit for bit.
    """
    with mx.stream(mx.cpu):
        pairs = mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
        frequencies = 1.0 / mx.power(mx.array(base, dtype=mx.float32), pairs)
        angles = positions.astype(mx.float32)[..., None] * frequencies
        rows = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
        return rows.astype(mx.bfloat16).astype(mx.float32)


class LayerScale(nn.Module):
    """One factor per channel, on a branch before its residual add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = mx.ones((channels,))

    def __call__(self, x: mx.array) -> mx.array:
        """[..., C] to [..., C]."""
        return x * self.gamma


class ScaledBlock(Block):
    """Transformer block with a layer scale on both branches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention_layer_scale = LayerScale(config.dim)
        self.ffn_layer_scale = LayerScale(config.dim)

    def __call__(
        self,
        x: mx.array,
        factors: tuple[mx.array, mx.array],
        mask: mx.array,
        past: int,
        carry: Carry,
    ) -> mx.array:
        """[B, T, D] to [B, T, D]; carries the last `past` keys and values, [2, B, K, past, h]."""
        attention = self.attention
        q, kv = attention.split(attention.heads(self.attention_norm(x), factors))
        kv = carry.extend(kv, past, axis=3)
        x = x + self.attention_layer_scale(attention.attend(q, kv, mask))
        return x + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x)))


class WindowTransformer(nn.Module):
    """Blocks over a sliding window, then a norm. Also carries each row's position, int32 [B]."""

    def __init__(self, config: TransformerConfig, window: int) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.layers = [ScaledBlock(config) for _ in range(config.n_layer)]
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self._table: mx.array | None = None

    def limit_positions(self, length: int) -> None:
        """Look RoPE rows up in a table of `length` positions instead of computing them.

        For steps that are exported: the computation is tied to the CPU, a table is not. Positions
        behind its end get its last row, which is wrong, so a stream has to end before.
        """
        self._table = rope_table(length, self.config.head_dim, self.config.rope_base)

    def _rope_rows(self, positions: mx.array) -> mx.array:
        if self._table is None:
            return rope_rows(positions, self.config.head_dim, self.config.rope_base)
        return self._table[mx.minimum(positions, len(self._table) - 1)]

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, T, D] to [B, T, D]. Position q sees keys max(0, q - window + 1)..q."""
        rows, length, _ = x.shape
        past = self.window - 1
        start = carry.take((rows,), mx.int32)
        carry.put(start + length)
        positions = start[:, None] + mx.arange(length)
        factors = rotation_for(self._rope_rows(positions), self.config)
        mask = self._mask(start, length)
        for layer in self.layers:
            x = layer(x, factors, mask, past, carry)
        normed: mx.array = self.norm(x)
        return normed

    def _mask(self, start: mx.array, length: int) -> mx.array:
        """Bool [B, 1, T, past + T]: slot s holds the key of position start - past + s."""
        past = self.window - 1
        slot = mx.arange(past + length)
        query = mx.arange(length)[:, None]
        band = (slot >= query) & (slot <= query + past)
        exists = start[:, None] - past + slot >= 0
        mask: mx.array = band[None, None] & exists[:, None, None]
        return mask
