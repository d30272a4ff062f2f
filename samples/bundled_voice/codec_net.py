"""The arktts codec as a trainable network, with the tensor names of the published checkpoint.

Activations lie as [batch, time, channels], which a GPU's matrix units read as they are. Whatever a
matrix product can do is one: strided and transposed convolutions, whose kernel is a multiple of
their stride, kernels of one step, and the ends where there is a single channel; cuDNN is slow at
these. All of it is causal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samples.bundled_voice.layers import Attention, FeedForward, RMSNorm, rope_table
from samples.bundled_voice.quantiser import ResidualQuantiser
from samples.bundled_voice.snake import snake

Config = dict[str, Any]


def shifted(x: Tensor, steps: int) -> Tensor:
    """Later by so many steps of [batch, time, channels], zeros in front."""
    return F.pad(x, (0, 0, steps, 0))[:, : x.shape[1]] if steps else x


class Conv(nn.Module):
    """Causal convolution, [batch, time, inputs] to [batch, time / stride, outputs]. With a stride
    the kernel is a multiple of it and the time, too, so that nothing is padded at the end."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, stride: int = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        assert kernel % stride == 0
        assert stride == 1 or (dilation == 1 and groups == 1)
        self.conv = nn.Conv1d(
            inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups
        )
        self.left = (kernel - 1) * dilation + 1 - stride

    def padded(self, x: Tensor) -> Tensor:
        """The result for an input that has `left` steps in front already."""
        conv = self.conv
        weight, groups = conv.weight, conv.groups
        (kernel,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
        if stride > 1:  # blocks of `stride` steps times the part of the kernel that meets them
            blocks = x.unflatten(1, (-1, stride)).flatten(2)
            parts = weight.unflatten(2, (-1, stride)).permute(2, 0, 3, 1).flatten(2)
            time = blocks.shape[1] - len(parts) + 1
            out = F.linear(blocks[:, :time], parts[0], conv.bias)
            for i in range(1, len(parts)):
                out = out + F.linear(blocks[:, i : i + time], parts[i])
            return out
        if kernel == 1:
            return F.linear(x, weight.squeeze(-1), conv.bias)
        if x.shape[2] == 1:
            return F.linear(x.squeeze(2).unfold(1, kernel, 1), weight.squeeze(1), conv.bias)
        if weight.shape[0] == 1:
            taps = F.linear(x, weight[0].t())
            time = x.shape[1] - kernel + 1
            each = [taps[:, i : i + time, i] for i in range(kernel)]
            return (torch.stack(each).sum(0) + conv.bias).unsqueeze(2)
        image = x.transpose(1, 2).unsqueeze(2)  # [batch, channels, 1, time], channels innermost
        out = F.conv2d(image, weight.unsqueeze(2), conv.bias, 1, 0, (1, dilation), groups)
        return out.squeeze(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.padded(F.pad(x, (0, 0, self.left, 0)))


class TransposedConv(nn.Module):
    """[batch, time, inputs] to [batch, time * stride, outputs]; the kernel is a multiple of the
    stride, and what reaches beyond the end is dropped."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        assert kernel % stride == 0
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride=stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        parts = self.conv.weight.unflatten(2, (-1, self.stride)).permute(2, 3, 1, 0)
        bias = self.conv.bias
        assert bias is not None
        out = torch.zeros((), device=x.device)
        for i, part in enumerate(parts):  # [stride, outputs, inputs]
            out = out + shifted(F.linear(x, part.flatten(0, 1)), i)
        return (out.unflatten(2, (self.stride, -1)) + bias.to(out.dtype)).flatten(1, 2)


class Snake(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor, left: int = 0) -> Tensor:
        return snake(x, self.alpha.flatten(), left)


def activated(before: nn.Module, conv: nn.Module, x: Tensor) -> Tensor:
    """Snake, then a causal convolution whose padding is made in the same go."""
    assert isinstance(conv, Conv)
    return conv.padded(before(x, conv.left))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                Snake(channels),
                Conv(channels, channels, 7, dilation=dilation),
                Snake(channels),
                Conv(channels, channels, 1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = activated(self.block[0], self.block[1], x)
        return x + activated(self.block[2], self.block[3], inner)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, groups, 64)
        self.feed_forward = FeedForward(width, inner)
        self.ffn_norm, self.attention_norm = RMSNorm(width, 1e-5), RMSNorm(width, 1e-5)
        self.attention_layer_scale, self.ffn_layer_scale = LayerScale(width), LayerScale(width)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        split = self.attention.split(self.attention_norm(x), rope)
        x = x + self.attention_layer_scale(self.attention.attend(*split, mask))
        return x + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x)))


class WindowTransformer(nn.Module):
    """Causal attention over the last `window` steps; [batch, time, channels] in and out."""

    rope: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, inner: int, window: int
    ) -> None:
        super().__init__()
        self.window = window
        self.layers = nn.ModuleList([Block(width, heads, groups, inner) for _ in range(layers)])
        self.norm = RMSNorm(width, 1e-5)
        self.register_buffer("rope", rope_table(2048, 64, 10000.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.arange(x.shape[1], device=x.device)
        back = step[:, None] - step[None]
        mask = ((back >= 0) & (back < self.window))[None, None]
        for layer in self.layers:
            x = layer(x, self.rope[: x.shape[1]], mask)
        normed: Tensor = self.norm(x)
        return normed


class EncoderBlock(nn.Module):
    def __init__(self, width: int, stride: int, layers: int, window: int) -> None:
        super().__init__()
        half = width // 2
        transformer: nn.Module = nn.Identity()
        if layers:
            heads = width // 64
            transformer = WindowTransformer(layers, width, heads, heads, 3 * width, window)
        self.block = nn.ModuleList(
            [
                *(ResidualUnit(half, dilation) for dilation in (1, 3, 9)),
                Snake(half),
                Conv(half, width, 2 * stride, stride=stride),
                transformer,
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.block[:3]:
            x = unit(x)
        return self.block[5](activated(self.block[3], self.block[4], x))


class Encoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["codec_encoder_dim"]
        blocks: list[nn.Module] = [Conv(1, width, 7)]
        layers = config["codec_encoder_transformer_layers"]
        for stride, count in zip((2, 4, 8, 8), layers, strict=True):
            width *= 2
            blocks.append(EncoderBlock(width, stride, count, config["codec_encoder_window_size"]))
        blocks += [Snake(width), Conv(width, config["codec_latent_dim"], 3)]
        self.block = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block[:5]:
            x = block(x)
        return activated(self.block[5], self.block[6], x)


class DecoderBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                Snake(inputs),
                TransposedConv(inputs, outputs, 2 * stride, stride),
                *(ResidualUnit(outputs, dilation) for dilation in (1, 3, 9)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.block:
            x = unit(x)
        return x


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["codec_decoder_dim"]
        blocks: list[nn.Module] = [Conv(config["codec_latent_dim"], width, 7)]
        for i, stride in enumerate((8, 8, 4, 2)):
            blocks.append(DecoderBlock(width >> i, width >> (i + 1), stride))
        blocks += [Snake(width >> 4), Conv(width >> 4, 1, 7)]
        self.model = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model[:5]:
            x = block(x)
        return torch.tanh(activated(self.model[5], self.model[6], x).float())


class ConvNeXt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = Conv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + (self.gamma * out).to(x.dtype)


class Quantizer(nn.Module):
    """Everything between the two convolutional halves; named as in the published checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, books = config["codec_latent_dim"], config["codec_codebook_dim"]
        self.semantic_quantizer = ResidualQuantiser(
            width, 1, config["codec_semantic_codebook_size"], books
        )
        self.quantizer = ResidualQuantiser(
            width, config["num_codebooks"] - 1, config["codec_residual_codebook_size"], books
        )
        self.downsample = nn.ModuleList(
            [nn.ModuleList([Conv(width, width, 2, stride=2), ConvNeXt(width)]) for _ in range(2)]
        )
        self.upsample = nn.ModuleList(
            [nn.ModuleList([TransposedConv(width, width, 2, 2), ConvNeXt(width)]) for _ in range(2)]
        )
        self.pre_module, self.post_module = (
            WindowTransformer(
                config[f"codec_{part}_n_layer"], width, config[f"codec_{part}_n_head"],
                config[f"codec_{part}_n_local_heads"], config[f"codec_{part}_intermediate_size"],
                config["codec_window_size"],
            )
            for part in ("pre", "post")
        )  # fmt: skip


def staged(stages: nn.ModuleList, x: Tensor) -> Tensor:
    for stage in stages:
        for part in stage:  # type: ignore[union-attr]
            x = part(x)
    return x


class Codec(nn.Module):
    """Samples [batch, frames * 2048] to codes [batch, books, frames] and back."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.quantizer = Encoder(config), Quantizer(config)
        self.decoder = Decoder(config)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Weights that keep the variance, and no biases: speech at a level of 0.1 would drown in
        constant terms, and the codebooks would collapse to a few entries."""
        for module in self.modules():
            if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)):
                weight = module.weight
                if isinstance(module, nn.ConvTranspose1d):
                    fan = weight.shape[0] * weight.shape[2] / module.stride[0]
                else:
                    fan = weight[0].numel()
                nn.init.normal_(weight, std=1 / math.sqrt(fan))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, ResidualUnit):
                module.block[3].conv.weight.mul_(0.4)  # type: ignore[union-attr, operator]
            if isinstance(module, Attention):
                module.wo.weight.mul_(0.7)
        self.encoder.block[0].conv.weight.mul_(8.0)  # type: ignore[union-attr, operator]
        self.decoder.model[6].conv.weight.mul_(0.02)  # type: ignore[union-attr, operator]
        for book in self.books():
            width = book.codebook.weight.shape[1]
            nn.init.normal_(book.out_proj.weight, std=0.3 / math.sqrt(width))

    def books(self) -> list[Any]:
        return [*self.quantizer.semantic_quantizer.quantizers, *self.quantizer.quantizer.quantizers]

    def decoding_modules(self) -> list[nn.Module]:
        """What turns the sum of the books into sound."""
        return [self.decoder, self.quantizer.post_module, self.quantizer.upsample]

    def latent(self, samples: Tensor) -> Tensor:
        """[batch, frames * 2048] to [batch, frames, width] float32."""
        x = staged(self.quantizer.downsample, self.encoder(samples[..., None]))
        latent: Tensor = self.quantizer.pre_module(x)
        return latent.float()

    def quantised(
        self, latent: Tensor, *, train: bool = False, drop: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Sum of the books, codes [batch, books, frames], commitment loss, the first book's part
        alone, and what each book was given. `drop`: share of rows that use fewer books."""
        with torch.autocast(latent.device.type, enabled=False):
            books = self.books()
            semantic, codes, loss = books[0](latent, train)
            found, given = [codes], [latent.detach()]
            rest, total = latent - semantic, semantic
            count = len(books) - 1
            keep = torch.full((latent.shape[0],), count, device=latent.device)
            if train and drop > 0:
                fewer = torch.rand(latent.shape[0], device=latent.device) < drop
                some = torch.randint_like(keep, 0, count)
                keep = torch.where(fewer, some, keep)
            for i, book in enumerate(books[1:]):
                given.append(rest.detach())
                part, codes, own = book(rest, train)
                found.append(codes)
                loss = loss + own
                rest = rest - part
                total = total + part * (keep > i).to(part.dtype)[:, None, None]
            return total, torch.stack(found, 1), loss, semantic, given

    def sounded(self, total: Tensor) -> Tensor:
        """Sum of the books [batch, frames, width] to samples [batch, frames * 2048]."""
        x = staged(self.quantizer.upsample, self.quantizer.post_module(total))
        sound: Tensor = self.decoder(x)
        return sound.squeeze(2)

    def decode(self, codes: Tensor) -> Tensor:
        parts = [
            book.looked_up(codes[:, i].clamp(0, book.size - 1))
            for i, book in enumerate(self.books())
        ]
        return self.sounded(torch.stack(parts).sum(0))

    def encode(self, samples: Tensor) -> Tensor:
        """Codes of samples of any length, [batch, books, ceil(n / 2048)]."""
        short = -samples.shape[-1] % self.config["codec_frame_size"]
        return self.quantised(self.latent(F.pad(samples, (0, short))))[1]
