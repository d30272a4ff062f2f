"""MLX's affine packing, with integers, scales and biases chosen by the caller.

A group of inputs shares a scale and a bias: weight = scale * integer + bias. MLX stores a row's
integers as one stream of bits, lowest first, in words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.quant.policy import Packing

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.uint8]


class Packed(NamedTuple):
    """A Linear's parameters as `nn.QuantizedLinear` has them."""

    weight: mx.array  # uint32 [out, in * bits / 32]
    scales: mx.array  # [out, in / group]
    biases: mx.array  # [out, in / group]


def unpacked(parts: Sequence[mx.array], packing: Packing) -> mx.array:
    """The weight [out, in] that packed parameters of any mode stand for, float32."""
    weight, scales = parts[:2]
    biases = None
    if packing.mode == "affine":  # in the scales' own 16 bits the products would be rounded
        scales, biases = scales.astype(mx.float32), parts[2].astype(mx.float32)
    return mx.dequantize(weight, scales, biases, **packing._asdict()).astype(mx.float32)


def packed(integers: Integers, bits: int) -> mx.array:
    """Integers [out, in] below 2 ** bits as MLX packs them, uint32 [out, in * bits / 32]."""
    stream = np.unpackbits(integers[..., None], axis=-1, count=bits, bitorder="little")
    rows = np.packbits(stream.reshape(len(integers), -1), axis=-1, bitorder="little")
    return mx.array(rows.view(np.uint32))


def rounded(values: Floats, dtype: mx.Dtype) -> Floats:
    """Values as they are after being stored in `dtype`."""
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


def nearest(weight: Floats, scale: Floats, bias: Floats, bits: int) -> Floats:
    """The integers whose values are nearest to `weight`, as float32; shapes broadcast."""
    return np.clip(np.round((weight - bias) / scale), 0, 2**bits - 1).astype(np.float32)


def grid(
    weight: Floats, importance: Floats, bits: int, dtype: mx.Dtype, shrinks: Floats
) -> tuple[Floats, Floats]:
    """Scale and bias, float32 [out] with values of `dtype`, for one group of inputs.

    weight [group, out]; importance [group], the weights of squared errors. The range of each
    output's weights is shrunk by each of `shrinks`, and the one with the least error is taken.
    """
    low, high = weight.min(axis=0), weight.max(axis=0)
    least = np.full(low.shape, np.inf, np.float32)
    scale, bias = np.ones_like(low), np.zeros_like(low)
    for shrink in shrinks:
        step = rounded(np.maximum((high - low) * shrink / (2**bits - 1), 1e-8), dtype)
        zero = rounded(low * shrink, dtype)
        off = nearest(weight, step, zero, bits) * step + zero - weight
        error = importance @ np.square(off)
        better = error < least
        least = np.where(better, error, least)
        scale, bias = np.where(better, step, scale), np.where(better, zero, bias)
    return scale, bias
