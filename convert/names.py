"""The one table of tensor names: shape, change of axes, and file of every tensor.

Shapes are those of the PyTorch layout: Linear `[out, in]`, convolution `[out, in / groups, k]`,
transposed convolution `[in, out, k]`, Snake's alpha `[1, C, 1]`. A row's `axes` is the permutation
that gives the bundle's layout: `[out, k, in / groups]`, `[out, k, in]`, `[1, 1, C]`. The layout
that others publish for MLX is the bundle's, so the same row describes it too.

A word in a shape is a size of the place where the rows stand, see `places`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from warble_mlx.config import (
    DECODER_STRIDES,
    ENCODER_STRIDES,
    RESAMPLE_STRIDES,
    ModelConfig,
    TransformerConfig,
)

MODEL = "model.safetensors"
DECODER = "codec_decoder.safetensors"
ENCODER = "codec_encoder.safetensors"
FILES = (MODEL, DECODER, ENCODER)

Axes = tuple[int, int, int]
CONV: Axes = (0, 2, 1)
TRANSPOSED: Axes = (1, 2, 0)
SNAKE: Axes = (0, 2, 1)


class Row(NamedTuple):
    """One tensor: name below its place, PyTorch shape, axes of the bundle, weight norm or not,
    and the config flag without which it does not exist."""

    name: str
    shape: tuple[str | int, ...]
    axes: Axes | None = None
    normed: bool = False
    when: str = ""


LANGUAGE_MODEL = (
    Row("embeddings.weight", ("vocabulary", "dim")),
    Row("codebook_embeddings.weight", ("all_codes", "dim")),
    Row("norm.weight", ("dim",)),
    Row("fast_project_in.weight", ("fast_dim", "dim"), when="fast_dim"),
    Row("fast_project_in.bias", ("fast_dim",), when="fast_dim"),
    Row("fast_embeddings.weight", ("codes", "fast_dim")),
    Row("fast_norm.weight", ("fast_dim",)),
    Row("fast_output.weight", ("codes", "fast_dim")),
)
BLOCK = (
    Row("attention.wqkv.weight", ("qkv", "dim")),
    Row("attention.wqkv.bias", ("qkv",), when="attention_qkv_bias"),
    Row("attention.wo.weight", ("dim", "heads")),
    Row("attention.wo.bias", ("dim",), when="attention_o_bias"),
    Row("attention.q_norm.weight", ("head_dim",), when="attention_qk_norm"),
    Row("attention.k_norm.weight", ("head_dim",), when="attention_qk_norm"),
    Row("feed_forward.w1.weight", ("ffn", "dim")),
    Row("feed_forward.w2.weight", ("dim", "ffn")),
    Row("feed_forward.w3.weight", ("ffn", "dim")),
    Row("attention_norm.weight", ("dim",)),
    Row("ffn_norm.weight", ("dim",)),
)
WINDOW_BLOCK = (
    *BLOCK,
    Row("attention_layer_scale.gamma", ("dim",)),
    Row("ffn_layer_scale.gamma", ("dim",)),
)
WINDOW_NORM = (Row("norm.weight", ("dim",)),)
ENCODER_ENDS = (
    Row("block.0.conv.weight", ("first", 1, 7), CONV, normed=True),
    Row("block.0.conv.bias", ("first",)),
    Row("block.5.alpha", (1, "last", 1), SNAKE),
    Row("block.6.conv.weight", ("latent", "last", 3), CONV, normed=True),
    Row("block.6.conv.bias", ("latent",)),
)
DECODER_ENDS = (
    Row("model.0.conv.weight", ("first", "latent", 7), CONV, normed=True),
    Row("model.0.conv.bias", ("first",)),
    Row("model.5.alpha", (1, "last", 1), SNAKE),
    Row("model.6.conv.weight", (1, "last", 7), CONV, normed=True),
    Row("model.6.conv.bias", (1,)),
)
RESIDUAL_UNIT = (
    Row("block.0.alpha", (1, "channels", 1), SNAKE),
    Row("block.1.conv.weight", ("channels", "channels", 7), CONV, normed=True),
    Row("block.1.conv.bias", ("channels",)),
    Row("block.2.alpha", (1, "channels", 1), SNAKE),
    Row("block.3.conv.weight", ("channels", "channels", 1), CONV, normed=True),
    Row("block.3.conv.bias", ("channels",)),
)
DOWN = (
    Row("block.3.alpha", (1, "inner", 1), SNAKE),
    Row("block.4.conv.weight", ("outer", "inner", "kernel"), CONV, normed=True),
    Row("block.4.conv.bias", ("outer",)),
)
UP = (
    Row("block.0.alpha", (1, "inner", 1), SNAKE),
    Row("block.1.conv.weight", ("inner", "outer", "kernel"), TRANSPOSED, normed=True),
    Row("block.1.conv.bias", ("outer",)),
)
RESAMPLE_DOWN = (
    Row("0.conv.weight", ("latent", "latent", "kernel"), CONV),
    Row("0.conv.bias", ("latent",)),
)
RESAMPLE_UP = (
    Row("0.conv.weight", ("latent", "latent", "kernel"), TRANSPOSED),
    Row("0.conv.bias", ("latent",)),
)
CONVNEXT = (
    Row("1.dwconv.conv.weight", ("latent", 1, 7), CONV),
    Row("1.dwconv.conv.bias", ("latent",)),
    Row("1.norm.weight", ("latent",)),
    Row("1.norm.bias", ("latent",)),
    Row("1.pwconv1.weight", ("wide", "latent")),
    Row("1.pwconv1.bias", ("wide",)),
    Row("1.pwconv2.weight", ("latent", "wide")),
    Row("1.pwconv2.bias", ("latent",)),
    Row("1.gamma", ("latent",)),
)
QUANTIZER_IN = (
    Row("in_proj.weight", ("code_dim", "latent", 1), CONV, normed=True),
    Row("in_proj.bias", ("code_dim",)),
)
QUANTIZER_OUT = (
    Row("out_proj.weight", ("latent", "code_dim", 1), CONV, normed=True),
    Row("out_proj.bias", ("latent",)),
    Row("codebook.weight", ("entries", "code_dim")),
)

# Tensors that checkpoints may carry and the model never reads.
DROPPED = (
    (re.compile(r"freqs_cis$"), "RoPE table, computed at load"),
    (re.compile(r"causal_mask$"), "attention mask, computed at load"),
)
TIED_HEAD = "lm_head.weight"
TIED_HEAD_REASON = "equal to embeddings.weight (tied output head)"
OTHER_NETWORK_REASON = "not part of the generator"

# Lines of the size table, first match counts.
COMPONENTS = tuple(
    (re.compile(pattern), label)
    for pattern, label in (
        (r"embeddings\.", "text embedding (tied head)"),
        (r"codebook_embeddings\.", "codebook embeddings"),
        (r"layers\.", "slow AR layers"),
        (r"fast_layers\.", "fast AR layers"),
        (r"fast_(embeddings|output|project_in)\.", "fast embedding and output"),
        (r"(fast_)?norm\.", "final norms"),
        (r"decoder\.", "codec decoder"),
        (r"quantizer\.upsample\.", "upsampling"),
        (r"quantizer\.post_module\.", "post_module"),
        (r"quantizer\..*\.(codebook|out_proj)\.", "codebooks and out_proj"),
        (r"encoder\.block\.\d\.block\.5\.", "encoder window transformer"),
        (r"encoder\.", "codec encoder"),
        (r"quantizer\.downsample\.", "downsampling"),
        (r"quantizer\.pre_module\.", "pre_module"),
        (r"quantizer\..*\.in_proj\.", "in_proj"),
    )
)


def component_of(name: str) -> str:
    """Line of the size table that tensor `name` belongs to."""
    return next((label for pattern, label in COMPONENTS if pattern.match(name)), "other")


@dataclass(frozen=True)
class Spec:
    """One tensor of one model: the row with numbers filled in. `because` is the config field
    that asks for it, empty for tensors that every model has."""

    name: str
    pytorch_shape: tuple[int, ...]
    axes: Axes | None
    normed: bool
    file: str
    because: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the bundle."""
        shape = self.pytorch_shape
        return shape if self.axes is None else tuple(shape[axis] for axis in self.axes)


