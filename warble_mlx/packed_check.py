"""Do packed products come out right here? Looked at once per distinct shape when loading.

MLX builds have had faults that raise nothing: products of packed weights that were zero or wrong
for some shapes on some devices. A model computed that way speaks garbage with confidence.
"""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx.errors import CheckpointError
from warble_mlx.layers import project

ROWS = (1, 33)  # a decoding step, and a prompt long enough for the other kernels
# Of the largest product. MLX's CPU kernels add up in the activations' own 16 bits, which costs up
# to 3 % in bfloat16; the faults that are looked for are whole products.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}


def check_packed_products(model: nn.Module, dtype: mx.Dtype) -> int:
    """Compare packed with unpacked products, once per distinct shape and packing, on the device.

    Returns how many kinds were compared. Raises CheckpointError that names module and MLX version
    when they differ.
    """
    seen = set()
    for path, linear in model.named_modules():
        if not isinstance(linear, nn.QuantizedLinear):
            continue
        kind = (linear["weight"].shape, linear.bits, linear.group_size, linear.mode)
        if kind in seen:
            continue
        seen.add(kind)
        for rows in ROWS:
            _compare(path, linear, rows, dtype)
    return len(seen)


def _compare(path: str, linear: nn.QuantizedLinear, rows: int, dtype: mx.Dtype) -> None:
    scales, biases = linear["scales"], linear.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        linear["weight"],
        scales,
        biases,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    ).astype(mx.float32)
    x = mx.random.normal((rows, weight.shape[1]), key=mx.random.key(0)).astype(dtype)
    packed = np.array(project(linear, x).astype(mx.float32))
    plain = np.array(x.astype(mx.float32) @ weight.T)
    largest = max(float(np.abs(plain).max()), 1e-6)
    worst = float(np.abs(packed - plain).max()) / largest
    if not worst < TOLERANCE[dtype]:  # also when it is not a number
        raise CheckpointError(
            f"{path}: products of {linear.bits}-bit weights with {rows} rows are off by"
            f" {worst:.0%} with MLX {version('mlx')} on this device. Install another MLX version,"
            " or unpack the weights when loading: --dequantize, in Python load(…, dequantize=True)"
        )
