"""The codec's decoding half in PyTorch, in the form that Core ML converts and computes well.

`PostModule` is the books and the window transformer with its keys and values as state; `Vocoder`
is everything behind it. Channels first. The vocoder differs from the runtime's in form only:

* transposed convolutions are plain ones whose channels are interleaved (a kernel of s or 2 s taps
  at stride s is one of 1 or 2 taps that gives s values), for which every Apple backend is right;
* it carries nothing: it is given `context` latent frames of history, and after each level it drops
  what no later level looks at, so that the work per frame stays near that of one long run;
* `hist` says how many of those frames exist. Before the first sample the reference pads every
  level with zeros, which is not what zero latents become behind a bias, so the levels are masked.

PyTorch only writes the graphs down: nothing here is used to speak.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from warble_mlx.config import (
    CODEC_NORM_EPS,
    CODEC_ROPE_BASE,
    DECODER_STRIDES,
    NUM_CODEBOOKS,
    RESAMPLE_STRIDES,
    ModelConfig,
)
from warble_mlx.ios_export.torch_layers import MASKED, Block, RMSNorm, Weights, below, rope_tables

KERNEL = 7
DILATIONS = (1, 3, 9)


class PostModule(nn.Module):
    """Codes int32 [1, 10, N] at positions from `position` int32 [1] to latents [1, D, N].

    State: `past_keys` and `past_values` [layers, K, window - 1, head_dim], zeros before the start.
    """

    def __init__(self, config: ModelConfig, weights: Weights, frames: int) -> None:
        super().__init__()
        c = config.codec_transformer("post")
        self.frames, self.past = frames, config.codec_window_size - 1
        sizes = [config.codec_semantic_codebook_size]
        sizes += [config.codec_residual_codebook_size] * (NUM_CODEBOOKS - 1)
        for book in range(NUM_CODEBOOKS):
            self.register_buffer(f"book_{book}", _book(weights, book))
        self.sizes = sizes
        places = [f"quantizer.post_module.layers.{i}." for i in range(c.n_layer)]
        self.layers = nn.ModuleList(Block(c, below(weights, place)) for place in places)
        self.scales = nn.ParameterList()
        for i in range(c.n_layer):
            for branch in ("attention", "ffn"):
                name = f"quantizer.post_module.layers.{i}.{branch}_layer_scale.gamma"
                self.scales.append(nn.Parameter(_tensor(weights(name))))
        self.norm = RMSNorm(weights("quantizer.post_module.norm.weight"), CODEC_NORM_EPS)
        cos, sin = rope_tables(config.max_seq_len, c.head_dim, CODEC_ROPE_BASE)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        shape = (c.n_layer, c.n_kv_head, self.past, c.head_dim)
        self.register_buffer("past_keys", torch.zeros(shape))
        self.register_buffer("past_values", torch.zeros(shape))
        slot, query = torch.arange(self.past + frames), torch.arange(frames)[:, None]
        band = (slot >= query) & (slot <= query + self.past)
        self.register_buffer("band", torch.where(band, 0.0, MASKED))
        self.register_buffer("slot", slot.to(torch.int32))

    def forward(self, codes: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(())
        for book, size in enumerate(self.sizes):
            known = torch.clamp(codes[:, book], 0, size - 1)
            x = x + F.embedding(known, getattr(self, f"book_{book}"))
        where = position + torch.arange(self.frames, dtype=torch.int32)
        cos, sin = self.cos[where], self.sin[where]
        exists = (self.slot + position >= self.past).to(x.dtype)
        mask = torch.minimum(self.band, (exists - 1.0) * -MASKED)
        for i, layer in enumerate(self.layers):
            q, k, v = layer.attention.heads(layer.attention_norm(x), cos, sin)
            keys = torch.cat((self.past_keys[i : i + 1], k), 2)
            values = torch.cat((self.past_values[i : i + 1], v), 2)
            self.past_keys[i : i + 1] = keys[:, :, self.frames :]
            self.past_values[i : i + 1] = values[:, :, self.frames :]
            x = x + self.scales[2 * i] * layer.attention.attend(q, keys, values, mask)
            x = x + self.scales[2 * i + 1] * layer.feed_forward(layer.ffn_norm(x))
        normed: torch.Tensor = self.norm(x)
        return normed.transpose(1, 2)


def _book(weights: Weights, book: int) -> torch.Tensor:
    """Codebook rows behind their projection, [entries, D]: one gather instead of two products."""
    place = "semantic_quantizer.quantizers.0" if book == 0 else f"quantizer.quantizers.{book - 1}"
    rows = weights(f"quantizer.{place}.codebook.weight")
    out = weights(f"quantizer.{place}.out_proj.weight")[:, 0]
    return _tensor(rows @ out.T + weights(f"quantizer.{place}.out_proj.bias"))


class Vocoder(nn.Module):
    """Latents [1, D, context + N] of which `hist` int32 [1] (0 … context) of the history exist, to
    samples [1, 1, N * frame_size]."""

    def __init__(self, config: ModelConfig, weights: Weights, frames: int) -> None:
        super().__init__()
        self.frames = frames
        self.context, self.resampled, self.decoded = extents()
        self.upsample = nn.ModuleList()
        for i, stride in enumerate(RESAMPLE_STRIDES):
            place = f"quantizer.upsample.{i}"
            self.upsample.append(Interleaved(weights, f"{place}.0.conv", stride))
            self.upsample.append(ConvNeXt(weights, f"{place}.1"))
        self.first = CausalConv(weights, "decoder.model.0.conv")
        self.blocks = nn.ModuleList()
        for i, stride in enumerate(DECODER_STRIDES, start=1):
            place = f"decoder.model.{i}.block"
            parts = [Snake(weights, f"{place}.0.alpha")]
            parts.append(Interleaved(weights, f"{place}.1.conv", stride))
            parts += [
                Residual(weights, f"{place}.{j}.block", dilation)
                for j, dilation in enumerate(DILATIONS, start=2)
            ]
            self.blocks.append(nn.ModuleList(parts))
        self.snake = Snake(weights, f"decoder.model.{len(DECODER_STRIDES) + 1}.alpha")
        self.last = CausalConv(weights, f"decoder.model.{len(DECODER_STRIDES) + 2}.conv")

    def forward(self, latents: torch.Tensor, hist: torch.Tensor) -> torch.Tensor:
        extent, rate = self.context, 1
        x = _existing(latents, extent, rate, hist)
        for stage, stride in enumerate(RESAMPLE_STRIDES):
            x, rate, extent = self.upsample[2 * stage](x), rate * stride, self.resampled[stage]
            x = _existing(self._cropped(x, rate, extent), extent, rate, hist)
            x = _existing(self.upsample[2 * stage + 1](x), extent, rate, hist)
        x = _existing(self.first(x), extent, rate, hist)
        for block, stride, wanted in zip(self.blocks, DECODER_STRIDES, self.decoded, strict=True):
            snake, convolution, *units = block
            x, rate, extent = convolution(snake(x)), rate * stride, wanted
            x = _existing(self._cropped(x, rate, extent), extent, rate, hist)
            for unit in units:
                x = _existing(unit(x), extent, rate, hist)
        wave: torch.Tensor = torch.tanh(self.last(self.snake(x)))
        return wave[..., -self.frames * rate :]

    def _cropped(self, x: torch.Tensor, rate: int, extent: int) -> torch.Tensor:
        return x[..., x.shape[-1] - (self.frames * rate + extent) :]


def extents() -> tuple[int, list[int], list[int]]:
    """History that each level has to keep: latent frames at the input, then values behind each
    upsampling stage and behind each decoder block's transposed convolution."""
    extent, decoded, resampled = KERNEL - 1, [], []
    for stride in reversed(DECODER_STRIDES):
        extent += (KERNEL - 1) * sum(DILATIONS)
        decoded.append(extent)
        extent = math.ceil((extent + 2 * stride - 1) / stride)
    extent += KERNEL - 1
    for stride in reversed(RESAMPLE_STRIDES):
        extent += KERNEL - 1
        resampled.append(extent)
        extent = math.ceil((extent + stride - 1) / stride)
    return extent, resampled[::-1], decoded[::-1]


