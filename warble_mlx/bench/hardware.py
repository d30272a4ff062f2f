"""Rates of this device, measured through MLX: what bytes, multiply-adds and dispatches cost."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import msgspec

ROUNDS = 5
BYTES = {"gpu": 256 * 2**20, "cpu": 128 * 2**20}  # far beyond any cache
SIDE = {"gpu": 4096, "cpu": 1024}  # of the square matrix product
CHAIN = (256, 1024)  # lengths of the two dependent chains
WIDTH = 32  # of the rows in a chain


class Hardware(msgspec.Struct, frozen=True):
    """Measured rates; the best of several rounds each."""

    copy_gbs: float  # GB/s of a large elementwise operation, bytes read and written
    read_gbs: float  # GB/s of weights in a matrix-vector product
    gmacs: float  # 10**9 multiply-adds/s of a large square product in the activations' dtype
    launch_us: float  # microseconds per primitive in a chain in which each needs the last

    @property
    def bandwidth_gbs(self) -> float:
        """The better of both ways to move bytes: a floor must not be beaten by the method."""
        return max(self.copy_gbs, self.read_gbs)


def measure_hardware(dtype: mx.Dtype, *, compiled: bool) -> Hardware:
    """Measure all four; takes a second or two, and twice `BYTES` of memory.

    compiled: whether dispatches are replayed from a traced graph or built anew by Python.
    """
    kind = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
    return Hardware(
        copy_gbs=copy_bandwidth(BYTES[kind]) / 1e9,
        read_gbs=read_bandwidth(BYTES[kind], dtype) / 1e9,
        gmacs=throughput(SIDE[kind], dtype) / 1e9,
        launch_us=launch_seconds(compiled=compiled) * 1e6,
    )


def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second, read plus written, of adding 1 to `nbytes` of float32."""
    x = mx.zeros((nbytes // 4,), dtype=mx.float32)
    mx.eval(x)
    return 2 * nbytes / best_seconds(lambda: x + 1, repeat=4)


def read_bandwidth(nbytes: int, dtype: mx.Dtype) -> float:
    """Bytes of the matrix per second in a matrix-vector product."""
    columns = 8192
    matrix = mx.zeros((nbytes // dtype.size // columns, columns), dtype=dtype)
    vector = mx.zeros((1, columns), dtype=dtype)
    mx.eval(matrix, vector)
    return matrix.nbytes / best_seconds(lambda: vector @ matrix.T, repeat=4)


def throughput(side: int, dtype: mx.Dtype) -> float:
    """Multiply-adds per second of a product of two square matrices."""
    key = mx.random.key(0)
    a, b = mx.random.normal((2, side, side), key=key).astype(dtype)
    mx.eval(a, b)
    return float(side) ** 3 / best_seconds(lambda: a @ b.T, repeat=4)


def launch_seconds(*, compiled: bool) -> float:
    """Seconds per primitive of a long chain of tiny dependent ones.

    Softmax is one primitive that is never fused. The difference of two lengths leaves out what
    an evaluation costs once. A compiled chain is replayed without running Python per primitive,
    as a compiled frame step is.
    """
    short, long = (best_seconds(_chain(length, compiled), repeat=2) for length in CHAIN)
    return max(long - short, 0.0) / (CHAIN[1] - CHAIN[0])


def _chain(length: int, compiled: bool) -> Callable[[], mx.array]:
    def run(x: mx.array) -> mx.array:
        for _ in range(length):
            x = mx.softmax(x, axis=-1)
        return x

    start = mx.zeros((1, WIDTH))
    mx.eval(start)
    chain = mx.compile(run) if compiled else run
    return lambda: chain(start)


def best_seconds(build: Callable[[], mx.array], repeat: int) -> float:
    """Seconds to evaluate what `build` returns, `repeat` of them in flight; best of `ROUNDS`."""
    mx.eval(build())
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(repeat):
            result = build()
            mx.async_eval(result)
        mx.synchronize()
        best = min(best, (time.perf_counter() - begin) / repeat)
    return best
