"""The arithmetic of conversion, as pure numpy functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warble_mlx.convert.names import Spec
from warble_mlx.convert.stored import StoredTensor
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import Array, from_float32, is_finite, to_float32


def fold_weight_norm(
    magnitude: npt.NDArray[np.float32], direction: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """weight = g * v / ||v||, the norm taken over all dimensions but the first.

    `magnitude` g is [d0, 1, 1], `direction` v [d0, d1, k]. A zero direction gives NaN, as it does
    where weight norm is computed at run time.
    """
    squares = np.einsum("ijk,ijk->i", direction, direction, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = magnitude / np.sqrt(squares)[:, None, None]
        folded: npt.NDArray[np.float32] = direction * scale.astype(np.float32)
        return folded


def bundle_values(
    spec: Spec, pieces: tuple[StoredTensor, ...], dtype: str, *, channels_last: bool
) -> Array:
    """Tensor `spec` in the bundle's shape, in the raw form of `dtype`.

    `pieces` is the stored weight, or the magnitude and direction of a weight-normed one.
    `channels_last` says that they have the bundle's axes already. Values stored in `dtype` are
    passed through bit for bit.

    Raises CheckpointError naming the tensor for NaN, infinity, or values too large for `dtype`.
    """
    raw = [piece.read() for piece in pieces]
    if not all(is_finite(part, piece.dtype) for part, piece in zip(raw, pieces, strict=True)):
        raise CheckpointError(f"{spec.name} holds NaN or infinity: the checkpoint is damaged")
    if len(pieces) == 2:
        magnitude, direction = (
            to_float32(part, piece.dtype) for part, piece in zip(raw, pieces, strict=True)
        )
        values = fold_weight_norm(magnitude, direction)
        if not is_finite(values, "F32"):
            raise CheckpointError(
                f"{spec.name} has a weight-norm direction of length zero: the checkpoint is damaged"
            )
        result = from_float32(values, dtype)
    elif pieces[0].dtype == dtype:
        result = raw[0]
    else:
        result = from_float32(to_float32(raw[0], pieces[0].dtype), dtype)
    if not is_finite(result, dtype):
        raise CheckpointError(
            f"{spec.name} holds values too large for {dtype}. Give a wider dtype (bfloat16 or"
            " float32)"
        )
    if spec.axes is not None and not channels_last:
        result = result.transpose(spec.axes)
    return np.ascontiguousarray(result)
