"""The codec's activation, x + sin^2(a x) / a, with the padding of the convolution behind it.

Half of a training step goes into it where every operation is a kernel of its own. On a GPU it is
one Triton kernel forward and one backward; elsewhere the formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with PyTorch for CUDA only
    triton = None

_EPS = 1e-9
_VALUES = 4096  # of a block, whatever the number of channels


def plain_snake(x: Tensor, alpha: Tensor, left: int) -> Tensor:
    out = x + torch.reciprocal(alpha + _EPS) * torch.square(torch.sin(alpha * x))
    return F.pad(out, (0, 0, left, 0)) if left else out


def snake(x: Tensor, alpha: Tensor, left: int) -> Tensor:
    """x [batch, time, channels], alpha [channels] float32, to [batch, left + time, channels] with
    zeros in front. On a GPU the channels are a power of two."""
    if triton is None or not x.is_cuda:
        return plain_snake(x, alpha.to(x.dtype), left)
    found: Tensor = _Snake.apply(x, alpha, left)
    return found


if triton is not None:

    @triton.jit
    def _forward(x_at, alpha_at, out_at, time, left, channels: tl.constexpr, rows: tl.constexpr):
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        channel = tl.arange(0, channels)
        alpha = tl.load(alpha_at + channel).to(tl.float32)[None, :]
        batch = tl.program_id(1)
        source = (batch * time + row - left)[:, None].to(tl.int64) * channels + channel[None, :]
        known = (row >= left) & (row < time + left)
        x = tl.load(x_at + source, mask=known[:, None], other=0.0).to(tl.float32)
        sine = tl.sin(alpha * x)
        out = x + sine * sine / (alpha + 1e-9)
        place = (batch * (time + left) + row)[:, None].to(tl.int64) * channels + channel[None, :]
        kind = out_at.dtype.element_ty
        tl.store(out_at + place, out.to(kind), mask=(row < time + left)[:, None])

    @triton.jit
    def _backward(
        x_at, alpha_at, grad_at, out_at, part_at, time, left,
        channels: tl.constexpr, rows: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        channel = tl.arange(0, channels)
        alpha = tl.load(alpha_at + channel).to(tl.float32)[None, :]
        batch = tl.program_id(1)
        inside = (row < time)[:, None]
        place = (batch * time + row)[:, None].to(tl.int64) * channels + channel[None, :]
        behind = (batch * (time + left) + row + left)[:, None].to(tl.int64) * channels
        behind += channel[None, :]
        x = tl.load(x_at + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_at + behind, mask=inside, other=0.0).to(tl.float32)
        sine, cosine = tl.sin(alpha * x), tl.cos(alpha * x)
        double = 2 * sine * cosine  # sin(2 a x)
        kind = out_at.dtype.element_ty
        tl.store(out_at + place, (grad * (1 + double)).to(kind), mask=inside)
        part = grad * (x * double - sine * sine / (alpha + 1e-9)) / (alpha + 1e-9)
        program = batch * tl.num_programs(0) + tl.program_id(0)
        tl.store(part_at + program * channels + channel, tl.sum(part, axis=0))


class _Snake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, left: int) -> Tensor:
        x = x.contiguous()
        batch, time, channels = x.shape
        ctx.save_for_backward(x, alpha)
        ctx.left = left
        out = torch.empty(batch, left + time, channels, dtype=x.dtype, device=x.device)
        rows = max(1, _VALUES // channels)
        grid = (-(-(left + time) // rows), batch)
        _forward[grid](x, alpha, out, time, left, channels=channels, rows=rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, alpha = ctx.saved_tensors
        batch, time, channels = x.shape
        rows = max(1, _VALUES // channels)
        grid = (-(-time // rows), batch)
        out = torch.empty_like(x)
        parts = torch.empty(grid[0] * batch, channels, device=x.device)
        _backward[grid](
            x, alpha, grad.contiguous(), out, parts, time, ctx.left, channels=channels, rows=rows
        )
        return out, parts.sum(0).to(alpha.dtype), None
