"""Counts multiply-adds: of every matrix product, convolution and attention that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np


class Tally:
    """How many multiply-adds so far."""

    total = 0


@contextmanager
def counted() -> Iterator[Tally]:
    """Inside the block every product counts, computed or not: MLX is lazy."""
    tally = Tally()

    def counting(function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            tally.total += cost(*args)
            return function(*args, **options)

        return wrapped

    def product(a: mx.array, b: mx.array) -> int:
        return int(np.prod(a.shape)) * b.shape[-1]

    def convolution(x: mx.array, weight: mx.array) -> int:
        return int(np.prod(x.shape[:2]) * np.prod(weight.shape))

    def attention(q: mx.array, k: mx.array, _v: mx.array) -> int:
        return 2 * int(np.prod(q.shape)) * k.shape[2]

    places: list[tuple[Any, str, Callable[..., int]]] = [
        (mx.array, "__matmul__", product),
        (mx, "matmul", product),
        (mx, "addmm", lambda _c, a, b: product(a, b)),
        (mx, "conv1d", convolution),
        (mx, "conv_transpose1d", convolution),
        (mx.fast, "scaled_dot_product_attention", attention),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, cost in places:
            setattr(place, name, counting(getattr(place, name), cost))
        yield tally
    finally:
        for place, name, original in before:
            setattr(place, name, original)