def _existing(x: torch.Tensor, extent: int, rate: int, hist: torch.Tensor) -> torch.Tensor:
    """x with zeros where its history of `extent` values does not exist yet."""
    place = torch.arange(x.shape[-1], dtype=torch.int32)
    return x * (place >= (extent - hist * rate)).to(x.dtype)[None, None]


class Snake(nn.Module):
    """x + sin(a x)^2 / (a + 1e-9)."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        alpha = weights(name).reshape(1, -1, 1)
        self.register_buffer("alpha", _tensor(alpha))
        self.register_buffer("inverse", _tensor(1 / (alpha + 1e-9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = torch.sin(self.alpha * x)
        return x + self.inverse * (wave * wave)


class CausalConv(nn.Module):
    """Convolution with zeros on the left, from a weight [out, k, in / groups]."""

    def __init__(self, weights: Weights, name: str, dilation: int = 1) -> None:
        super().__init__()
        weight = weights(f"{name}.weight").transpose(0, 2, 1)
        out, inputs, kernel = weight.shape
        groups = out if inputs == 1 and out > 1 else 1
        self.padding = (kernel - 1) * dilation
        self.conv = nn.Conv1d(inputs * groups, out, kernel, dilation=dilation, groups=groups)
        _fill(self.conv, weight, weights(f"{name}.bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (self.padding, 0)) if self.padding else x
        result: torch.Tensor = self.conv(padded)
        return result


class Interleaved(nn.Module):
    """Transposed convolution of one or two strides, cut at the right, as a plain convolution that
    gives the `stride` values of each input side by side. Weight [out, k, in]."""

    def __init__(self, weights: Weights, name: str, stride: int) -> None:
        super().__init__()
        weight = weights(f"{name}.weight")
        self.out, kernel, inputs = weight.shape
        self.stride, self.taps = stride, kernel // stride
        plain = np.zeros((self.out, stride, inputs, self.taps), np.float32)
        for tap in range(self.taps):  # input t - tap
            plain[..., self.taps - 1 - tap] = weight[:, tap * stride : (tap + 1) * stride]
        self.conv = nn.Conv1d(inputs, self.out * stride, self.taps)
        bias = np.repeat(weights(f"{name}.bias"), stride)
        _fill(self.conv, plain.reshape(self.out * stride, inputs, self.taps), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        y = self.conv(F.pad(x, (self.taps - 1, 0)) if self.taps > 1 else x)
        y = y.view(1, self.out, self.stride, length).transpose(2, 3)
        return y.reshape(1, self.out, length * self.stride)


class Residual(nn.Module):
    """x + conv1(snake(conv7(snake(x))))."""

    def __init__(self, weights: Weights, place: str, dilation: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            Snake(weights, f"{place}.0.alpha"),
            CausalConv(weights, f"{place}.1.conv", dilation),
            Snake(weights, f"{place}.2.alpha"),
            CausalConv(weights, f"{place}.3.conv"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.parts(x)
        return result


class ConvNeXt(nn.Module):
    """Depthwise convolution and a pointwise MLP, scaled and added to the input."""

    def __init__(self, weights: Weights, place: str) -> None:
        super().__init__()
        self.dwconv = CausalConv(weights, f"{place}.dwconv.conv")
        scale = weights(f"{place}.norm.weight")
        self.norm = nn.LayerNorm(len(scale), eps=1e-6)
        _fill(self.norm, scale, weights(f"{place}.norm.bias"))
        self.wide = _linear(weights, f"{place}.pwconv1")
        self.narrow = _linear(weights, f"{place}.pwconv2")
        self.register_buffer("gamma", _tensor(weights(f"{place}.gamma")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.dwconv(x).transpose(1, 2))
        y = self.gamma * self.narrow(F.gelu(self.wide(y)))
        return x + y.transpose(1, 2)


def _linear(weights: Weights, name: str) -> nn.Linear:
    weight = weights(f"{name}.weight")
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    _fill(linear, weight, weights(f"{name}.bias"))
    return linear


def _fill(
    module: nn.Module, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32]
) -> None:
    module.weight = nn.Parameter(_tensor(weight))
    module.bias = nn.Parameter(_tensor(bias))


def _tensor(values: npt.NDArray[np.floating]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32).copy())