@dataclass(frozen=True)
class Place:
    """Where rows stand: name prefix, file, sizes, and config flags with their field's prefix."""

    prefix: str
    rows: tuple[Row, ...]
    file: str
    sizes: Mapping[str, int]
    flags: Mapping[str, bool] = field(default_factory=dict)
    flag_prefix: str = ""


def expected_tensors(config: ModelConfig, *, encoder: bool) -> dict[str, Spec]:
    """Every tensor of the model with these dimensions, by its name in the bundle.

    Without `encoder` those of the codec's encoding half are left out.
    """
    found: dict[str, Spec] = {}
    for place in places(config, encoder=encoder):
        for row in place.rows:
            if row.when and not place.flags.get(row.when, False):
                continue
            name = place.prefix + row.name
            shape = tuple(s if isinstance(s, int) else place.sizes[s] for s in row.shape)
            because = place.flag_prefix + row.when if row.when else ""
            found[name] = Spec(name, shape, row.axes, row.normed, place.file, because)
    return found


def places(c: ModelConfig, *, encoder: bool) -> Iterator[Place]:
    """Every place of the model with the rows that stand there."""
    sizes = {
        "vocabulary": c.vocab_size,
        "all_codes": c.codebook_size * c.num_codebooks,
        "codes": c.codebook_size,
        "dim": c.dim,
        "fast_dim": c.fast.dim,
    }
    yield Place("", LANGUAGE_MODEL, MODEL, sizes, {"fast_dim": c.fast.dim != c.dim})
    for prefix, stack in (("", c.slow), ("fast_", c.fast)):
        flags = {
            "attention_qkv_bias": stack.qkv_bias,
            "attention_o_bias": stack.o_bias,
            "attention_qk_norm": stack.qk_norm,
        }
        for i in range(stack.n_layer):
            where = f"{prefix}layers.{i}."
            yield Place(where, BLOCK, MODEL, _block_sizes(stack), flags, prefix)
    yield from _decoder_places(c)
    if encoder:
        yield from _encoder_places(c)


