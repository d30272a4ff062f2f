"""Both transformers written as Core ML programs, operation by operation, in 16 bits.

Written and not traced, so that packed weights go in on the bundle's grid, every operation has its
place in `mil_ops`, and what a phone computes is what stands here. The form follows what Apple's
runtimes do well: attention is two products and a softmax; query heads that share a key head are
positions of that head, so keys are never repeated; masks are finite, because minus infinity becomes
a NaN in 16 bits; norms square in 32 bits, because a residual above 255 has no square in 16.

RoPE turns neighbouring elements (x[2 j], x[2 j + 1]). The rows of the query and key projections are
reordered so that a head's even elements stand before its odd ones: products of queries and keys do
not change, and the rotation needs no strided reads.

Shapes: T positions, D = dim, H query and K key heads of h, S cache slots, C = codebook_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warble_mlx.config import ModelConfig, TransformerConfig
from warble_mlx.ios_export.coreml_file import quiet
from warble_mlx.ios_export.mil_weights import Halves, Rows, Store, held_bits
from warble_mlx.layers import rope_table

with quiet():
    from coremltools import target as AvailableTarget
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

MASKED = -1e4
CANDIDATES = 64  # codes that may survive the filter of a draw; top_k cannot ask for more
MIN_TEMPERATURE = 1e-5
NEVER = 1e30  # in 32 bits, below every score

Var = Any  # a value of the program that is being written
Keep = Callable[[Var, Var], tuple[Var, Var]]


class Rotation(NamedTuple):
    """Cosines and sines of the positions that are computed, float16 [T, h / 2]."""

    cos: Var
    sin: Var


class Matrix:
    """A Linear at a bundle's path. Its weight is one constant, however often it is used."""

    def __init__(
        self, store: Store, path: str, bias: str | None = None, order: Rows | None = None
    ) -> None:
        name = path.replace(".", "_")
        rows = slice(None) if order is None else order
        if path in store.packed:
            grid = store.grid(path)
            kind = types.np_uint4_dtype if held_bits(grid.bits) == 4 else np.uint8
            self.weight = mb.constexpr_blockwise_shift_scale(
                data=np.ascontiguousarray(grid.integers[rows]).astype(kind),
                scale=np.ascontiguousarray(grid.scales[rows]),
                offset=np.ascontiguousarray(grid.offsets[rows]),
                name=name,
            )
        else:
            self.weight = constant(store.plain(f"{path}.weight")[rows], name)
        self.bias = None
        if bias is not None:
            self.bias = constant(store.plain(bias)[rows], f"{name}_bias")

    def __call__(self, x: Var, **named: str) -> Var:
        if self.bias is None:
            return mb.linear(x=x, weight=self.weight, **named)
        return mb.linear(x=x, weight=self.weight, bias=self.bias, **named)


def constant(values: npt.NDArray[np.floating], name: str) -> Var:
    """A 16-bit constant. What does not fit into 16 bits becomes infinite, which the range check
    finds."""
    with np.errstate(over="ignore"):
        return mb.const(val=np.ascontiguousarray(values).astype(np.float16), name=name)


def even_before_odd(config: TransformerConfig) -> Rows:
    """Rows of the joint projection in their new order: where each of them was."""
    head = np.concatenate([np.arange(0, config.head_dim, 2), np.arange(1, config.head_dim, 2)])
    turned = config.n_head + config.n_kv_head
    starts = np.arange(turned)[:, None] * config.head_dim
    return np.concatenate(
        [(starts + head).ravel(), np.arange(turned * config.head_dim, config.qkv_rows)]
    )


class Norm:
    """Root mean square norm of the last axis."""

    def __init__(self, weight: npt.NDArray[np.floating], eps: float, name: str) -> None:
        self.weight, self.eps = constant(weight, name), np.float32(eps)

    @classmethod
    def of(cls, store: Store, path: str, eps: float) -> Norm:
        """The norm at a bundle's path."""
        return cls(store.plain(f"{path}.weight"), eps, path.replace(".", "_"))

    def __call__(self, x: Var) -> Var:
        wide = mb.cast(x=x, dtype="fp32")
        mean = mb.reduce_mean(x=mb.square(x=wide), axes=[-1], keep_dims=True)
        scaled = mb.mul(x=wide, y=mb.rsqrt(x=mean, epsilon=self.eps))
        return mb.mul(x=mb.cast(x=scaled, dtype="fp16"), y=self.weight)


