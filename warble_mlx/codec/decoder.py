"""Codes to samples, chunk by chunk with carried state, or whole.

Whole decoding is the same path with chunks of a fixed size, so that there is one way only, memory
does not grow with the length, and any split of the same codes gives the same samples.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from warble_mlx.codec.carry import Carry, State
from warble_mlx.codec.convolution import (
    CausalConv,
    CausalTransposedConv,
    ResidualUnit,
    Snake,
    chunk_frames_for,
)
from warble_mlx.codec.quantizer import DequantizingHalf
from warble_mlx.config import DECODER_STRIDES, NUM_CODEBOOKS, ModelConfig
from warble_mlx.errors import WarbleError


class DecoderBlock(nn.Module):
    """Snake, transposed convolution, three residual units."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.block = [
            Snake(inputs),
            CausalTransposedConv(inputs, outputs, 2 * stride, stride),
            *(ResidualUnit(outputs, dilation) for dilation in (1, 3, 9)),
        ]

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, in] to [B, N * stride, out]."""
        for layer in self.block:
            x = layer(x, carry)
        return x


class WaveDecoder(nn.Module):
    """Latents to samples before tanh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.codec_decoder_dim
        self.model: list[nn.Module] = [CausalConv(config.codec_latent_dim, width, 7)]
        for stride in DECODER_STRIDES:
            self.model.append(DecoderBlock(width, width // 2, stride))
            width //= 2
        self.model += [Snake(width), CausalConv(width, 1, 7)]

    def __call__(self, x: mx.array, carry: Carry) -> mx.array:
        """[B, N, latent_dim] to [B, 512 N, 1]."""
        for layer in self.model:
            x = layer(x, carry)
        return x


class CodecDecoder(nn.Module):
    """Codes [B, 10, T] to samples [B, T * frame_size] at the codec's rate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.frame_size = config.codec_frame_size
        self.quantizer = DequantizingHalf(config)
        self.decoder = WaveDecoder(config)

    def initial_state(self, batch: int = 1) -> State:
        """The state before the first frame: zeros, of shapes that no later step changes."""
        if batch < 1:
            raise WarbleError(f"a codec state for {batch} rows was asked for; it needs 1 or more")
        carry = Carry()
        # Only the shapes matter: MLX is lazy, nothing of this is computed.
        self._samples(mx.zeros((batch, NUM_CODEBOOKS, 1), dtype=mx.int32), carry)
        return tuple(carry.handed)

    def step(self, codes: mx.array, state: State) -> tuple[mx.array, State]:
        """Decode the next frames.

        `codes` is [B, 10, n] of integers, values outside a book are clamped into it. Returns
        float32 samples [B, n * frame_size] in -1..1 and the state after them. A pure function
        of arrays, and lazy: evaluate samples and state together, else the graph grows.

        Raises WarbleError for codes of another shape or type and for a foreign state.
        """
        check_codes(codes)
        if codes.shape[2] == 0:
            return mx.zeros((codes.shape[0], 0)), state
        carry = Carry(state)
        samples = self._samples(codes, carry)
        return samples, carry.finish()

    def decode(self, codes: mx.array, chunk_frames: int | None = None) -> mx.array:
        """Decode codes [B, 10, T] to float32 samples [B, T * frame_size], evaluated.

        Works through `chunk_frames` frames at a time, by default as many as suit the batch.
        """
        check_codes(codes)
        rows, _, length = codes.shape
        if chunk_frames is None:
            chunk_frames = chunk_frames_for(rows * self.frame_size)
        if chunk_frames < 1:
            raise WarbleError(f"chunk_frames is {chunk_frames}; it must be 1 or more")
        if rows == 0 or length == 0:
            return mx.zeros((rows, length * self.frame_size))
        state = self.initial_state(rows)
        pieces = []
        for first in range(0, length, chunk_frames):
            samples, state = self.step(codes[..., first : first + chunk_frames], state)
            mx.eval(samples, state)
            pieces.append(samples)
        samples = mx.concatenate(pieces, axis=1)
        mx.eval(samples)
        return samples

    def _samples(self, codes: mx.array, carry: Carry) -> mx.array:
        wave = self.decoder(self.quantizer(codes, carry), carry)
        return mx.tanh(wave[..., 0].astype(mx.float32))


def check_codes(codes: mx.array) -> None:
    """Raise WarbleError unless `codes` is an integer array [B, 10, T]."""
    if codes.ndim != 3 or codes.shape[1] != NUM_CODEBOOKS:
        raise WarbleError(
            f"codes have the shape {codes.shape}, but the codec reads [batch, {NUM_CODEBOOKS},"
            " frames]; add the batch axis with codes[None] or swap the last two axes"
        )
    if not mx.issubdtype(codes.dtype, mx.integer):
        raise WarbleError(f"codes are {codes.dtype}, but code numbers must be integers")