def _block_sizes(t: TransformerConfig) -> dict[str, int]:
    return {
        "dim": t.dim,
        "qkv": t.qkv_rows,
        "heads": t.n_head * t.head_dim,
        "head_dim": t.head_dim,
        "ffn": t.ffn,
    }


def _window_transformer(prefix: str, t: TransformerConfig, file: str) -> Iterator[Place]:
    for i in range(t.n_layer):
        yield Place(f"{prefix}layers.{i}.", WINDOW_BLOCK, file, _block_sizes(t))
    yield Place(prefix, WINDOW_NORM, file, {"dim": t.dim})


def _quantizers(c: ModelConfig, rows: tuple[Row, ...], file: str) -> Iterator[Place]:
    sizes = {"latent": c.codec_latent_dim, "code_dim": c.codec_codebook_dim}
    semantic = {**sizes, "entries": c.codec_semantic_codebook_size}
    yield Place("quantizer.semantic_quantizer.quantizers.0.", rows, file, semantic)
    residual = {**sizes, "entries": c.codec_residual_codebook_size}
    for i in range(c.num_codebooks - 1):
        yield Place(f"quantizer.quantizer.quantizers.{i}.", rows, file, residual)


def _decoder_places(c: ModelConfig) -> Iterator[Place]:
    latent = c.codec_latent_dim
    yield from _quantizers(c, QUANTIZER_OUT, DECODER)
    post = c.codec_transformer("post")
    yield from _window_transformer("quantizer.post_module.", post, DECODER)
    for i, stride in enumerate(RESAMPLE_STRIDES):
        sizes = {"latent": latent, "wide": 4 * latent, "kernel": stride}
        yield Place(f"quantizer.upsample.{i}.", RESAMPLE_UP + CONVNEXT, DECODER, sizes)
    channels = c.codec_decoder_dim
    for i, stride in enumerate(DECODER_STRIDES, 1):
        sizes = {"inner": channels, "outer": channels // 2, "kernel": 2 * stride}
        yield Place(f"decoder.model.{i}.", UP, DECODER, sizes)
        channels //= 2
        for unit in (2, 3, 4):
            where = f"decoder.model.{i}.block.{unit}."
            yield Place(where, RESIDUAL_UNIT, DECODER, {"channels": channels})
    sizes = {"first": c.codec_decoder_dim, "latent": latent, "last": channels}
    yield Place("decoder.", DECODER_ENDS, DECODER, sizes)


def _encoder_places(c: ModelConfig) -> Iterator[Place]:
    latent = c.codec_latent_dim
    yield from _quantizers(c, QUANTIZER_IN, ENCODER)
    pre = c.codec_transformer("pre")
    yield from _window_transformer("quantizer.pre_module.", pre, ENCODER)
    for i, stride in enumerate(RESAMPLE_STRIDES):
        sizes = {"latent": latent, "wide": 4 * latent, "kernel": stride}
        yield Place(f"quantizer.downsample.{i}.", RESAMPLE_DOWN + CONVNEXT, ENCODER, sizes)
    channels = c.codec_encoder_dim
    for i, stride in enumerate(ENCODER_STRIDES, 1):
        for unit in (0, 1, 2):
            where = f"encoder.block.{i}.block.{unit}."
            yield Place(where, RESIDUAL_UNIT, ENCODER, {"channels": channels})
        sizes = {"inner": channels, "outer": 2 * channels, "kernel": 2 * stride}
        yield Place(f"encoder.block.{i}.", DOWN, ENCODER, sizes)
        channels *= 2
        window = c.codec_transformer(f"encoder.{i}")
        if window.n_layer:
            yield from _window_transformer(f"encoder.block.{i}.block.5.", window, ENCODER)
    sizes = {"first": c.codec_encoder_dim, "latent": latent, "last": channels}
    yield Place("encoder.", ENCODER_ENDS, ENCODER, sizes)