class Block:
    """One pre-norm block over keys and values that the caller keeps."""

    def __init__(self, config: TransformerConfig, store: Store, place: str) -> None:
        self.config = c = config
        self.order = even_before_odd(c)
        attention = f"{place}.attention"
        bias = f"{attention}.wqkv.bias" if c.qkv_bias else None
        self.wqkv = Matrix(store, f"{attention}.wqkv", bias, self.order)
        self.wo = Matrix(store, f"{attention}.wo", f"{attention}.wo.bias" if c.o_bias else None)
        self.w1, self.w2, self.w3 = (
            Matrix(store, f"{place}.feed_forward.{name}") for name in ("w1", "w2", "w3")
        )
        self.attention_norm, self.ffn_norm = (
            Norm.of(store, f"{place}.{name}", c.norm_eps) for name in ("attention_norm", "ffn_norm")
        )
        self.head_norm = self._head_norm(store, place) if c.qk_norm else None

    def _head_norm(self, store: Store, place: str) -> Norm:
        c, head = self.config, self.order[: self.config.head_dim]
        q, k = (
            store.plain(f"{place}.attention.{name}.weight")[head] for name in ("q_norm", "k_norm")
        )
        weight = np.concatenate([np.tile(q, (c.n_head, 1, 1)), np.tile(k, (c.n_kv_head, 1, 1))])
        return Norm(weight, c.norm_eps, f"{place}.attention.head_norm".replace(".", "_"))

    def forward(self, x: Var, rotation: Rotation, keep: Keep, mask: Var | None) -> Var:
        """x [1, T, D] through the block. `keep` takes new keys and values [1, K, T, h] and gives
        all that are looked at, [1, K, S, h]; mask [H / K * T, S] is added to the scores."""
        q, k, v = self._heads(self.attention_norm(x), rotation)
        keys, values = keep(k, v)
        x = mb.add(x=x, y=self._attend(q, keys, values, mask))
        normed = self.ffn_norm(x)
        gated = mb.mul(x=mb.silu(x=self.w1(normed)), y=self.w3(normed))
        return mb.add(x=x, y=self.w2(gated))

    def _heads(self, x: Var, rotation: Rotation) -> tuple[Var, Var, Var]:
        c, length = self.config, x.shape[1]
        shape = (1, length, c.n_head + 2 * c.n_kv_head, c.head_dim)
        heads = mb.reshape(x=self.wqkv(x), shape=shape)
        heads = mb.transpose(x=heads, perm=[0, 2, 1, 3])
        turned, v = mb.split(x=heads, split_sizes=[c.n_head + c.n_kv_head, c.n_kv_head], axis=1)
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        even, odd = mb.split(x=turned, num_splits=2, axis=3)
        cos, sin = rotation
        turned = mb.concat(
            values=[
                mb.sub(x=mb.mul(x=even, y=cos), y=mb.mul(x=odd, y=sin)),
                mb.add(x=mb.mul(x=odd, y=cos), y=mb.mul(x=even, y=sin)),
            ],
            axis=3,
        )
        q, k = mb.split(x=turned, split_sizes=[c.n_head, c.n_kv_head], axis=1)
        return q, k, v

    def _attend(self, q: Var, keys: Var, values: Var, mask: Var | None) -> Var:
        c, length = self.config, q.shape[2]
        shape = (1, c.n_kv_head, c.n_head // c.n_kv_head * length, c.head_dim)
        folded = mb.reshape(x=q, shape=shape)
        folded = mb.mul(x=folded, y=np.float16(1 / math.sqrt(c.head_dim)))
        scores = mb.matmul(x=folded, y=keys, transpose_y=True)
        if mask is not None:
            scores = mb.add(x=scores, y=mask)
        found = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=values)
        found = mb.reshape(x=found, shape=(1, c.n_head, length, c.head_dim))
        found = mb.transpose(x=found, perm=[0, 2, 1, 3])
        return self.wo(mb.reshape(x=found, shape=(1, length, c.n_head * c.head_dim)))


