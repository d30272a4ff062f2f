"""mlx-audio's arktts model as the other side of the comparison: built, run and counted unchanged.

Needs mlx-audio (pip install mlx-audio). Of its dependencies only numpy, huggingface_hub and tqdm
are imported on the way to this model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten
from mlx_audio.convert import build_quant_predicate
from mlx_audio.tts.models.arktts import arktts

from warble_mlx.bench.graph import Primitives, primitives, without_fusion
from warble_mlx.config import ModelConfig
from warble_mlx.dual_ar import DualAR
from warble_mlx.prompt import Prompt
from warble_mlx.quant.policy import DEFAULT_POLICY, POLICIES

VERSION = metadata.version("mlx-audio")
GROUP_SIZE, BITS = 64, 4  # its converter's defaults, and ours

# How the 4-bit models are packed: our policy, or its converter's own recipe.
OURS, THEIRS = "transformer blocks", "mlx-audio's recipe"


def build(ours: DualAR) -> arktts.ArkttsModel:
    """Its model with the bfloat16 weights of `ours`, which must not be quantised."""
    fast = ours.config.fast
    fields = msgspec.to_builtins(ours.config) | {
        "fast_dim": fast.dim,
        "fast_n_head": fast.n_head,
        "fast_n_local_heads": fast.n_kv_head,
        "fast_head_dim": fast.head_dim,
        "fast_intermediate_size": fast.ffn,
    }
    model = arktts.ArkttsModel(arktts.ModelConfig.from_dict(fields))
    weights = []
    for name, value in tree_flatten(ours.parameters()):
        if ".w13." in name:
            gate, linear = mx.split(value, 2)
            weights += [(name.replace(".w13.", ".w1."), gate)]
            weights += [(name.replace(".w13.", ".w3."), linear)]
        else:
            weights.append((name, value))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def cast(model: arktts.ArkttsModel, dtype: mx.Dtype) -> None:
    """One dtype for all weights, scales included: its activations and caches follow the table's."""
    model.set_dtype(dtype)
    mx.eval(model.parameters())


def quantize(model: arktts.ArkttsModel, recipe: str) -> None:
    """Pack to 4 bits by our policy, or by its converter's predicate without the tied embedding.

    Its recipe packs every Linear and Embedding, but its step multiplies with the tied embedding's
    raw weight, which a packed one has not: see `own_recipe_fails`.
    """
    own = build_quant_predicate(model)

    def chosen(path: str, module: nn.Module) -> bool:
        if recipe == OURS:
            return POLICIES[DEFAULT_POLICY](path)
        return path != "embeddings" and bool(own(path, module))

    nn.quantize(model, GROUP_SIZE, BITS, class_predicate=chosen)
    mx.eval(model.parameters())


def own_recipe_fails(model: arktts.ArkttsModel, prompt: Prompt) -> str:
    """Pack `model` by its converter's whole recipe and run two frames: the error, or nothing."""
    nn.quantize(model, GROUP_SIZE, BITS, class_predicate=build_quant_predicate(model))
    try:
        generate(model, prompt, 2)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def generate(
    model: arktts.ArkttsModel, prompt: Prompt, frames: int, *, seed: int = 0, greedy: bool = False
) -> np.ndarray:
    """Codes [10, frames], by its own loop and its default sampling settings."""
    ids = prompt.columns[0].astype(np.int64)
    codes = model.generate_codes(
        [ids],
        [np.zeros(0, np.int64)],
        max_new_tokens=frames,
        do_sample=not greedy,
        seed=seed,
    )
    mx.eval(codes)
    return np.array(codes[0])


class _Watched:
    """`mlx.core`, except that `eval` first shows its arguments to `look`."""

    def __init__(self, look: Callable[..., None]) -> None:
        self._look = look

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def eval(self, *arrays: Any) -> None:
        self._look(*arrays)
        mx.eval(*arrays)


@contextlib.contextmanager
def _watching(look: Callable[..., None]) -> Iterator[None]:
    arktts.mx = _Watched(look)
    try:
        yield
    finally:
        arktts.mx = mx


def step_primitives(model: arktts.ArkttsModel, prompt: Prompt, *, fused: bool) -> Primitives:
    """Primitives of one frame: its loop evaluates once per frame, and what it is about to
    evaluate the third time is one frame's graph, prompt and first frame left behind."""
    seen: list[Primitives] = []

    def look(*arrays: mx.array) -> None:
        seen.append(primitives(arrays))

    with _watching(look), contextlib.nullcontext() if fused else without_fusion():
        generate(model, prompt, 4)
    return seen[2]


def frame_bytes(model: arktts.ArkttsModel) -> int:
    """Bytes of weights and caches that its frame reads, counted as ours are.

    The whole tied embedding is its head, and its caches are as long as the context. Its fast AR
    makes ten passes; of the first only what later passes need is computed, which leaves out the
    last layer's output and the fast output.
    """
    c: ModelConfig = model.config
    size = model.embeddings.weight.dtype.size

    def nbytes(module: nn.Module) -> int:
        return sum(value.nbytes for _, value in tree_flatten(module.parameters()))

    fast = sum(map(nbytes, model.fast_layers))
    last = model.fast_layers[-1]
    unused = nbytes(last.feed_forward) + nbytes(last.attention.wo) + nbytes(last.ffn_norm)
    cache = c.n_layer * 2 * c.n_local_heads * c.head_dim * c.max_seq_len * size
    return (
        sum(map(nbytes, model.layers))
        + c.num_codebooks * fast
        - unused
        + (c.num_codebooks - 1) * nbytes(model.fast_output)
        + nbytes(model.embeddings)
        + cache
    )
