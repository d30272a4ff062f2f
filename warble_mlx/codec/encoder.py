"""Samples to codes. Used once per registered voice.

A clip runs through in chunks with carried state, as in decoding: the first layers are 64 channels
wide at 44.1 kHz, and half a minute of that in one piece would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx.codec.carry import Carry, State
from warble_mlx.codec.convolution import CausalConv, ResidualUnit, Snake, chunk_frames_for
from warble_mlx.codec.quantizer import DequantizingHalf, QuantizingHalf
from warble_mlx.codec.transformer import WindowTransformer
from warble_mlx.config import ENCODER_STRIDES, ModelConfig
from warble_mlx.errors import WarbleError

PADDING_CODE = -1


class EncoderBlock(nn.Module):
    """Three residual units, Snake, strided convolution, and in some blocks a transformer."""

    def __init__(self, config: ModelConfig, number: int, stride: int) -> None:
        super().__init__()
        transformer = config.codec_transformer(f"encoder.{number}")
        outputs = transformer.dim
        inputs = outputs // 2
        self.block: list[nn.Module] = [
            *(ResidualUnit(inputs, dilation) for dilation in (1, 3, 9)),
            Snake(inputs),
            CausalConv(inputs, outputs, 2 * stride, stride=stride),
        ]
        if transformer.n_layer:
            self.block.append(WindowTransformer(transformer, config.codec_encoder_window_size))

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, C] to [B, N / stride, 2 C]."""
        for layer in self.block:
            x = layer(x, carry)
        return x


class WaveEncoder(nn.Module):
    """Samples to latents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.codec_encoder_dim
        self.block: list[nn.Module] = [CausalConv(1, width, 7)]
        for number, stride in enumerate(ENCODER_STRIDES, start=1):
            self.block.append(EncoderBlock(config, number, stride))
            width *= 2
        self.block += [Snake(width), CausalConv(width, config.codec_latent_dim, 3)]

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, 512 N, 1] to [B, N, latent_dim]."""
        for layer in self.block:
            x = layer(x, carry)
        return x


class CodecEncoder(nn.Module):
    """Samples [B, N] at the codec's rate to codes [B, 10, ceil(N / frame_size)]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.frame_size = config.codec_frame_size
        self.encoder = WaveEncoder(config)
        self.quantizer = QuantizingHalf(config)

    def encode(
        self,
        samples: mx.array,
        quantizer: DequantizingHalf,
        lengths: Sequence[int] | None = None,
        chunk_frames: int | None = None,
    ) -> tuple[mx.array, list[int]]:
        """Encode float samples [B, N] in -1..1; row i holds `lengths[i]` of them (all, if None).

        `quantizer` is the decoder's, whose codebooks are searched. Returns codes, int32
        [B, 10, T], which are -1 after a row's end, and the frames of each row. Evaluated.

        Raises WarbleError for samples of another rank or type, empty ones, and wrong lengths.
        """
        lengths = _checked_lengths(samples, lengths)
        # As the reference: the quotient is rounded to float32 before it is rounded up.
        frames = [int(np.ceil(np.float32(n) / np.float32(self.frame_size))) for n in lengths]
        rows, total = samples.shape[0], max(frames)
        padded = _silent_after(samples, lengths, total * self.frame_size)
        padded = padded.astype(self.encoder.block[0].conv.weight.dtype)
        if chunk_frames is None:
            chunk_frames = chunk_frames_for(rows * self.frame_size)
        state: State | None = None
        pieces = []
        for first in range(0, total, chunk_frames):
            part = padded[:, first * self.frame_size : (first + chunk_frames) * self.frame_size]
            carry = Carry(state)
            latents = self.encoder(part[..., None], carry)
            codes = self.quantizer(latents, quantizer.books(), carry)
            state = carry.finish()
            mx.eval(codes, state)
            pieces.append(codes)
        codes = mx.concatenate(pieces, axis=2)
        valid = mx.arange(total) < mx.array(frames)[:, None]
        codes = mx.where(valid[:, None], codes, PADDING_CODE)
        mx.eval(codes)
        return codes, frames


def _checked_lengths(samples: mx.array, lengths: Sequence[int] | None) -> list[int]:
    if samples.ndim != 2 or samples.shape[0] == 0:
        raise WarbleError(
            f"samples have the shape {samples.shape}, but the encoder reads [batch, samples];"
            " add the batch axis with samples[None]"
        )
    if not mx.issubdtype(samples.dtype, mx.floating):
        raise WarbleError(f"samples are {samples.dtype}; divide them into -1..1 as float32 first")
    rows, most = samples.shape
    checked = [most] * rows if lengths is None else list(lengths)
    if len(checked) != rows or not all(1 <= n <= most for n in checked):
        raise WarbleError(
            f"lengths are {checked} for {rows} rows of {most} samples; each row needs one,"
            f" between 1 and {most}"
        )
    return checked


def _silent_after(samples: mx.array, lengths: list[int], wanted: int) -> mx.array:
    """Samples [B, wanted], zeros after each row's length."""
    inside = mx.arange(samples.shape[1]) < mx.array(lengths)[:, None]
    silent = mx.where(inside, samples, 0)
    if wanted <= silent.shape[1]:
        return silent[:, :wanted]
    return mx.pad(silent, [(0, 0), (0, wanted - silent.shape[1])])
