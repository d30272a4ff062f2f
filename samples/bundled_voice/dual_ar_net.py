"""The DualAR as a trainable network, with the tensor names of the published checkpoint."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from samples.bundled_voice.layers import Attention, FeedForward, RMSNorm, rope_table

Config = dict[str, Any]


class _Rows(torch.autograd.Function):
    """Rows of a table; backward is one index_add, which a CUDA graph can hold."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.kind = table.shape[0], table.dtype
        return table[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1]).float()
        total = torch.zeros(ctx.rows, flat.shape[1], device=grad.device)
        return total.index_add_(0, index.reshape(-1), flat).to(ctx.kind), None


def rows(table: Tensor, index: Tensor) -> Tensor:
    result: Tensor = _Rows.apply(table, index)
    return result


class Layer(nn.Module):
    def __init__(
        self, width: int, inner: int, heads: int, groups: int, head: int, bias: bool, eps: float
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, groups, head, bias)
        self.feed_forward = FeedForward(width, inner)
        self.ffn_norm, self.attention_norm = RMSNorm(width, eps), RMSNorm(width, eps)

    def forward(self, x: Tensor, rope: Tensor, kind: torch.dtype) -> Tensor:
        """kind: what the products are computed in; x stays as it is."""
        split = self.attention.split(self.attention_norm(x, kind), rope)
        x = x + self.attention.attend(*split, None)
        return x + self.feed_forward(self.ffn_norm(x, kind))


class DualAR(nn.Module):
    rope: Tensor
    fast_rope: Tensor
    offsets: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, fast, books = config["dim"], config["fast_dim"], config["num_codebooks"]
        size, eps = config["codebook_size"], config["norm_eps"]
        self.embeddings = nn.Embedding(config["vocab_size"], width)
        self.codebook_embeddings = nn.Embedding(size * books, width)
        self.layers = nn.ModuleList(
            [
                Layer(
                    width, config["intermediate_size"], config["n_head"],
                    config["n_local_heads"], config["head_dim"],
                    config["attention_qkv_bias"], eps,
                )
                for _ in range(config["n_layer"])
            ]
        )  # fmt: skip
        self.norm = RMSNorm(width, eps)
        self.fast_embeddings = nn.Embedding(size, fast)
        self.fast_layers = nn.ModuleList(
            [
                Layer(
                    fast, config["fast_intermediate_size"], config["fast_n_head"],
                    config["fast_n_local_heads"], config["fast_head_dim"],
                    config["fast_attention_qkv_bias"], eps,
                )
                for _ in range(config["n_fast_layer"])
            ]
        )  # fmt: skip
        self.fast_norm = RMSNorm(fast, eps)
        self.fast_output = nn.Linear(fast, size, bias=False)
        slow_rope = rope_table(config["max_seq_len"], config["head_dim"], config["rope_base"])
        fast_rope = rope_table(books, config["fast_head_dim"], config["rope_base"])
        self.register_buffer("rope", slow_rope, persistent=False)
        self.register_buffer("fast_rope", fast_rope, persistent=False)
        self.register_buffer("offsets", torch.arange(books) * size, persistent=False)
        deep = 0.02 / math.sqrt(2 * config["n_layer"])
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(parameter, std=deep if last else 0.02)
        nn.init.normal_(self.embeddings.weight, std=0.05)

    def slow(self, ids: Tensor, codes: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        """Normalised hidden states; ids [batch, time], codes [batch, time, books]."""
        first, last = self.config["semantic_begin_id"], self.config["semantic_end_id"]
        spoken = ((ids >= first) & (ids <= last))[..., None]
        heard = rows(self.codebook_embeddings.weight, codes + self.offsets).sum(2)
        x = rows(self.embeddings.weight, ids) + heard * spoken
        for layer in self.layers:
            x = layer(x, self.rope[: x.shape[1]], kind)
        normed: Tensor = self.norm(x, kind)
        return normed

    def semantic_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embeddings.weight.t().to(hidden.dtype)

    def fast(self, hidden: Tensor, codes: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        """Logits of books 1 to the last of frames: hidden [n, width], codes [n, books] to
        [n, books - 1, size]."""
        known = rows(self.fast_embeddings.weight, codes[:, :-1])
        x = torch.cat((hidden[:, None].to(kind), known.to(kind)), 1)
        for layer in self.fast_layers:
            x = layer(x, self.fast_rope, kind)
        logits: Tensor = self.fast_output(self.fast_norm(x[:, 1:], kind))
        return logits
