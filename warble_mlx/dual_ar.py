"""The two transformers of arktts: modules and their passes, no loop and no sampling.

Shapes: B rows, T positions, D = dim, C = codebook_size, S cache slots, K key/value heads.

The slow AR reads packed columns (a text or semantic id and ten codes) and keeps one KV cache
per layer, [B, 2 K, S, h], keys above values. Where a row's columns lie in its cache is told by
two numbers per row: `slot`, the first slot to write, and `hole`, a pair of slots [begin, end)
that holds nothing (padding). RoPE positions count real columns only: slot - (end - begin).

The fast AR sees ten positions per frame: the slow AR's output, then the codes c0..c8.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from warble_mlx.config import ModelConfig
from warble_mlx.layers import Block, project, rope_table, rotation_for


def _new_handle(array: mx.array) -> mx.array:
    """The same values under another handle: item assignment then leaves the caller's alone.

    The memory is still updated in place once nobody else holds the old array.
    """
    return array[...]


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
        self._book_rows = mx.arange(c.num_codebooks) * c.codebook_size
        mx.eval(self._head, self._slow_rope, self._fast_rotation, self._book_rows)

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
        [B, 2 K, S, h] per layer. Returns the last layer's output [B, T, D], before the final
        norm, and the caches with the new keys and values.
        """
        length, slots = x.shape[1], caches[0].shape[2]
        query = slot[:, None] + mx.arange(length)
        begin, end = hole[:, 0:1], hole[:, 1:2]
        position = query - mx.where(query >= end, end - begin, 0)
        # Padding columns and finished rows get some position; nothing real ever looks at them.
        position = mx.clip(position, 0, self.config.max_seq_len - 1)
        factors = rotation_for(self._slow_rope[position], self.config.slow)
        key = mx.arange(slots)
        empty = (key >= begin) & (key < end)
        # A padding query keeps sight of itself, or its softmax would have nothing to sum.
        itself = key == query[..., None]
        mask = ((key <= query[..., None]) & ~empty[:, None]) | itself
        mask = mask[:, None]
        rows = mx.arange(x.shape[0])[:, None]
        updated = []
        for block, cache in zip(self.layers, caches, strict=True):
            q, kv = block.attention.queries_and_kv(block.attention_norm(x), factors)
            cache = _new_handle(cache)
            cache[rows, :, query] = kv.swapaxes(1, 2)
            updated.append(cache)
            x = x + block.attention.attend(q, cache, mask)
            x = x + block.feed_forward(block.ffn_norm(x))
        return x, updated

    def semantic_logits(self, hidden: mx.array) -> mx.array:
        """Scores, float32 [B, C + 1], of the semantic tokens and EOS from normed hidden [B, D]."""
        return (hidden @ self._head.T).astype(mx.float32)

    def empty_caches(self, rows: int, slots: int) -> list[mx.array]:
        """Fresh KV caches of the slow AR, one [rows, 2 K, slots, h] of zeros per layer."""
        slow = self.config.slow
        shape = (rows, 2 * slow.n_kv_head, slots, slow.head_dim)
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

        x [B, T, fast dim]; caches one [B, 2 K, 10, h] per layer with the positions before
        `first` filled, None at the start. Returns logits, float32 [B, C], of the last position
        and the caches.
        """
        fast = self.config.fast
        rows, length, _ = x.shape
        last = first + length
        even, odd = self._fast_rotation
        factors = (even[first:last], odd[first:last])
        if caches is None:
            shape = (rows, 2 * fast.n_kv_head, self.config.num_codebooks, fast.head_dim)
            caches = [mx.zeros(shape, x.dtype) for _ in self.fast_layers]
        mask = None
        if length > 1:
            mask = mx.arange(last) <= mx.arange(first, last)[:, None]
        updated = []
        for block, cache in zip(self.fast_layers, caches, strict=True):
            q, kv = block.attention.queries_and_kv(block.attention_norm(x), factors)
            cache = _new_handle(cache)
            cache[:, :, first:last] = kv
            updated.append(cache)
            x = x + block.attention.attend(q, cache[:, :, :last], mask)
            x = x + block.feed_forward(block.ffn_norm(x))
        logits = project(self.fast_output, self.fast_norm(x[:, -1]))
        return logits.astype(mx.float32), updated
