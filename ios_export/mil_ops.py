"""What the operations of a Core ML program compute, in float32.

One function per operation, named as in the specification; arguments have its names too. Only what
the exported programs use is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _wide(x: Any) -> Any:
    return x.float() if torch.is_tensor(x) and x.is_floating_point() else x


def _ints(x: Tensor) -> list[int]:
    return [int(v) for v in x.reshape(-1)]


def mul(x: Tensor, y: Tensor) -> Tensor:
    return _wide(x) * _wide(y)


def add(x: Tensor, y: Tensor) -> Tensor:
    return _wide(x) + _wide(y)


def sub(x: Tensor, y: Tensor) -> Tensor:
    return _wide(x) - _wide(y)


def real_div(x: Tensor, y: Tensor) -> Tensor:
    return _wide(x) / _wide(y)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(_wide(x), _wide(y))


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(_wide(x), _wide(y))


def sin(x: Tensor) -> Tensor:
    return torch.sin(_wide(x))


def exp(x: Tensor) -> Tensor:
    return torch.exp(_wide(x))


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(_wide(x))


def silu(x: Tensor) -> Tensor:
    return F.silu(_wide(x))


def square(x: Tensor) -> Tensor:
    return torch.square(_wide(x))


def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    return F.gelu(_wide(x), approximate="none" if mode == "EXACT" else "tanh")


def rsqrt(x: Tensor, epsilon: Tensor | None = None) -> Tensor:
    return torch.rsqrt(_wide(x) + (0 if epsilon is None else _wide(epsilon)))


def clip(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return torch.clamp(_wide(x), float(alpha), float(beta))


def cast(x: Tensor, dtype: str) -> Tensor:
    types = {"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32,
             "bool": torch.bool, "int16": torch.int16, "uint16": torch.int32}  # fmt: skip
    return x.to(types[dtype])


def greater_equal(x: Tensor, y: Tensor) -> Tensor:
    return x >= y


def less_equal(x: Tensor, y: Tensor) -> Tensor:
    return x <= y


def less(x: Tensor, y: Tensor) -> Tensor:
    return x < y


def equal(x: Tensor, y: Tensor) -> Tensor:
    return x == y


def logical_or(x: Tensor, y: Tensor) -> Tensor:
    return x | y


def logical_and(x: Tensor, y: Tensor) -> Tensor:
    return x & y


def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond, a, b)


def identity(x: Tensor) -> Tensor:
    return x


def reduce_mean(x: Tensor, axes: Tensor, keep_dims: Tensor) -> Tensor:
    return _wide(x).mean(_ints(axes), keepdim=bool(keep_dims))


def reduce_sum(x: Tensor, axes: Tensor, keep_dims: Tensor) -> Tensor:
    return _wide(x).sum(_ints(axes), keepdim=bool(keep_dims))


def reduce_log_sum_exp(x: Tensor, axes: Tensor, keep_dims: Tensor) -> Tensor:
    return torch.logsumexp(_wide(x), _ints(axes), keepdim=bool(keep_dims))


def reduce_argmax(x: Tensor, axis: Tensor, keep_dims: Tensor, **_: Any) -> Tensor:
    return torch.argmax(_wide(x), int(axis), keepdim=bool(keep_dims))


def softmax(x: Tensor, axis: Tensor) -> Tensor:
    return torch.softmax(_wide(x), int(axis))


def cumsum(x: Tensor, axis: Tensor, **_: Any) -> Tensor:
    return torch.cumsum(_wide(x), int(axis))


def topk(
    x: Tensor, k: Tensor, axis: Tensor, ascending: Tensor, sort: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(
        _wide(x), int(k), int(axis), largest=not bool(ascending), sorted=bool(sort)
    )
    return values, indices


def reshape(x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape(_ints(shape))


def transpose(x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(_ints(perm))


def expand_dims(x: Tensor, axes: Tensor) -> Tensor:
    for axis in _ints(axes):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(_ints(axes), reverse=True):
        x = x.squeeze(axis)
    return x


def stack(values: list[Tensor], axis: Tensor) -> Tensor:
    return torch.stack(values, int(axis))


def concat(values: list[Tensor], axis: Tensor, **_: Any) -> Tensor:
    return torch.cat(values, int(axis))


def split(
    x: Tensor, axis: Tensor, split_sizes: Tensor | None = None, num_splits: Tensor | None = None
) -> tuple[Tensor, ...]:
    if split_sizes is not None:
        return tuple(torch.split(x, _ints(split_sizes), int(axis)))
    assert num_splits is not None
    return tuple(torch.chunk(x, int(num_splits), int(axis)))


def gather(x: Tensor, indices: Tensor, axis: Tensor, **_: Any) -> Tensor:
    at = int(axis)
    found = torch.index_select(x, at, indices.long().reshape(-1))
    return found.reshape(x.shape[:at] + tuple(indices.shape) + x.shape[at + 1 :])


def gather_along_axis(x: Tensor, indices: Tensor, axis: Tensor, **_: Any) -> Tensor:
    return torch.gather(x, int(axis), indices.long())


def pad(x: Tensor, pad: Tensor, mode: str, constant_val: Tensor) -> Tensor:
    if mode != "constant":
        raise ValueError(f"padding {mode} is not used by these programs")
    sizes = _ints(pad)
    reverse = [v for at in reversed(range(len(sizes) // 2)) for v in sizes[2 * at : 2 * at + 2]]
    return F.pad(x, reverse, value=float(constant_val))


def _slices(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    stride: Tensor | None = None,
    begin_mask: Tensor | None = None,
    end_mask: Tensor | None = None,
    squeeze_mask: Tensor | None = None,
) -> tuple[int | slice, ...]:
    rank = x.dim()
    first, last = _ints(begin), _ints(end)
    steps = [1] * rank if stride is None else _ints(stride)

    def flags(mask: Tensor | None) -> list[bool]:
        return [False] * rank if mask is None else [bool(v) for v in mask.reshape(-1)]

    from_start, to_end, dropped = flags(begin_mask), flags(end_mask), flags(squeeze_mask)
    return tuple(
        first[i]
        if dropped[i]
        else slice(None if from_start[i] else first[i], None if to_end[i] else last[i], steps[i])
        for i in range(rank)
    )


def slice_by_index(x: Tensor, **where: Any) -> Tensor:
    return x[_slices(x, **where)]


def slice_update(x: Tensor, update: Tensor, **where: Any) -> Tensor:
    changed = x.clone()
    changed[_slices(x, **where)] = update.to(changed.dtype)
    return changed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(_wide(x), _wide(weight), None if bias is None else _wide(bias))


def matmul(
    x: Tensor, y: Tensor, transpose_x: Tensor | None = None, transpose_y: Tensor | None = None
) -> Tensor:
    left, right = _wide(x), _wide(y)
    if transpose_x is not None and bool(transpose_x):
        left = left.transpose(-1, -2)
    if transpose_y is not None and bool(transpose_y):
        right = right.transpose(-1, -2)
    product: Tensor = left @ right
    return product


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Tensor | None = None,
    pad_type: str = "valid",
    pad: Tensor | None = None,
    dilations: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    if pad_type not in ("valid", "custom") or (
        pad_type == "custom" and pad is not None and any(_ints(pad))
    ):
        raise ValueError(f"padding {pad_type} of a convolution is not used by these programs")
    return F.conv1d(
        _wide(x),
        _wide(weight),
        None if bias is None else _wide(bias),
        1 if strides is None else _ints(strides)[0],
        0,
        1 if dilations is None else _ints(dilations)[0],
        1 if groups is None else int(groups),
    )


def layer_norm(x: Tensor, axes: Tensor, gamma: Tensor, beta: Tensor, epsilon: Tensor) -> Tensor:
    shape = [x.shape[axis] for axis in _ints(axes)]
    return F.layer_norm(_wide(x), shape, _wide(gamma), _wide(beta), float(epsilon))


def constexpr_blockwise_shift_scale(
    data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> Tensor:
    """scale * (data - offset), each scale and offset for a block of the data."""

    def spread(small: Tensor) -> Tensor:
        for axis, (whole, part) in enumerate(zip(data.shape, small.shape, strict=True)):
            if whole != part:
                small = small.repeat_interleave(whole // part, axis)
        return small

    shifted = data.float() if offset is None else data.float() - spread(offset.float())
    return shifted * spread(scale.float())


OPERATIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        mul, add, sub, real_div, maximum, minimum, sin, exp, tanh, silu, square, gelu, rsqrt, clip,
        cast, greater_equal, less_equal, less, equal, logical_or, logical_and, select, identity,
        reduce_mean, reduce_sum, reduce_log_sum_exp, reduce_argmax, softmax, cumsum, topk, reshape,
        transpose, expand_dims, squeeze, stack, concat, split, gather, gather_along_axis, pad,
        slice_by_index, slice_update, linear, matmul, conv, layer_norm,
        constexpr_blockwise_shift_scale,
    )
}  # fmt: skip
