"""Both transformers over whole token streams at once, every position given (teacher forcing).

The same modules as the frame step, without its cache: plain causal attention over all positions.
Streams of different lengths are padded on the right, where causal attention never looks.

Shapes: N streams, T positions, S steps (frames, and one more where EOS ends the stream), F frames
of all streams, D = dim, C = codebook_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx.dual_ar import DualAR
from warble_mlx.fidelity.streams import TokenStream
from warble_mlx.layers import Block, project, rotation_for

Visit = Callable[[str, nn.Module, mx.array], None]
"""Called with a Linear's path, the Linear and its inputs [..., in], right before it is used; it may
change the weight."""


class Forced(NamedTuple):
    """Given streams as arrays: padded columns, and where in them each step looks."""

    columns: mx.array  # int32 [N, 11, T]
    real: mx.array  # bool [N, T]: not padding
    steps: mx.array  # int32 [S of all streams], index into N * T of the position before each step
    semantic: mx.array  # int32 [S of all streams], the choice made there; C is EOS
    framed: mx.array  # int32 [F], which of the steps brought a frame
    codes: mx.array  # int32 [F, 10]


def forced(streams: Sequence[TokenStream], semantic_begin_id: int, eos: int) -> Forced:
    """Pad and index streams; `eos` is the semantic index that stands for the end."""
    inputs = [stream.columns(semantic_begin_id) for stream in streams]
    length = max(columns.shape[1] for columns in inputs)
    padded = np.zeros((len(inputs), inputs[0].shape[0], length), np.int32)
    real = np.zeros((len(inputs), length), bool)
    steps: list[int] = []
    framed: list[int] = []
    semantic: list[int] = []
    for i, (stream, columns) in enumerate(zip(streams, inputs, strict=True)):
        padded[i, :, : columns.shape[1]] = columns
        real[i, : columns.shape[1]] = True
        end = i * length + columns.shape[1]
        framed += range(len(steps), len(steps) + stream.frames)
        steps += range(end - stream.steps, end)
        semantic += [*stream.codes[0].tolist(), *([eos] if stream.ended else [])]
    codes = np.concatenate([stream.codes.T for stream in streams]).astype(np.int32)
    return Forced(
        columns=mx.array(padded),
        real=mx.array(real),
        steps=mx.array(steps, mx.int32),
        semantic=mx.array(semantic, mx.int32),
        framed=mx.array(framed, mx.int32),
        codes=mx.array(codes),
    )


def run_block(
    block: Block,
    x: mx.array,
    factors: tuple[mx.array, mx.array],
    visit: Visit | None = None,
    path: str = "",
) -> mx.array:
    """One block over all positions of x [B, T, D], causal."""

    def seen(name: str, linear: nn.Module, inputs: mx.array) -> mx.array:
        if visit:
            visit(f"{path}.{name}", linear, inputs)
        return inputs

    attention, feed = block.attention, block.feed_forward
    normed = seen("attention.wqkv", attention.wqkv, block.attention_norm(x))
    q, kv = attention.split(attention.heads(normed, factors))
    mixed = seen("attention.wo", attention.wo, attention.mix(q, kv, "causal"))
    x = x + attention.project_out(mixed)
    normed = seen("feed_forward.w13", feed.w13, block.ffn_norm(x))
    gated = seen("feed_forward.w2", feed.w2, feed.gated(normed))
    return x + project(feed.w2, gated)


def slow_hidden(model: DualAR, given: Forced, visit: Visit | None = None) -> mx.array:
    """The slow AR's outputs before the final norm at every step, [S, D]."""
    x = model.embed(given.columns)
    factors = rotation_for(model._slow_rope[: x.shape[1]], model.config.slow)
    for i, block in enumerate(model.layers):
        x = run_block(block, x, factors, visit, f"layers.{i}")
        mx.async_eval(x)
    return x.reshape(-1, x.shape[-1])[given.steps]


def fast_scores(
    model: DualAR, hidden: mx.array, codes: mx.array, visit: Visit | None = None
) -> mx.array:
    """Scores of codes 1 to 9, float32 [F, 9, C], from hidden [F, D] (before the final norm) and
    the codes [F, 10] given."""
    config = model.config
    entry = model.norm(hidden) if config.norm_fastlayer_input else hidden
    rest = model.fast_embeddings.weight[codes[:, :-1]].astype(entry.dtype)
    x = mx.concatenate([model.fast_input(entry), rest], axis=1)
    for i, block in enumerate(model.fast_layers):
        x = run_block(block, x, model._fast_rotation, visit, f"fast_layers.{i}")
        mx.async_eval(x)
    scores = project(model.fast_output, model.fast_norm(x)[:, 1:])
    return scores.astype(mx.float32)