def rotation_tables(length: int, config: TransformerConfig) -> tuple[Halves, Halves]:
    """The runtime's cosines and sines, [length, h / 2]."""
    table = np.array(rope_table(length, config.head_dim, config.rope_base)).astype(np.float16)
    return table[..., 0], table[..., 1]


# ---------------------------------------------------------------------- the slow AR


def slow_program(config: ModelConfig, store: Store, length: int, slots: int) -> Any:
    """T = `length` columns into caches of `slots`.

    Inputs: embedded float16 [1, T, D]; slot int32 [1], where the first of them goes; hole int32
    [2], slots [begin, end) that hold padding. States: keys and values, float16 [layers, K, S, h].
    Outputs, of the last position: hidden float16 [1, D], what the fast AR is given; logits
    float16 [1, C + 1] of the semantic tokens, then the end.
    """
    c = config.slow
    cache = (c.n_layer, c.n_kv_head, slots, c.head_dim)

    def program(embedded: Var, slot: Var, hole: Var, keys: Var, values: Var) -> tuple[Var, Var]:
        query = mb.add(x=slot, y=np.arange(length, dtype=np.int32))
        begin, end = mb.split(x=hole, num_splits=2, axis=0)
        rotation = _slow_rotation(c, slots, query, begin, end)
        mask = _slow_mask(slots, query, begin, end)
        mask = mb.concat(values=[mask] * (c.n_head // c.n_kv_head), axis=0)
        caches = [_Cache(keys), _Cache(values)]
        after = mb.add(x=slot, y=np.int32(length))
        x = embedded
        for layer in range(c.n_layer):
            block = Block(c, store, f"layers.{layer}")

            def keep(k: Var, v: Var, layer: int = layer) -> tuple[Var, Var]:
                one, other = (
                    cache.put(new, layer, slot, after)
                    for cache, new in zip(caches, (k, v), strict=True)
                )
                return one, other

            x = block.forward(x, rotation, keep, mask)
        if length > 1:
            x = mb.slice_by_index(x=x, begin=[0, length - 1, 0], end=[1, length, c.dim])
        x = mb.reshape(x=x, shape=(1, c.dim))
        normed = Norm.of(store, "norm", c.norm_eps)(x)
        logits = mb.linear(x=normed, weight=constant(semantic_head(config, store), "head_semantic"))
        given = normed if config.norm_fastlayer_input else x
        return mb.identity(x=given, name="hidden"), mb.identity(x=logits, name="logits")

    inputs = [
        mb.TensorSpec((1, length, c.dim), dtype=types.fp16),
        mb.TensorSpec((1,), dtype=types.int32),
        mb.TensorSpec((2,), dtype=types.int32),
        mb.StateTensorSpec(cache, dtype=types.fp16),
        mb.StateTensorSpec(cache, dtype=types.fp16),
    ]
    return mb.program(input_specs=inputs, opset_version=AvailableTarget.iOS18)(program)


class _Cache:
    """Keys or values of all layers, a state of the program."""

    def __init__(self, state: Var) -> None:
        self._state, self._now = state, mb.read_state(input=state)

    def put(self, new: Var, layer: int, slot: Var, after: Var) -> Var:
        """Write [1, K, T, h] at slots slot … after - 1 of a layer and give the layer's cache."""
        _, heads, slots, width = self._now.shape
        first, last = np.array([layer], np.int32), np.array([layer + 1], np.int32)
        zero, all_heads = np.array([0], np.int32), np.array([heads], np.int32)
        changed = mb.slice_update(
            x=self._now,
            update=new,
            begin=mb.concat(values=[first, zero, slot, zero], axis=0),
            end=mb.concat(values=[last, all_heads, after, np.array([width], np.int32)], axis=0),
        )
        self._now = mb.coreml_update_state(state=self._state, value=changed)
        return mb.slice_by_index(
            x=self._now, begin=[layer, 0, 0, 0], end=[layer + 1, heads, slots, width]
        )


def _slow_rotation(c: TransformerConfig, slots: int, query: Var, begin: Var, end: Var) -> Rotation:
    """Positions count real columns only: behind the hole they are less by its length."""
    behind = mb.cast(x=mb.greater_equal(x=query, y=end), dtype="int32")
    position = mb.sub(x=query, y=mb.mul(x=behind, y=mb.sub(x=end, y=begin)))
    cos, sin = rotation_tables(slots, c)
    return Rotation(
        mb.gather(x=mb.const(val=cos, name="cos"), indices=position, axis=0),
        mb.gather(x=mb.const(val=sin, name="sin"), indices=position, axis=0),
    )


def _slow_mask(slots: int, query: Var, begin: Var, end: Var) -> Var:
    """What is added to scores, [T, S]: 0 where a query sees, else a lot less."""
    slot, query = np.arange(slots, dtype=np.int32)[None], mb.expand_dims(x=query, axes=[1])
    key = mb.const(val=slot, name="slots")
    outside = mb.logical_or(x=mb.less(x=key, y=begin), y=mb.greater_equal(x=key, y=end))
    seen = mb.logical_and(x=mb.less_equal(x=key, y=query), y=outside)
    # A padding query keeps sight of itself, or its softmax would have nothing to sum.
    seen = mb.cast(x=mb.logical_or(x=seen, y=mb.equal(x=key, y=query)), dtype="fp16")
    return mb.mul(x=mb.sub(x=seen, y=np.float16(1)), y=np.float16(-MASKED))


def semantic_head(config: ModelConfig, store: Store) -> npt.NDArray[np.float32]:
    """Rows of the text table that can be chosen: semantic tokens, then EOS."""
    name, eos = "embeddings.weight", config.eos_token_id
    semantic = store.rows(name, config.semantic_begin_id, config.semantic_end_id + 1)
    return np.concatenate([semantic, store.rows(name, eos, eos + 1)])


# ---------------------------------------------------------------------- the fast AR


def fast_program(config: ModelConfig, store: Store) -> Any:
    """The nine passes of a frame as one program, keys and values inside of it.

    Inputs: hidden float16 [1, D] of the slow AR; code int32 [1], the semantic one; noise float32
    [9, C], -log(-log(u)) of uniforms u, by code; top_k int32 [1], at most CANDIDATES; top_p and
    temperature float32 [1]. Output: codes int32 [10], the given one first.
    """
    c = config.fast
    books = config.num_codebooks

    def program(
        hidden: Var, code: Var, noise: Var, top_k: Var, top_p: Var, temperature: Var
    ) -> Var:
        blocks = [Block(c, store, f"fast_layers.{i}") for i in range(c.n_layer)]
        norm = Norm.of(store, "fast_norm", c.norm_eps)
        table = constant(store.plain("fast_embeddings.weight"), "fast_embeddings")
        output = Matrix(store, "fast_output")
        draw = Draw(config.codebook_size, top_k, top_p, temperature)
        cos, sin = rotation_tables(books, c)
        caches: list[tuple[Var, Var] | None] = [None] * c.n_layer
        first = hidden
        if c.dim != config.dim:
            first = Matrix(store, "fast_project_in", "fast_project_in.bias")(hidden)
        first = mb.reshape(x=first, shape=(1, 1, c.dim))

        def embedded(chosen: Var) -> Var:
            row = mb.gather(x=table, indices=chosen, axis=0)
            return mb.expand_dims(x=row, axes=[0])

        # The first two positions are both known: one pass of length two.
        x = mb.concat(values=[first, embedded(code)], axis=1)
        at, codes = 0, [code]
        for book in range(1, books):
            length = x.shape[1]
            rotation = Rotation(cos[at : at + length], sin[at : at + length])
            mask = _causal(length, c.n_head // c.n_kv_head) if length > 1 else None
            at += length
            for i, block in enumerate(blocks):

                def keep(k: Var, v: Var, i: int = i) -> tuple[Var, Var]:
                    before = caches[i]
                    if before is not None:
                        k = mb.concat(values=[before[0], k], axis=2)
                        v = mb.concat(values=[before[1], v], axis=2)
                    caches[i] = (k, v)
                    return k, v

                x = block.forward(x, rotation, keep, mask)
            if length > 1:
                x = mb.slice_by_index(x=x, begin=[0, length - 1, 0], end=[1, length, c.dim])
            normed = norm(mb.reshape(x=x, shape=(1, c.dim)))
            logits = output(normed, name=f"logits_{book}")
            row = mb.slice_by_index(x=noise, begin=[book - 1, 0], end=[book, config.codebook_size])
            codes.append(draw(logits, row))
            x = embedded(codes[-1])
        return mb.concat(values=codes, axis=0, name="codes")

    inputs = [
        mb.TensorSpec((1, config.dim), dtype=types.fp16),
        mb.TensorSpec((1,), dtype=types.int32),
        mb.TensorSpec((books - 1, config.codebook_size), dtype=types.fp32),
        mb.TensorSpec((1,), dtype=types.int32),
        mb.TensorSpec((1,), dtype=types.fp32),
        mb.TensorSpec((1,), dtype=types.fp32),
    ]
    return mb.program(input_specs=inputs, opset_version=AvailableTarget.iOS18)(program)


def _causal(length: int, group: int) -> Halves:
    """Mask of the first pass, [group * T, T]."""
    place = np.arange(length)
    mask = np.where(place[None] <= place[:, None], 0, MASKED).astype(np.float16)
    return np.tile(mask, (group, 1))


class Draw:
    """The choice of a code as `sampling` makes it, in 32 bits: softmax of the untempered scores
    cumulated from the best, the filter of top_k and top_p, the temperature, the largest of score
    and noise. Noise is by code and not by rank: two scores that are equal in 16 bits may change
    places, and each must keep its own."""

    def __init__(self, size: int, top_k: Var, top_p: Var, temperature: Var) -> None:
        self.kept = min(CANDIDATES, size)
        rank = np.arange(self.kept, dtype=np.int32)[None]
        within = mb.cast(x=mb.less(x=mb.const(val=rank, name="ranks"), y=top_k), dtype="fp32")
        best = (rank == 0).astype(np.float32)
        self.within, self.best = within, mb.const(val=best, name="best")
        self.top_p = top_p
        self.temperature = mb.maximum(x=temperature, y=np.float32(MIN_TEMPERATURE))

    def __call__(self, logits: Var, noise: Var) -> Var:
        """A code int32 [1] from logits float16 [1, C] and noise float32 [1, C]."""
        scores = mb.cast(x=logits, dtype="fp32")
        values, order = mb.topk(x=scores, k=self.kept, axis=1, ascending=False, sort=True)
        first = mb.slice_by_index(x=values, begin=[0, 0], end=[1, 1])
        whole = mb.reduce_sum(x=mb.exp(x=mb.sub(x=scores, y=first)), axes=[1], keep_dims=True)
        below = mb.sub(x=values, y=first)
        mass = mb.real_div(x=mb.cumsum(x=mb.exp(x=below), axis=1), y=whole)
        inside = mb.cast(x=mb.less_equal(x=mass, y=self.top_p), dtype="fp32")
        keep = mb.maximum(x=mb.mul(x=inside, y=self.within), y=self.best)
        race = mb.add(
            x=mb.real_div(x=below, y=self.temperature),
            y=mb.gather_along_axis(x=noise, indices=order, axis=1),
        )
        race = mb.add(x=race, y=mb.mul(x=mb.sub(x=keep, y=np.float32(1)), y=np.float32(NEVER)))
        winner = mb.reduce_argmax(x=race, axis=1, keep_dims=True)
        return mb.reshape(x=mb.gather_along_axis(x=order, indices=winner, axis=1), shape=(1,))
