"""Models of the published or of a tiny geometry, made in memory from a fixed seed.

They speak noise; speed depends on shapes and dtypes alone, so nothing need be downloaded to
measure it. Weights are normal with a standard deviation of 1/sqrt(inputs), so that activations
keep their size through the layers and stay finite in 16 bits.

The embedding row of EOS is zero. The head shares that row, so the score of EOS is exactly 0 while
those of the semantic tokens scatter around 0 by more than 1: EOS is never the best, nor among the
50 best of 4,097, and every run lasts as long as it is allowed to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from warble_mlx.codec import CodecDecoder
from warble_mlx.config import ModelConfig
from warble_mlx.dual_ar import DualAR
from warble_mlx.quant.policy import Packing, plan

Size = Literal["full", "tiny"]

SEED = 20_260_101
TABLE_SCALE = 0.05  # of embedding rows: scores then scatter by 0.05 * sqrt(896) = 1.5
BIAS_SCALE = 0.02

# Fields that are left out have the published model's values as their defaults.
PUBLISHED = ModelConfig(
    model_type="arktts",
    vocab_size=155_776,
    dim=896,
    n_layer=24,
    n_head=14,
    n_local_heads=2,
    head_dim=64,
    intermediate_size=4864,
    max_seq_len=2048,
    codebook_size=4096,
    semantic_begin_id=151_678,
    semantic_end_id=155_773,
    eos_token_id=151_645,
    pad_token_id=151_643,
    n_fast_layer=4,
)
TINY = ModelConfig(
    model_type="arktts",
    vocab_size=1024,
    dim=128,
    n_layer=2,
    n_head=2,
    n_local_heads=1,
    head_dim=64,
    intermediate_size=256,
    max_seq_len=1024,
    codebook_size=512,
    semantic_begin_id=300,
    semantic_end_id=811,
    eos_token_id=257,
    pad_token_id=256,
    n_fast_layer=2,
    codec_encoder_dim=8,
    codec_latent_dim=128,
    codec_decoder_dim=64,
    codec_semantic_codebook_size=512,
    codec_residual_codebook_size=64,
    codec_window_size=16,
    codec_pre_n_layer=1,
    codec_pre_n_head=2,
    codec_pre_n_local_heads=2,
    codec_pre_intermediate_size=192,
    codec_post_n_layer=1,
    codec_post_n_head=2,
    codec_post_n_local_heads=1,
    codec_post_intermediate_size=128,
)
GEOMETRIES: dict[Size, ModelConfig] = {"full": PUBLISHED, "tiny": TINY}


def random_dual_ar(config: ModelConfig, seed: int = SEED) -> DualAR:
    """Both transformers with random bfloat16 weights, as a bundle stores them; not prepared."""
    model = DualAR(config)
    keys = _keys(seed)
    weights = []
    for name, value in _parameters(model):
        key = next(keys)
        if name.endswith("embeddings.weight"):
            weight = TABLE_SCALE * mx.random.normal(value.shape, key=key)
        elif name.endswith("bias"):
            weight = BIAS_SCALE * mx.random.normal(value.shape, key=key)
        elif value.ndim == 1:
            weight = mx.ones(value.shape)
        else:
            weight = mx.random.normal(value.shape, key=key) / math.sqrt(value.shape[-1])
        if name == "embeddings.weight":
            weight[config.eos_token_id] = 0
        weight = weight.astype(mx.bfloat16)
        mx.eval(weight)  # one at a time, or float32 copies of all of them would be alive at once
        weights.append((name, weight))
    model.load_weights(weights)
    return model


def quantize_blocks(model: DualAR, default: Packing) -> None:
    """Pack the transformer blocks' Linears in place, by the policy that bundles are packed by."""
    pack_linears(model, plan(linear_shapes(model), default))


def linear_shapes(model: DualAR) -> dict[str, tuple[int, ...]]:
    """Shapes [out, in] of a model's Linears by the checkpoint's paths; w13 stands under w1."""
    linears = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    return {stored_path(path): tuple(module.weight.shape) for path, module in linears.items()}


def stored_path(path: str) -> str:
    """The checkpoint's path of a Linear in memory, where w1 and w3 are one matrix."""
    return path.replace(".w13", ".w1")


def pack_linears(model: DualAR, packings: Mapping[str, Packing]) -> None:
    """Pack Linears in place, by the checkpoint's paths."""

    def chosen(path: str, _: nn.Module) -> bool | dict[str, object]:
        own = packings.get(stored_path(path))
        return False if own is None else dict(own._asdict())

    nn.quantize(model, class_predicate=chosen)


def dequantize(model: DualAR, dtype: mx.Dtype) -> None:
    """Unpack every packed Linear in place to `dtype`, as the runtime does on a CPU."""
    linears = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear):
            continue
        biases = module.get("biases")
        weight = mx.dequantize(
            module["weight"],
            module["scales"].astype(dtype),  # or the result would be rounded to bfloat16 first
            None if biases is None else biases.astype(dtype),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module)
        plain["weight"] = weight
        if "bias" in module:
            plain["bias"] = module["bias"]
        linears.append((path, plain))
    model.update_modules(tree_unflatten(linears))


def cast(model: DualAR, dtype: mx.Dtype) -> None:
    """Give everything but the embedding tables the dtype of activations, as loading does."""

    def wanted(name: str, value: mx.array) -> mx.array:
        packed = not mx.issubdtype(value.dtype, mx.floating)
        return value if packed or name.endswith("embeddings.weight") else value.astype(dtype)

    model.load_weights([(name, wanted(name, value)) for name, value in _parameters(model)])


def layout(config: ModelConfig, packed: Packing | Mapping[str, Packing] | None) -> DualAR:
    """A model as a bundle stores it, to count bytes on: nothing of it is ever computed.

    packed: one packing for all Linears of the blocks, or each one's by the checkpoint's path.
    """
    model = DualAR(config)
    model.set_dtype(mx.bfloat16)
    if isinstance(packed, Packing):
        quantize_blocks(model, packed)
    elif packed is not None:
        pack_linears(model, packed)
    return model


def runnable(
    config: ModelConfig, dtype: mx.Dtype, default: Packing | None = None, *, packed: bool = True
) -> DualAR:
    """A random model ready for `Engine`, in 16 bits or quantised.

    packed: keep quantised weights packed (GPU) or unpack them (CPU), as the runtime does.
    """
    model = random_dual_ar(config)
    if default is not None:
        quantize_blocks(model, default)
        if not packed:
            dequantize(model, dtype)
    cast(model, dtype)
    mx.eval(model.parameters())
    model.prepare(dtype)
    return model


def random_codec(config: ModelConfig, seed: int = SEED) -> CodecDecoder:
    """A codec decoder with random float32 weights."""
    decoder = CodecDecoder(config)
    keys = _keys(seed + 1)
    weights = []
    for name, value in _parameters(decoder):
        key = next(keys)
        if name.endswith("bias"):
            value = mx.zeros(value.shape)
        elif value.ndim > 1 and name.endswith("weight"):
            fan_in = math.prod(value.shape[1:])
            value = mx.random.normal(value.shape, key=key) / math.sqrt(fan_in)
        weights.append((name, value))
    decoder.load_weights(weights)
    mx.eval(decoder.parameters())
    return decoder


def _parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    found = tree_flatten(module.parameters())
    assert isinstance(found, list)  # it is a dictionary only when asked for one
    return found


def _keys(seed: int) -> Iterator[mx.array]:
    key = mx.random.key(seed)
    while True:
        key, own = mx.random.split(key)
        yield own
