"""Causal convolutions of the codec, channels last, chunk by chunk with carried context.

Shapes use B rows, N time steps, C channels. Weights are [out, k, in / groups]. Which arithmetic a
convolution uses on which backend is decided in `convolve`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn as nn

from warble_mlx.codec.carry import Carry

# Some Apple GPUs compute wrong values for convolutions with more outputs than this. Chunks are
# chosen to stay below it, and what is longer all the same is cut here.
MAX_CONV_OUTPUTS = 32768

# Frames per chunk of whole clips: 12 of 2,048 samples and their context stay below that limit.
# CPU time per frame is flat from 8 upwards (4: an eighth more with the full codec, a quarter with
# a small one), memory grows by 20 MB per frame with the full codec.
MOST_CHUNK_FRAMES = 12

# sin(pi r) / r as a polynomial in r ** 2 for |r| <= 1/2: Chebyshev fit of degree 4. The square of
# the sine is off by at most 1.4e-8, below float32's own rounding.
_SINE = (3.14159264, -5.16771008, 2.55007753, -0.5982913, 0.07765766)


_gpu_forms: ContextVar[bool] = ContextVar("gpu_forms", default=False)


def on_cpu() -> bool:
    """Whether to use the forms that suit MLX's CPU backend: it is the default device, and nothing
    is being traced for a GPU elsewhere."""
    return bool(mx.default_device().type == mx.DeviceType.cpu) and not _gpu_forms.get()


@contextmanager
def gpu_forms() -> Iterator[None]:
    """Use the forms that suit a GPU on whatever device: what is traced here runs elsewhere."""
    token = _gpu_forms.set(True)
    try:
        yield
    finally:
        _gpu_forms.reset(token)


def chunk_frames_for(samples_per_frame: int) -> int:
    """Frames per chunk for whole clips; `samples_per_frame` counts all rows of the batch."""
    return max(1, min(MOST_CHUNK_FRAMES, (MAX_CONV_OUTPUTS - 1) // samples_per_frame))


def convolve(
    x: mx.array, weight: mx.array, bias: mx.array, *, stride: int = 1, dilation: int = 1
) -> mx.array:
    """Unpadded convolution of x [B, N, in] with weight [out, k, in] or depthwise [C, k, 1].

    Returns [B, (N - (k - 1) * dilation - 1) // stride + 1, out].

    On a GPU this is MLX's convolution. Its CPU kernels are slow where dilated (0.6 GMAC/s on two
    cores with OpenBLAS) and for one output channel (0.4), so there the sum over taps is written
    as matrix products: 20-70 GMAC/s and 2-8.
    """
    out, k, _ = weight.shape
    depthwise = weight.shape[2] == 1 and x.shape[2] > 1
    count = (x.shape[1] - (k - 1) * dilation - 1) // stride + 1
    if not on_cpu():
        groups = x.shape[2] if depthwise else 1
        return _conv1d(x, weight, stride, dilation, groups, count) + bias
    if depthwise:
        return _tap_products(x, weight, dilation, count) + bias
    if k == 1:
        return mx.addmm(bias, x, weight[:, 0].T)
    if stride == 1 and out == 1:
        return _project_then_shift(x, weight, dilation, count) + bias
    if stride == 1 and x.shape[2] > 1 and count >= out:
        return _shifted_products(x, weight, bias, dilation, count)
    # Few rows: copying the input k times is cheaper than copying each tap out of the weight.
    return mx.addmm(bias, _unfold(x, k, stride, dilation, count), weight.reshape(out, -1).T)


def _conv1d(
    x: mx.array, weight: mx.array, stride: int, dilation: int, groups: int, count: int
) -> mx.array:
    reach = (weight.shape[1] - 1) * dilation + 1
    longest = max(1, MAX_CONV_OUTPUTS // x.shape[0])
    pieces = [
        mx.conv1d(
            x[:, first * stride : (min(first + longest, count) - 1) * stride + reach],
            weight,
            stride=stride,
            dilation=dilation,
            groups=groups,
        )
        for first in range(0, count, longest)
    ]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)


def _tap_products(x: mx.array, weight: mx.array, dilation: int, count: int) -> mx.array:
    taps = weight[..., 0]
    total = x[:, :count] * taps[:, 0]
    for i in range(1, weight.shape[1]):
        total = total + x[:, i * dilation : i * dilation + count] * taps[:, i]
    return total


def _project_then_shift(x: mx.array, weight: mx.array, dilation: int, count: int) -> mx.array:
    taps = x @ weight[0].T
    total = taps[:, :count, :1]
    for i in range(1, weight.shape[1]):
        total = total + taps[:, i * dilation : i * dilation + count, i : i + 1]
    return total


def _shifted_products(
    x: mx.array, weight: mx.array, bias: mx.array, dilation: int, count: int
) -> mx.array:
    total = bias
    for i in range(weight.shape[1]):
        total = mx.addmm(total, x[:, i * dilation : i * dilation + count], weight[:, i].T)
    return total


def _unfold(x: mx.array, k: int, stride: int, dilation: int, count: int) -> mx.array:
    """The k inputs of each output side by side: [B, count, k * C]."""
    rows, length, channels = x.shape
    view = mx.as_strided(
        x,
        (rows, count, k, channels),
        (length * channels, stride * channels, dilation * channels, 1),
    )
    return view.reshape(rows, count, k * channels)


def snake(x: mx.array, alpha: mx.array) -> mx.array:
    """x + sin(alpha x) ** 2 / (alpha + 1e-9) in float32, cast back; alpha [1, 1, C].

    MLX's CPU sine takes 16 ns per element, most of a decode. There the square of the sine, of
    period pi, comes from a polynomial after reduction to half a period: 3 ns.
    """
    value, a = x.astype(mx.float32), alpha.astype(mx.float32)
    if on_cpu():
        turns = value * (a / math.pi)
        turns = turns - mx.round(turns)
        z = mx.square(turns)
        ratio = z * _SINE[4] + _SINE[3]
        for coefficient in (_SINE[2], _SINE[1], _SINE[0]):
            ratio = ratio * z + coefficient
        power = mx.square(ratio * turns)
    else:
        power = mx.square(mx.sin(a * value))
    return (value + power * (1 / (a + 1e-9))).astype(x.dtype)


class Snake(nn.Module):
    """Periodic activation with one frequency per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = mx.ones((1, 1, channels))

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, C] to [B, N, C]; nothing is carried."""
        return snake(x, self.alpha)


class CausalConv(nn.Module):
    """Convolution whose outputs see only earlier inputs: carries (k - 1) * dilation + 1 - stride
    inputs, [B, that, in]."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, groups=groups)
        self.stride = stride
        self.dilation = dilation
        self.context = (kernel - 1) * dilation + 1 - stride

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, in] to [B, N / stride, out]; N must be a multiple of the stride."""
        joined = carry.extend(x, self.context, axis=1)
        return convolve(
            joined,
            self.conv.weight,
            self.conv.bias,
            stride=self.stride,
            dilation=self.dilation,
        )


class CausalTransposedConv(nn.Module):
    """Transposed convolution cut at the right end: carries the part of the last input's outputs
    that later outputs are added to, [B, k - stride, out], without the bias."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        if kernel not in (stride, 2 * stride):
            raise ValueError(f"kernel {kernel} is neither one nor two strides of {stride}")
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel)
        self.stride = stride

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, in] to [B, N * stride, out]."""
        rows, length, _ = x.shape
        out, kernel, inputs = self.conv.weight.shape
        spread = x @ self.conv.weight.reshape(out * kernel, inputs).T
        spread = spread.reshape(rows, length, out, kernel).swapaxes(2, 3)
        own = spread[:, :, : self.stride]
        if kernel > self.stride:
            late = spread[:, :, self.stride :]
            tail = carry.take((rows, self.stride, out), x.dtype)
            carry.put(late[:, -1])
            own = own + mx.concatenate([tail[:, None], late[:, :-1]], axis=1)
        return (own + self.conv.bias).reshape(rows, length * self.stride, out)


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x)))), the first convolution dilated."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = [
            Snake(channels),
            CausalConv(channels, channels, 7, dilation=dilation),
            Snake(channels),
            CausalConv(channels, channels, 1),
        ]

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, C] to [B, N, C]."""
        y = x
        for layer in self.block:
            y = layer(y, carry)
        return x + y


class ConvNeXt(nn.Module):
    """Depthwise convolution and a pointwise MLP, scaled per channel and added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = mx.ones((channels,))

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, C] to [B, N, C]."""
        y = self.pwconv1(self.norm(self.dwconv(x, carry)))
        return x + self.gamma * self.pwconv2(nn.gelu(y))
