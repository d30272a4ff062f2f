"""Rounding with compensation: what rounding one input spoils, the inputs after it make good.

The method is GPTQ (Frantar et al., 2022). The inputs that a Linear really sees give a matrix H of
their products, and the squared error of its outputs is a quadratic form of H in the error of each
row of weights. Inputs are rounded one after another; after each, the weights that are not rounded
yet move to where the form is least. Scales and biases are chosen for the moved weights of a group
just before it is rounded. The result has the format, and so the speed, of plain rounding.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.quant.affine import Floats, Packed, grid, nearest, packed

DAMPING = 0.01  # of the mean of H's diagonal, added to it: for inputs that were hardly ever seen
SHRINKS = np.linspace(1, 0.7, 13, dtype=np.float32)

Products = npt.NDArray[np.float64]


def damped(products: Products) -> Products:
    """H [in, in] with something added to its diagonal, so that it has an inverse."""
    more = DAMPING * float(np.diag(products).mean()) + 1e-12
    found: Products = products + more * np.eye(len(products))
    return found


def inverse_factor(products: Products) -> Floats:
    """The upper triangular U with Uᵀ U = the inverse of a damped H, [in, in].

    Row k says how an error of input k is spread over the inputs after it.
    """
    factor: Floats = np.linalg.cholesky(np.linalg.inv(products)).T.astype(np.float32)
    return factor


def compensate(
    weight: Floats,
    factor: Floats,
    importance: npt.NDArray[np.floating],
    bits: int,
    group: int,
    dtype: mx.Dtype,
) -> Packed:
    """Pack a weight [out, in]. Scales and biases are stored in `dtype`.

    factor: `inverse_factor` of H; importance: H's diagonal. Linears with the same inputs share
    both.
    """
    left = np.ascontiguousarray(weight.T, np.float32)  # [in, out]: an input is one run of memory
    important = importance.astype(np.float32)
    integers = np.empty(left.shape, np.uint8)
    scales, biases = [], []
    for begin in range(0, len(left), group):
        end = begin + group
        scale, bias = grid(left[begin:end], important[begin:end], bits, dtype, SHRINKS)
        errors = np.empty((group, left.shape[1]), np.float32)
        for row in range(begin, end):
            found = nearest(left[row], scale, bias, bits)
            integers[row] = found
            error = (left[row] - (found * scale + bias)) / factor[row, row]
            left[row:end] -= factor[row, row:end, None] * error
            errors[row - begin] = error
        left[end:] -= factor[begin:end, end:].T @ errors
        scales.append(scale)
        biases.append(bias)
    return Packed(
        packed(np.ascontiguousarray(integers.T), bits),
        mx.array(np.stack(scales, axis=1)).astype(dtype),
        mx.array(np.stack(biases, axis=1)).astype(dtype),
    )
