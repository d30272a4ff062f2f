"""What one frame must read and multiply, from the model's own arrays.

Bytes are counted per reading: the fast AR's weights are read once per pass, nine times per frame,
since they are far larger than any cache near the arithmetic (33.5 MB at 4 bits and the published
size). A device whose last-level cache holds them can be faster than these bytes suggest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten

from warble_mlx.config import ModelConfig, TransformerConfig
from warble_mlx.dual_ar import DualAR
from warble_mlx.layers import Block

INDEX_BYTES = 4


class Read(msgspec.Struct, frozen=True):
    """Bytes of one reading, and how often a frame reads them."""

    nbytes: int
    times: int = 1

    @property
    def total(self) -> int:
        """Bytes per frame."""
        return self.nbytes * self.times


def frame_reads(model: DualAR, slots: int, dtype: mx.Dtype, rows: int = 1) -> dict[str, Read]:
    """What a frame step reads, by component.

    slots: length of the KV cache; dtype: that of activations; rows: streams stepped together.
    Packed weights count with their scales and biases. The head is the embedding rows that can be
    chosen, whatever the size of the whole table. Nothing needs to be evaluated.
    """
    c = model.config
    slow, fast = c.slow, c.fast
    passes = c.num_codebooks - 1
    small = _small(model.layers) + _nbytes(model.norm)
    small += passes * (_small(model.fast_layers) + _nbytes(model.fast_norm))
    seen = sum(range(2, c.num_codebooks + 1))  # keys of all passes; the first has two
    small += rows * c.n_fast_layer * _kv_bytes(fast, seen, dtype)
    small += rows * (
        c.num_codebooks * _row_bytes(model.codebook_embeddings.weight)
        + passes * _row_bytes(model.fast_embeddings.weight)
        + slow.dim * dtype.size
    )
    reads = {
        "slow AR Linears": Read(_linears(model.layers)),
        "fast AR Linears": Read(_linears(model.fast_layers), passes),
        "fast output": Read(_nbytes(model.fast_output), passes),
        "semantic head": Read(c.head_rows * slow.dim * dtype.size),
        f"KV cache, {slots} slots": Read(rows * c.n_layer * _kv_bytes(slow, slots, dtype)),
    }
    if "fast_project_in" in model:
        reads["fast input"] = Read(_nbytes(model.fast_project_in))
    return reads | {"norms, biases, embedding rows": Read(small)}


def total_bytes(reads: Mapping[str, Read]) -> int:
    """Bytes per frame, every reading counted."""
    return sum(read.total for read in reads.values())


def distinct_bytes(reads: Mapping[str, Read]) -> int:
    """Bytes per frame if whatever is read again came from a cache."""
    return sum(read.nbytes for read in reads.values())


def frame_macs(config: ModelConfig, slots: int, rows: int = 1) -> dict[str, int]:
    """Multiply-adds of a frame step, by component."""
    c, slow, fast = config, config.slow, config.fast
    positions = c.num_codebooks  # of the fast AR: the slow AR's output, then nine codes
    seen = positions * (positions + 1) // 2
    counts = {
        "slow AR Linears": c.n_layer * _block_weights(slow),
        "slow AR attention": c.n_layer * _attention(slow, slots),
        "fast AR Linears": c.n_fast_layer * _block_weights(fast) * positions,
        "fast AR attention": c.n_fast_layer * _attention(fast, seen),
        "fast output": (positions - 1) * fast.dim * c.codebook_size,
        "semantic head": slow.dim * c.head_rows,
    }
    if fast.dim != slow.dim:
        counts["fast input"] = slow.dim * fast.dim
    return {name: rows * count for name, count in counts.items()}


def _block_weights(t: TransformerConfig) -> int:
    return t.dim * t.qkv_rows + t.n_head * t.head_dim * t.dim + 3 * t.dim * t.ffn


def _attention(t: TransformerConfig, keys: int) -> int:
    return 2 * t.n_head * t.head_dim * keys


def _kv_bytes(t: TransformerConfig, slots: int, dtype: mx.Dtype) -> int:
    return 2 * t.n_kv_head * t.head_dim * slots * dtype.size


def _row_bytes(table: mx.array) -> int:
    return int(table.nbytes) // len(table) + INDEX_BYTES


def _nbytes(module: nn.Module) -> int:
    values = dict(tree_flatten(module.parameters())).values()
    return sum(value.nbytes for value in values)


def _linears(blocks: Iterable[Block]) -> int:
    return sum(_nbytes(linear) - _bias(linear) for b in blocks for linear in _own_linears(b))


def _small(blocks: Iterable[Block]) -> int:
    """Norms and biases of the blocks: everything but their matrices."""
    blocks = list(blocks)
    return sum(map(_nbytes, blocks)) - _linears(blocks)


def _own_linears(block: Block) -> list[nn.Module]:
    kinds = (nn.Linear, nn.QuantizedLinear)
    return [module for module in block.modules() if isinstance(module, kinds)]


def _bias(linear: nn.Module) -> int:
    return int(linear["bias"].nbytes) if "bias" in linear else 0
