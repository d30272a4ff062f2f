"""Bytes and multiply-adds per frame, held against the arithmetic done by hand."""

from __future__ import annotations

import mlx.core as mx
import pytest

from warble_mlx.bench.cost import distinct_bytes, frame_macs, frame_reads, total_bytes
from warble_mlx.bench.synthetic import PUBLISHED, TINY, layout, runnable
from warble_mlx.quant.policy import packing

SMALL = "norms, biases, embedding rows"
# Weights of one block: wqkv 896 x (14 + 4) 64, wo 896 x 896, three of 896 x 4864.
BLOCK = 896 * 1152 + 896 * 896 + 3 * 896 * 4864


def published(bits: int, slots: int, rows: int = 1) -> dict[str, int]:
    default = None if bits == 16 else packing(bits)
    reads = frame_reads(layout(PUBLISHED, default), slots, mx.bfloat16, rows)
    return {name: read.total for name, read in reads.items()}


def test_published_size_at_four_bits() -> None:
    reads = published(4, 512)
    small = reads.pop(SMALL)
    assert reads == {
        "slow AR Linears": 24 * BLOCK * 9 // 16,  # 4 bits, and 2 x 16 per group of 64
        "fast AR Linears": 9 * 4 * BLOCK * 9 // 16,
        "fast output": 9 * 4096 * 896 * 2,
        "semantic head": 4097 * 896 * 2,
        "KV cache, 512 slots": 24 * 2 * 2 * 64 * 512 * 2,
    }
    assert sum(reads.values()) <= 583e6
    assert small < 0.5e6  # everything else together


def test_sixteen_bits_read_what_the_parameters_hold() -> None:
    reads = published(16, 512)
    assert reads["slow AR Linears"] == 24 * BLOCK * 2
    assert reads["fast AR Linears"] == 9 * 4 * BLOCK * 2


def test_rows_share_the_weights_but_not_the_caches() -> None:
    one, eight = published(4, 512), published(4, 512, rows=8)
    shared = {"slow AR Linears", "fast AR Linears", "fast output", "semantic head"}
    assert {name for name in one if one[name] == eight[name]} == shared
    assert eight["KV cache, 512 slots"] == 8 * one["KV cache, 512 slots"]


def test_distinct_bytes_count_a_reading_once() -> None:
    reads = frame_reads(layout(PUBLISHED, packing(4)), 512, mx.bfloat16)
    again = 8 * (4 * BLOCK * 9 // 16 + 4096 * 896 * 2)
    assert total_bytes(reads) - distinct_bytes(reads) == again


@pytest.mark.parametrize("bits", [4, 16])
def test_a_loaded_model_counts_like_its_layout(bits: int) -> None:
    default = None if bits == 16 else packing(bits)
    loaded = runnable(TINY, mx.bfloat16, default)
    reads = frame_reads(loaded, 256, mx.bfloat16)
    assert reads == frame_reads(layout(TINY, default), 256, mx.bfloat16)
    assert reads["semantic head"].nbytes == loaded._head.nbytes


def test_unpacked_weights_count_as_they_are_in_memory() -> None:
    reads = frame_reads(runnable(TINY, mx.float32, packing(4), packed=False), 256, mx.float32)
    block = 128 * 256 + 128 * 128 + 3 * 128 * 256
    assert reads["slow AR Linears"].nbytes == 2 * block * 4


def test_multiply_adds_of_the_published_size() -> None:
    macs = frame_macs(PUBLISHED, 512)
    assert macs == {
        "slow AR Linears": 24 * BLOCK,
        "slow AR attention": 24 * 2 * 14 * 64 * 512,
        "fast AR Linears": 10 * 4 * BLOCK,  # ten positions in nine passes
        "fast AR attention": 4 * 2 * 14 * 64 * 55,  # position p sees p keys: 1 + 2 + … + 10
        "fast output": 9 * 896 * 4096,
        "semantic head": 896 * 4097,
    }
    assert frame_macs(PUBLISHED, 512, rows=3) == {name: 3 * n for name, n in macs.items()}
