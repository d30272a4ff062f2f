"""Vector quantisers of the codec and the layers between them and the latents.

Ten books: one semantic, nine residual. The decoder half owns the codebooks and the projections
out of them, the encoder half the projections into them; encoding needs both.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn

from warble_mlx.codec.carry import Carry
from warble_mlx.codec.convolution import CausalConv, CausalTransposedConv, ConvNeXt
from warble_mlx.codec.transformer import WindowTransformer
from warble_mlx.config import NUM_CODEBOOKS, RESAMPLE_STRIDES, ModelConfig


class Book(nn.Module):
    """One codebook and the projection out of it."""

    def __init__(self, size: int, codebook_dim: int, latent_dim: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(size, codebook_dim)
        self.out_proj = nn.Conv1d(codebook_dim, latent_dim, 1)

    def __call__(self, codes: mx.array) -> mx.array:
        """Codes [B, T] to vectors [B, T, D]. Codes outside the book are clamped into it."""
        known = mx.clip(codes, 0, self.codebook.weight.shape[0] - 1)
        rows = self.codebook.weight[known]
        return mx.addmm(self.out_proj.bias, rows, self.out_proj.weight[:, 0].T)


class BookSearch(nn.Module):
    """The projection into one codebook."""

    def __init__(self, codebook_dim: int, latent_dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Conv1d(latent_dim, codebook_dim, 1)

    def __call__(self, x: mx.array, book: Book) -> mx.array:
        """Latents [B, T, D] to the nearest codes of `book`, int32 [B, T].

        Nearest by the angle of the projection, in float32; ties go to the lowest code.
        """
        projected = mx.addmm(self.in_proj.bias, x, self.in_proj.weight[:, 0].T)
        similarity = _normalised(projected) @ _normalised(book.codebook.weight).T
        return mx.argmax(similarity, axis=-1).astype(mx.int32)


def _normalised(x: mx.array) -> mx.array:
    x = x.astype(mx.float32)
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


Quantizer = TypeVar("Quantizer", Book, BookSearch)


class Books(nn.Module, Generic[Quantizer]):
    """A list of quantisers, under the name the tensors have."""

    def __init__(self, quantizers: list[Quantizer]) -> None:
        super().__init__()
        self.quantizers: list[Quantizer] = quantizers


def _book_sizes(config: ModelConfig) -> list[int]:
    residual = [config.codec_residual_codebook_size] * (NUM_CODEBOOKS - 1)
    return [config.codec_semantic_codebook_size, *residual]


class DequantizingHalf(nn.Module):
    """Codes to latents: books, post_module, upsampling."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.codec_latent_dim
        first, *rest = (Book(n, config.codec_codebook_dim, dim) for n in _book_sizes(config))
        self.semantic_quantizer = Books([first])
        self.quantizer = Books([*rest])
        self.post_module = WindowTransformer(
            config.codec_transformer("post"), config.codec_window_size
        )
        self.upsample = [
            [CausalTransposedConv(dim, dim, stride, stride), ConvNeXt(dim)]
            for stride in RESAMPLE_STRIDES
        ]

    def books(self) -> list[Book]:
        """The ten books in the order of the codes' rows."""
        return [*self.semantic_quantizer.quantizers, *self.quantizer.quantizers]

    def dequantize(self, codes: mx.array) -> mx.array:
        """Codes [B, 10, T] to the sum of their vectors, [B, T, D]."""
        vectors = [book(codes[:, i]) for i, book in enumerate(self.books())]
        total = vectors[0]
        for vector in vectors[1:]:
            total = total + vector
        return total

    def __call__(self, codes: mx.array, carry: Carry) -> mx.array:
        """Codes [B, 10, T] to latents [B, 4 T, D]."""
        x = self.post_module(self.dequantize(codes), carry)
        for stage in self.upsample:
            for layer in stage:
                x = layer(x, carry)
        return x


class QuantizingHalf(nn.Module):
    """Latents to codes: downsampling, pre_module, search in the books."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.codec_latent_dim
        first, *rest = (BookSearch(config.codec_codebook_dim, dim) for _ in _book_sizes(config))
        self.semantic_quantizer = Books([first])
        self.quantizer = Books([*rest])
        self.pre_module = WindowTransformer(
            config.codec_transformer("pre"), config.codec_window_size
        )
        self.downsample = [
            [CausalConv(dim, dim, stride, stride=stride), ConvNeXt(dim)]
            for stride in RESAMPLE_STRIDES
        ]

    def searches(self) -> list[BookSearch]:
        """The ten searches in the order of the codes' rows."""
        return [*self.semantic_quantizer.quantizers, *self.quantizer.quantizers]

    def quantize(self, x: mx.array, books: list[Book]) -> mx.array:
        """pre_module outputs [B, T, D] to codes, int32 [B, 10, T].

        Each book codes what the books before it left over.
        """
        codes = []
        for search, book in zip(self.searches(), books, strict=True):
            found = search(x, book)
            codes.append(found)
            x = x - book(found)
        return mx.stack(codes, axis=1)

    def __call__(self, x: mx.array, books: list[Book], carry: Carry) -> mx.array:
        """Latents [B, 4 T, D] to codes, int32 [B, 10, T]."""
        for stage in self.downsample:
            for layer in stage:
                x = layer(x, carry)
        return self.quantize(self.pre_module(x, carry), books)
