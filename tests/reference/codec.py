"""The neural codec: waves to ten codes per frame and back. Float32, whole, nothing carried.

Written as functions over the folded tensors of the checkpoint. Shapes: B rows, C channels, N steps,
T frames; channels first, as stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.rope import rope_table, rotate
from reference.transformer import attend, rms_norm
from warble_mlx.config import (
    DECODER_STRIDES,
    ENCODER_STRIDES,
    RESAMPLE_STRIDES,
    ModelConfig,
    TransformerConfig,
)

DILATIONS = (1, 3, 9)


class Encoded(NamedTuple):
    """Codes [B, 10, T] (-1 after a row's end), frames per row, and how clearly each code won:
    the squared distance of the second best entry less that of the best, [B, 10, T]."""

    codes: Tensor
    lengths: list[int]
    margins: Tensor


class Codec:
    """One checkpoint's codec."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._weights = weights
        self.unread = set(weights)  # tensors that no pass has asked for yet

    @property
    def can_encode(self) -> bool:
        """Whether the encoding half is there."""
        return "encoder.block.0.conv.weight" in self._weights

    def __getitem__(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self._weights[name]

    # ------------------------------------------------------------------ layers

    def conv(self, x: Tensor, name: str, *, stride: int = 1, dilation: int = 1) -> Tensor:
        """Causal convolution: zeros on the left, and on the right to complete the last stride."""
        weight = self[f"{name}.weight"]
        reach = (weight.shape[2] - 1) * dilation + 1
        x = F.pad(x, (reach - stride, -x.shape[2] % stride))
        groups = x.shape[1] // weight.shape[1]
        return F.conv1d(x, weight, self[f"{name}.bias"], stride, 0, dilation, groups)

    def transposed(self, x: Tensor, name: str, stride: int) -> Tensor:
        """Causal transposed convolution: what reaches beyond the input's end is cut off."""
        y = F.conv_transpose1d(x, self[f"{name}.weight"], self[f"{name}.bias"], stride)
        return y[:, :, : x.shape[2] * stride]

    def snake(self, x: Tensor, name: str) -> Tensor:
        """x + sin(a x)^2 / a."""
        a = self[f"{name}.alpha"]
        return x + torch.sin(a * x).square() / (a + 1e-9)

    def residual_unit(self, x: Tensor, name: str, dilation: int) -> Tensor:
        """[B, C, N] to [B, C, N]."""
        y = self.conv(self.snake(x, f"{name}.block.0"), f"{name}.block.1.conv", dilation=dilation)
        return x + self.conv(self.snake(y, f"{name}.block.2"), f"{name}.block.3.conv")

    def convnext(self, x: Tensor, name: str) -> Tensor:
        """[B, C, N] to [B, C, N]."""
        y = self.conv(x, f"{name}.dwconv.conv").transpose(1, 2)
        y = F.layer_norm(
            y, y.shape[-1:], self[f"{name}.norm.weight"], self[f"{name}.norm.bias"], 1e-6
        )
        y = F.gelu(F.linear(y, self[f"{name}.pwconv1.weight"], self[f"{name}.pwconv1.bias"]))
        y = F.linear(y, self[f"{name}.pwconv2.weight"], self[f"{name}.pwconv2.bias"])
        return x + (self[f"{name}.gamma"] * y).transpose(1, 2)

    def window_transformer(self, x: Tensor, name: str, c: TransformerConfig, window: int) -> Tensor:
        """[B, C, N] to [B, C, N]. Position q sees keys max(0, q - window + 1)..q."""
        x = x.transpose(1, 2)
        rope = rope_table(x.shape[1], c.head_dim, c.rope_base).to(x.device)[None]
        at = torch.arange(x.shape[1], device=x.device)
        mask = ((at <= at[:, None]) & (at > at[:, None] - window))[None]
        for i in range(c.n_layer):
            x = self._window_block(x, f"{name}.layers.{i}", c, rope, mask)
        return rms_norm(x, self[f"{name}.norm.weight"], c.norm_eps).transpose(1, 2)

    def _window_block(
        self, x: Tensor, name: str, c: TransformerConfig, rope: Tensor, mask: Tensor
    ) -> Tensor:
        n = rms_norm(x, self[f"{name}.attention_norm.weight"], c.norm_eps)
        heads = F.linear(n, self[f"{name}.attention.wqkv.weight"]).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.transpose(1, 2).split([c.n_head, c.n_kv_head, c.n_kv_head], dim=1)
        y = attend(rotate(q, rope), rotate(k, rope), v, mask).transpose(1, 2).flatten(-2)
        y = F.linear(y, self[f"{name}.attention.wo.weight"])
        x = x + self[f"{name}.attention_layer_scale.gamma"] * y
        n = rms_norm(x, self[f"{name}.ffn_norm.weight"], c.norm_eps)
        w1, w2, w3 = (self[f"{name}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        y = F.linear(F.silu(F.linear(n, w1)) * F.linear(n, w3), w2)
        return x + self[f"{name}.ffn_layer_scale.gamma"] * y

    # ------------------------------------------------------------------ codes to a wave

    def _books(self) -> list[str]:
        residual = [f"quantizer.quantizer.quantizers.{i}" for i in range(9)]
        return ["quantizer.semantic_quantizer.quantizers.0", *residual]

    def _entry(self, codes: Tensor, book: str) -> Tensor:
        """Codes [B, T] to their vectors [B, C, T]; a code outside its book is clamped into it."""
        table = self[f"{book}.codebook.weight"]
        rows = table[codes.clamp(0, len(table) - 1)].transpose(1, 2)
        return F.conv1d(rows, self[f"{book}.out_proj.weight"], self[f"{book}.out_proj.bias"])

    def dequantise(self, codes: Tensor) -> Tensor:
        """Codes [B, 10, T] to the sum of their vectors [B, C, T]."""
        return torch.stack([self._entry(codes[:, i], b) for i, b in enumerate(self._books())]).sum(
            0
        )

    def latents(self, summed: Tensor) -> Tensor:
        """Summed vectors [B, C, T] to the decoder's input [B, C, 4 T]."""
        c = self.config
        post, window = c.codec_transformer("post"), c.codec_window_size
        x = self.window_transformer(summed, "quantizer.post_module", post, window)
        for i, stride in enumerate(RESAMPLE_STRIDES):
            x = self.transposed(x, f"quantizer.upsample.{i}.0.conv", stride)
            x = self.convnext(x, f"quantizer.upsample.{i}.1")
        return x

    def wave(self, latents: Tensor) -> Tensor:
        """Latents [B, C, 4 T] to samples [B, 2048 T]."""
        x = self.conv(latents, "decoder.model.0.conv")
        for i, stride in enumerate(DECODER_STRIDES, 1):
            name = f"decoder.model.{i}.block"
            x = self.transposed(self.snake(x, f"{name}.0"), f"{name}.1.conv", stride)
            for unit, dilation in enumerate(DILATIONS, 2):
                x = self.residual_unit(x, f"{name}.{unit}", dilation)
        x = self.conv(self.snake(x, "decoder.model.5"), "decoder.model.6.conv")
        return torch.tanh(x[:, 0])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, 10, T] to samples [B, 2048 T]."""
        return self.wave(self.latents(self.dequantise(codes)))

    # ------------------------------------------------------------------ a wave to codes

    def encoder(self, samples: Tensor) -> Tensor:
        """Samples [B, 512 N] to latents [B, C, N]."""
        c = self.config
        x = self.conv(samples[:, None], "encoder.block.0.conv")
        for i, stride in enumerate(ENCODER_STRIDES, 1):
            name = f"encoder.block.{i}.block"
            for unit, dilation in enumerate(DILATIONS):
                x = self.residual_unit(x, f"{name}.{unit}", dilation)
            x = self.conv(self.snake(x, f"{name}.3"), f"{name}.4.conv", stride=stride)
            transformer = c.codec_transformer(f"encoder.{i}")
            if transformer.n_layer:
                window = c.codec_encoder_window_size
                x = self.window_transformer(x, f"{name}.5", transformer, window)
        return self.conv(self.snake(x, "encoder.block.5"), "encoder.block.6.conv")

    def downsampled(self, latents: Tensor) -> Tensor:
        """Latents [B, C, 4 T] to the quantisers' input [B, C, T]."""
        c, x = self.config, latents
        for i, stride in enumerate(RESAMPLE_STRIDES):
            x = self.conv(x, f"quantizer.downsample.{i}.0.conv", stride=stride)
            x = self.convnext(x, f"quantizer.downsample.{i}.1")
        pre, window = c.codec_transformer("pre"), c.codec_window_size
        return self.window_transformer(x, "quantizer.pre_module", pre, window)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C, T] to codes and margins [B, 10, T]: each book codes what is left by the others."""
        codes, margins = [], []
        for book in self._books():
            inner = F.conv1d(x, self[f"{book}.in_proj.weight"], self[f"{book}.in_proj.bias"])
            table = F.normalize(self[f"{book}.codebook.weight"], eps=1e-12)
            cosine = F.normalize(inner, dim=1, eps=1e-12).transpose(1, 2) @ table.T
            best, second = cosine.topk(2).values.unbind(-1)
            codes.append(cosine.argmax(dim=-1))
            margins.append(2 * (best - second))  # of squared distances between unit vectors
            x = x - self._entry(codes[-1], book)
        return torch.stack(codes, dim=1), torch.stack(margins, dim=1)

    @torch.no_grad()
    def encode(self, samples: Tensor, lengths: list[int] | None = None) -> Encoded:
        """Samples [B, N] in -1..1, `lengths` of them in each row, to codes."""
        frame = self.config.codec_frame_size
        lengths = [samples.shape[1]] * len(samples) if lengths is None else lengths
        frames = [math.ceil(torch.tensor(n / frame, dtype=torch.float32)) for n in lengths]
        padded = F.pad(samples, (0, -samples.shape[1] % frame))
        codes, margins = self.quantise(self.downsampled(self.encoder(padded)))
        for row, count in enumerate(frames):
            codes[row, :, count:] = -1
        return Encoded(codes, frames, margins)
