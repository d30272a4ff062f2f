"""Both transformers of arktts: modules and their passes, no loop and no sampling.

Shapes: B rows, T positions, S cache slots, D = dim, H query heads, K key/value heads, h = head_dim,
C = codebook_size. Parameter names are the checkpoint's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference.rope import rope_table, rotate
from warble_mlx.config import ModelConfig, TransformerConfig

Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, K, S, h]."""


class RMSNorm(nn.Module):
    """x over its root mean square, which is taken in float32; the weight comes after the cast."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to [..., dim]."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., dim] with eps inside the root."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [B, H, T, h] over k and v [B, K, S, h]; `mask` [B or 1, T, S], True = see.

    Query head g uses KV head g // (H / K): heads that share one are laid out along time.
    """
    rows, heads, length, width = q.shape
    group = heads // k.shape[1]
    folded = q.reshape(rows, k.shape[1], group * length, width)
    seen = mask[:, None].repeat(1, 1, group, 1)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=seen).reshape(q.shape)


class Attention(nn.Module):
    """Grouped-query attention over a cache that the caller owns."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = self.config = config
        self.wqkv = nn.Linear(c.dim, c.qkv_rows, bias=c.qkv_bias)
        self.wo = nn.Linear(c.n_head * c.head_dim, c.dim, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """[B, T, D] to [B, T, D]. Writes keys and values of the T positions into cache `slots`
        [T]; `rope` are their table rows, `mask` [B or 1, T, S]."""
        c = self.config
        heads = self.wqkv(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = heads.split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        keys, values = cache
        keys.index_copy_(2, slots, k)
        values.index_copy_(2, slots, v)
        return self.wo(attend(q, keys, values, mask).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rope: Tensor, slots: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """[B, T, D] to [B, T, D]; arguments as for `Attention`."""
        x = x + self.attention(self.attention_norm(x), rope, slots, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class DualAR(nn.Module):
    """The slow and the fast AR."""

    slow_rope: Tensor
    fast_rope: Tensor
    book_rows: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, slow, fast = config, config.slow, config.fast
        self.config = config
        self.embeddings = nn.Embedding(c.vocab_size, slow.dim)
        self.codebook_embeddings = nn.Embedding(c.codebook_size * c.num_codebooks, slow.dim)
        self.layers = nn.ModuleList(Block(slow) for _ in range(slow.n_layer))
        self.norm = RMSNorm(slow.dim, slow.norm_eps)
        if fast.dim != slow.dim:
            self.fast_project_in = nn.Linear(slow.dim, fast.dim)
        self.fast_embeddings = nn.Embedding(c.codebook_size, fast.dim)
        self.fast_layers = nn.ModuleList(Block(fast) for _ in range(fast.n_layer))
        self.fast_norm = RMSNorm(fast.dim, fast.norm_eps)
        self.fast_output = nn.Linear(fast.dim, c.codebook_size, bias=False)

    def prepare(self) -> None:
        """Compute what is not stored: RoPE tables and the rows of the output head that count.

        To be called once the weights are loaded, cast and on their device.
        """
        c, device = self.config, self.embeddings.weight.device
        slow = rope_table(c.max_seq_len, c.slow.head_dim, c.slow.rope_base)
        fast = rope_table(c.num_codebooks, c.fast.head_dim, c.fast.rope_base)
        self.slow_rope, self.fast_rope = slow.to(device), fast.to(device)
        self.book_rows = torch.arange(c.num_codebooks, device=device) * c.codebook_size
        rows = [*range(c.semantic_begin_id, c.semantic_end_id + 1), c.eos_token_id]
        self.head = self.embeddings.weight[torch.tensor(rows, device=device)].clone()

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.embeddings.weight.dtype

    # ------------------------------------------------------------------ slow AR

    def embed(self, columns: Tensor) -> Tensor:
        """Packed columns [B, 11, T] to embeddings [B, T, D]."""
        c = self.config
        ids, codes = columns[:, 0], columns[:, 1:].transpose(1, 2)
        voiced = (ids >= c.semantic_begin_id) & (ids <= c.semantic_end_id)
        return self.embeddings(ids) + self.sum_of_codes(codes) * voiced[..., None]

    def sum_of_codes(self, codes: Tensor) -> Tensor:
        """Codes [..., 10] to the sum of their codebook embeddings [..., D]."""
        return self.codebook_embeddings(codes + self.book_rows).sum(dim=-2)

    def advance(
        self,
        x: Tensor,
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        caches: list[Cache],
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the slow AR over T new positions; the last layer's output [B, T, D], un-normed.

        x [B, T, D]; slots [T], the cache slots they are written to; positions [B, T] for RoPE;
        keys [B, S], which slots hold something real. Every layer's output goes to `outputs`.
        """
        slot = torch.arange(keys.shape[1], device=x.device)
        mask = (slot <= slots[:, None]) & keys[:, None]
        # A padding query sees nothing. It is left sight of itself, or its softmax would be NaN.
        mask = mask | (slot == slots[:, None])
        rope = self.slow_rope[positions]
        for block, cache in zip(self.layers, caches, strict=True):
            x = block(x, rope, slots, mask, cache)
            if outputs is not None:
                outputs.append(x)
        return x

    def all_logits(self, normed: Tensor) -> Tensor:
        """Scores of the whole vocabulary, [..., V], from normed hidden states [..., D]."""
        return F.linear(normed, self.embeddings.weight)

    def semantic_logits(self, normed: Tensor) -> Tensor:
        """Float32 scores [..., C + 1] of the semantic tokens, then EOS: all that can be chosen."""
        return F.linear(normed, self.head).float()

    def slow_caches(self, rows: int, slots: int) -> list[Cache]:
        """Empty caches, one per slow layer."""
        return self._caches(self.config.slow, rows, slots)

    # ------------------------------------------------------------------ fast AR

    def fast_input(self, normed: Tensor, hidden: Tensor) -> Tensor:
        """Position 0 of the fast AR, [B, 1, fast dim], from the slow AR's output [B, D]."""
        entry = normed if self.config.norm_fastlayer_input else hidden
        if hasattr(self, "fast_project_in"):
            entry = self.fast_project_in(entry)
        return entry[:, None]

    def fast_advance(self, x: Tensor, first: int, caches: list[Cache]) -> Tensor:
        """Run positions first, first + 1, … of the fast AR over x [B, T, fast dim].

        Returns float32 logits [B, C] of the last of them.
        """
        last = first + x.shape[1]
        slot = torch.arange(last, device=x.device)
        slots = slot[first:]
        mask = (slot <= slots[:, None])[None]
        rope = self.fast_rope[None, first:last]
        for block, (keys, values) in zip(self.fast_layers, caches, strict=True):
            x = block(x, rope, slots, mask, (keys[:, :, :last], values[:, :, :last]))
        return self.fast_output(self.fast_norm(x[:, -1])).float()

    def fast_caches(self, rows: int) -> list[Cache]:
        """Empty caches of ten slots, one per fast layer."""
        return self._caches(self.config.fast, rows, self.config.num_codebooks)

    def _caches(self, stack: TransformerConfig, rows: int, slots: int) -> list[Cache]:
        shape = (rows, stack.n_kv_head, slots, stack.head_dim)
        like = self.embeddings.weight
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(stack.n_layer)]
