"""The two transformers of arktts: modules and their passes, no loop and no sampling.

Shapes: B rows, T positions, D = dim, C = codebook_size, S cache slots, K key/value heads.

The slow AR reads packed columns (a text or semantic id and ten codes) and keeps one KV cache
per layer, [2, B, K, S, h], keys first, then values. Where a row's columns lie in its cache is
told per row by `slot`, the first slot to write, and `hole`, a pair of slots [begin, end) that
hold nothing (padding). RoPE positions count real columns only: slot - (end - begin).

The fast AR sees ten positions per frame: the slow AR's output, then the codes c0..c8. Its cache
is what the joint projection gave for each of them, [B, 10, H + 2 K, h / 2, 2] per layer: the
rotation and the write into the cache are then one elementwise expression.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx import cuda_kernels
from warble_mlx.config import ModelConfig
from warble_mlx.layers import Block, add_norm, places, project, rope_table, rotation_for


class Columns(nn.Module):
    """An embedding table. Rows are cast when they are read, so that it can stay 16-bit."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = mx.zeros((rows, dim))


class DualAR(nn.Module):
    """Weights of both transformers, under the checkpoint's names (w1 and w3 joined as w13)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        slow, fast = config.slow, config.fast
        self.config = config
        self.embeddings = Columns(config.vocab_size, slow.dim)
        self.codebook_embeddings = Columns(config.codebook_size * config.num_codebooks, slow.dim)
        self.layers = [Block(slow) for _ in range(slow.n_layer)]
        self.norm = nn.RMSNorm(slow.dim, eps=slow.norm_eps)
        if fast.dim != slow.dim:
            self.fast_project_in = nn.Linear(slow.dim, fast.dim)
        self.fast_embeddings = Columns(config.codebook_size, fast.dim)
        self.fast_layers = [Block(fast) for _ in range(fast.n_layer)]
        self.fast_norm = nn.RMSNorm(fast.dim, eps=fast.norm_eps)
        self.fast_output = nn.Linear(fast.dim, config.codebook_size, bias=False)

    def prepare(self, dtype: mx.Dtype) -> None:
        """Derive what is not stored: RoPE tables, the output head, per-codebook row offsets.

        `dtype` is that of activations. The head is [C + 1, D]: the embedding rows of the
        semantic tokens, then EOS. No other row can ever be chosen, so nothing else is computed.
        """
        c = self.config
        table = self.embeddings.weight
        self._dtype = dtype
        self._head = mx.concatenate(
            [
                table[c.semantic_begin_id : c.semantic_end_id + 1],
                table[c.eos_token_id : c.eos_token_id + 1],
            ]
        ).astype(dtype)
        self._slow_rope = rope_table(c.max_seq_len, c.slow.head_dim, c.slow.rope_base)
        fast_rope = rope_table(c.num_codebooks, c.fast.head_dim, c.fast.rope_base)
        self._fast_rotation = rotation_for(fast_rope, c.fast)
        self._book_rows = places(c.num_codebooks) * c.codebook_size
        slot = places(c.num_codebooks)[:, None, None, None]
        self._fast_slots = [slot == p for p in range(c.num_codebooks)]
        mx.eval(self._head, self._slow_rope, self._fast_rotation, self._book_rows, self._fast_slots)

    # ------------------------------------------------------------------ slow AR

    def embed(self, columns: mx.array) -> mx.array:
        """Packed columns [B, 11, T] (int32) to embeddings [B, T, D].

        Row 0 is a text or semantic id; at semantic ids the rows of all ten codes are added.
        """
        c = self.config
        ids, codes = columns[:, 0], columns[:, 1:].swapaxes(1, 2)
        text = self.embeddings.weight[ids].astype(self._dtype)
        voiced = (ids >= c.semantic_begin_id) & (ids <= c.semantic_end_id)
        return text + mx.where(voiced[..., None], self._sum_of_codes(codes), 0).astype(self._dtype)

    def embed_frame(self, semantic: mx.array, codes: mx.array) -> mx.array:
        """Embedding [B, 1, D] of a generated frame: semantic index [B] (C = EOS), codes [B, 10]."""
        return (self._head[semantic] + self._sum_of_codes(codes).astype(self._dtype))[:, None]

    def _sum_of_codes(self, codes: mx.array) -> mx.array:
        rows = self.codebook_embeddings.weight[codes + self._book_rows]
        return rows.astype(mx.float32).sum(axis=-2).astype(self._dtype)

    def advance(
        self, x: mx.array, slot: mx.array, hole: mx.array, caches: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """Run the slow AR over T new positions.

        x [B, T, D]; slot [B] int32, where the first of them goes; hole [B, 2] int32; caches one
        [2, B, K, S, h] per layer. Returns the last layer's output [B, T, D], before the final
        norm, and the caches with the new keys and values.
        """
        rows, length, _ = x.shape
        slots = caches[0].shape[3]
        query = slot[:, None] + places(length)
        factors = rotation_for(self._slow_rope[self._positions(query, hole)], self.config.slow)
        in_one_kernel = length == 1 and cuda_kernels.can_attend(self.config.slow)
        mask = None if in_one_kernel else self._mask(query, hole, slots, x.dtype)
        written = self._cache_rows(rows, slots)[..., None] + query[:, None]
        written = written.reshape(-1)
        updated = []
        normed = self.layers[0].attention_norm(x)
        following = [block.attention_norm for block in self.layers[1:]]
        for block, cache, norm in zip(self.layers, caches, [*following, None], strict=True):
            attention = block.attention
            pairs = attention.heads(normed, factors)
            q, kv = attention.split(pairs)
            # A new handle: assignment to it leaves the caller's cache alone. The memory is
            # still written in place once nobody else holds the old array.
            flat = cache.reshape(-1, cache.shape[-1])[...]
            flat[written] = kv.reshape(-1, cache.shape[-1])
            cache = flat.reshape(cache.shape)
            updated.append(cache)
            if in_one_kernel:
                found = cuda_kernels.attend_cached(pairs, cache, slot, hole, self.config.slow)
                attended = attention.project_out(found)
            else:
                attended = attention.attend(q, cache, mask)
            x, normed = add_norm(x, attended, block.ffn_norm)
            fed = block.feed_forward(normed)
            if norm is None:
                x = x + fed
            else:
                x, normed = add_norm(x, fed, norm)
        return x, updated

    def _positions(self, query: mx.array, hole: mx.array) -> mx.array:
        """RoPE positions of cache slots query [B, T]: real columns only are counted."""
        begin, end = hole[:, 0:1], hole[:, 1:2]
        position = query - mx.where(query >= end, end - begin, 0)
        # Padding columns and finished rows get some position; nothing real ever looks at them.
        return mx.clip(position, 0, self.config.max_seq_len - 1)

    def _mask(self, query: mx.array, hole: mx.array, slots: int, dtype: mx.Dtype) -> mx.array:
        """What is added to the scores of queries at slots [B, T], [B, 1, T, S]: 0 or a lot."""
        key, query = places(slots), query[..., None]
        begin, end = hole[:, 0, None, None], hole[:, 1, None, None]
        seen = (key <= query) & ((key < begin) | (key >= end))
        # A padding query keeps sight of itself, or its softmax would have nothing to sum.
        seen = seen | (key == query)
        return mx.where(seen, 0.0, mx.finfo(dtype).min).astype(dtype)[:, None]

    def _cache_rows(self, rows: int, slots: int) -> mx.array:
        """Index of slot 0 of each (keys or values, row, head) in a cache seen as rows of h,
        int32 [2, B, K]."""
        heads = self.config.slow.n_kv_head
        return mx.array(np.arange(2 * rows * heads).reshape(2, rows, heads) * slots)

    def semantic_logits(self, hidden: mx.array) -> mx.array:
        """Scores, float32 [B, C + 1], of the semantic tokens and EOS from normed hidden [B, D]."""
        return (hidden @ self._head.T).astype(mx.float32)

    def empty_caches(self, rows: int, slots: int) -> list[mx.array]:
        """Fresh KV caches of the slow AR, one [2, rows, K, slots, h] of zeros per layer."""
        slow = self.config.slow
        shape = (2, rows, slow.n_kv_head, slots, slow.head_dim)
        return [mx.zeros(shape, self._dtype) for _ in self.layers]

    # ------------------------------------------------------------------ fast AR

    def fast_input(self, hidden: mx.array) -> mx.array:
        """Position 0 of the fast AR, [B, 1, fast dim], from the slow AR's output [B, D]."""
        if "fast_project_in" in self:
            hidden = self.fast_project_in(hidden)
        return hidden[:, None]

    def embed_code(self, code: mx.array) -> mx.array:
        """Position p >= 1 of the fast AR, [B, 1, fast dim], from code c(p - 1) [B]."""
        return self.fast_embeddings.weight[code].astype(self._dtype)[:, None]

    def fast_pass(
        self, x: mx.array, first: int, caches: list[mx.array] | None
    ) -> tuple[mx.array, list[mx.array]]:
        """Run the fast AR over positions first..first + T - 1.

        x [B, T, fast dim]; caches one [B, 10, H + 2 K, h / 2, 2] per layer with the positions
        before `first` filled, None at the start. T is 1 except at the start. Returns logits,
        float32 [B, C], of the last position and the caches.
        """
        length = x.shape[1]
        last = first + length
        even, odd = self._fast_rotation
        factors = (even[first:last], odd[first:last])
        updated = []
        normed = self.fast_layers[0].attention_norm(x)
        following = [block.attention_norm for block in self.fast_layers[1:]]
        for i, (block, norm) in enumerate(
            zip(self.fast_layers, [*following, self.fast_norm], strict=True)
        ):
            attention = block.attention
            new = attention.heads(normed, factors)
            if caches is None:
                # Slots that are not filled yet hold copies of the last one; nobody reads them.
                filled = mx.minimum(places(self.config.num_codebooks), length - 1)
                cache = mx.take(new, filled, axis=1)
            else:
                cache = mx.where(self._fast_slots[first], new, caches[i])
            updated.append(cache)
            q, kv = attention.split(cache[:, :last])
            mask = "causal" if length > 1 else None
            attended = attention.attend(q[:, :, first:], kv, mask)
            x, normed = add_norm(x, attended, block.ffn_norm)
            x, normed = add_norm(x, block.feed_forward(normed), norm)
        logits = project(self.fast_output, last_position(normed))
        return logits.astype(mx.float32), updated


def last_position(x: mx.array) -> mx.array:
    """x [B, T, D] at its last position, [B, D]; a mere view if there is only one."""
    return x.squeeze(1) if x.shape[1] == 1 else x[:, -1]
