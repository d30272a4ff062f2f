"""Two kernels for MLX's CUDA backend, where launching kernels is what takes the time.

MLX's own attention has no kernel there for one query and a mask: it falls back to six launches
per layer, or to cuDNN, whose child graphs cost the host more than they save. And a residual add
before a norm is two launches. On Apple GPUs MLX's kernels do both well, so nothing of this is
used there, and results are the same up to summation order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, cast

import mlx.core as mx

from warble_mlx.config import TransformerConfig

THREADS_PER_NORM = 128
THREADS_PER_HEAD = 512  # 16 warps share the keys of one head

# One block per row: total = x + y, rounded as the activations are, then RMSNorm of it: the mean
# square in float32, the result rounded before it meets the weight, as the reference does.
_ADD_NORM = """
    const size_t at = size_t(blockIdx.x) * D;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < D; i += THREADS) {
        const T s = T(float(x[at + i]) + float(y[at + i]));
        total[at + i] = s;
        sum += float(s) * float(s);
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    __shared__ float parts[THREADS / 32];
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < THREADS / 32; w++) sum += parts[w];
    const float scale = rsqrtf(sum / D + EPSILON);
    for (int i = threadIdx.x; i < D; i += THREADS) {
        const T n = T(float(total[at + i]) * scale);
        normed[at + i] = T(float(weight[i]) * float(n));
    }
"""

# One block per row and query head; each warp takes every WARPS-th key and keeps a running
# softmax (maximum, sum, weighted values), which the first warp joins at the end.
_ATTEND = """
    constexpr int WARPS = THREADS / 32, PER = HD / 32;
    const int row = blockIdx.x / HEADS, head = blockIdx.x % HEADS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const T* query = pairs + (size_t(row) * (HEADS + 2 * KV) + head) * HD + lane * PER;
    const T* keys = cache + (size_t(row) * KV + head / (HEADS / KV)) * SLOTS * HD + lane * PER;
    const T* values = keys + size_t(ROWS) * KV * SLOTS * HD;
    const int last = slot[row], begin = hole[2 * row], end = hole[2 * row + 1];
    float q[PER], out_part[PER], top = __int_as_float(0xff800000), sum = 0.0f;
    for (int i = 0; i < PER; i++) {
        q[i] = float(query[i]) * SCALE;
        out_part[i] = 0.0f;
    }
    for (int key = warp; key <= last; key += WARPS) {
        if (key >= begin && key < end && key != last) continue;
        float score = 0.0f;
        for (int i = 0; i < PER; i++) score += q[i] * float(keys[size_t(key) * HD + i]);
        for (int o = 16; o > 0; o >>= 1) score += __shfl_xor_sync(0xffffffffu, score, o);
        const float higher = fmaxf(top, score);
        const float keep = expf(top - higher), gain = expf(score - higher);
        sum = sum * keep + gain;
        for (int i = 0; i < PER; i++) {
            out_part[i] = out_part[i] * keep + gain * float(values[size_t(key) * HD + i]);
        }
        top = higher;
    }
    __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][HD];
    if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
    }
    for (int i = 0; i < PER; i++) parts[warp][lane * PER + i] = out_part[i];
    __syncthreads();
    if (warp == 0) {
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w]);
        float whole = 0.0f, joined[PER];
        for (int i = 0; i < PER; i++) joined[i] = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            const float share = expf(tops[w] - top);
            whole += sums[w] * share;
            for (int i = 0; i < PER; i++) joined[i] += parts[w][lane * PER + i] * share;
        }
        for (int i = 0; i < PER; i++) {
            out[(size_t(row) * HEADS + head) * HD + lane * PER + i] = T(joined[i] / whole);
        }
    }
"""


_unused: ContextVar[bool] = ContextVar("cuda_kernels_unused", default=False)


def available() -> bool:
    """Whether MLX's CUDA backend is the default device, and these kernels are to be used."""
    return _cuda() and mx.default_device().type == mx.gpu and not _unused.get()


@contextmanager
def unused() -> Iterator[None]:
    """Do without these kernels on any device: what is traced here runs elsewhere."""
    token = _unused.set(True)
    try:
        yield
    finally:
        _unused.reset(token)


@lru_cache(maxsize=1)
def _cuda() -> bool:
    return bool(mx.cuda.is_available())


def can_attend(config: TransformerConfig) -> bool:
    """Whether `attend_cached` covers these heads: a head's width is spread over a warp."""
    return available() and config.head_dim % 32 == 0


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """x + y and RMSNorm of it, both [..., D] in x's dtype."""
    width = x.shape[-1]
    total, normed = _kernel(
        "warble_add_norm", ("x", "y", "weight"), ("total", "normed"), _ADD_NORM
    )(
        inputs=[x, y, weight],
        template=[("T", x.dtype), ("D", width), ("THREADS", THREADS_PER_NORM)],
        defines=[("EPSILON", eps)],
        blocks=x.size // width,
        threads=THREADS_PER_NORM,
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return total, normed


def attend_cached(
    pairs: mx.array, cache: mx.array, slot: mx.array, hole: mx.array, config: TransformerConfig
) -> mx.array:
    """Attention of one position over a cache: pairs [B, 1, H + 2 K, h / 2, 2] as projected and
    rotated, cache [2, B, K, S, h] with this position's keys and values at slot [B]; slots in
    hole [B, 2] are not seen. Returns [B, 1, H * h]."""
    _, rows, kv_heads, slots, head_dim = cache.shape
    run = _kernel("warble_attend", ("pairs", "cache", "slot", "hole"), ("out",), _ATTEND)
    (out,) = run(
        inputs=[pairs, cache, slot, hole],
        template=[
            ("T", pairs.dtype),
            ("HD", head_dim),
            ("HEADS", config.n_head),
            ("KV", kv_heads),
            ("SLOTS", slots),
            ("ROWS", rows),
            ("THREADS", THREADS_PER_HEAD),
        ],
        defines=[("SCALE", head_dim**-0.5)],
        blocks=rows * config.n_head,
        threads=THREADS_PER_HEAD,
        output_shapes=[(rows, 1, config.n_head * head_dim)],
        output_dtypes=[pairs.dtype],
    )
    return out


def _kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str
) -> Callable[..., list[mx.array]]:
    """A caller that gives floats, which kernel templates cannot take, as constants in the text."""

    def call(
        *, defines: list[tuple[str, float]], blocks: int, threads: int, **call: Any
    ) -> list[mx.array]:
        text = "".join(f"    constexpr float {n} = {v!r}f;\n" for n, v in defines) + source
        # Compiled kernels are kept by name, so that the constants must be part of it.
        full = "_".join([name, *(repr(v) for _, v in defines)])
        for character in "+-.":
            full = full.replace(character, "_")
        kernel = _compiled(full, inputs, outputs, text)
        result: list[mx.array] = kernel(
            grid=(blocks * threads, 1, 1), threadgroup=(threads, 1, 1), **call
        )
        return result

    return call


@lru_cache(maxsize=64)
def _compiled(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str
) -> Callable[..., list[mx.array]]:
    kernel = mx.fast.cuda_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=source
    )
    return cast("Callable[..., list[mx.array]]", kernel)
