"""Models made in memory: what is packed, what stays finite, and that they never end early."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from warble_mlx.bench.subject import synthetic_subject
from warble_mlx.bench.synthetic import (
    PUBLISHED,
    TINY,
    dequantize,
    layout,
    quantize_blocks,
    random_codec,
    random_dual_ar,
    runnable,
)
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.errors import WarbleError
from warble_mlx.layers import project
from warble_mlx.quant.policy import packing


def packed_paths(model: DualAR) -> set[str]:
    return {p for p, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)}


def test_only_and_all_block_linears_are_packed() -> None:
    names = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
    for config in (TINY, PUBLISHED):
        expected = {
            f"{stack}.{i}.{name}"
            for stack, depth in (("layers", config.n_layer), ("fast_layers", config.n_fast_layer))
            for i in range(depth)
            for name in names
        }
        assert packed_paths(layout(config, packing(4))) == expected
        assert packed_paths(layout(config, None)) == set()


def test_weights_follow_from_the_seed() -> None:
    first, again = (dict(tree_flatten(random_dual_ar(TINY).parameters())) for _ in range(2))
    other = dict(tree_flatten(random_dual_ar(TINY, seed=1).parameters()))
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not mx.array_equal(first["fast_output.weight"], other["fast_output.weight"])
    assert all(weight.dtype == mx.bfloat16 for weight in first.values())


def test_unpacking_gives_what_packed_products_use() -> None:
    packed, plain = random_dual_ar(TINY), random_dual_ar(TINY)
    for model in (packed, plain):
        quantize_blocks(model, packing(4))
    dequantize(plain, mx.float32)
    packed.set_dtype(mx.float32)
    assert packed_paths(plain) == set()
    x = mx.random.normal((1, TINY.dim), key=mx.random.key(0))
    for name in ("wqkv", "wo"):
        linear, same = (getattr(m.layers[1].attention, name) for m in (packed, plain))
        assert np.allclose(project(linear, x), project(same, x), atol=1e-5)
    assert "bias" in plain.layers[1].attention.wqkv


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)])
def test_eos_is_never_chosen(sampling: Sampling) -> None:
    model = runnable(TINY, mx.float32)
    assert not mx.any(model.embeddings.weight[TINY.eos_token_id])
    subject = synthetic_subject("tiny")
    request = subject.request(0, 60)._replace(sampling=sampling)
    emissions = list(Engine(model, compiled=False).generate([request]))
    assert emissions[-1].finish_reason == "length"
    codes = np.stack([e.codes for e in emissions if e.codes is not None], axis=1)
    assert codes.shape == (10, 60)
    assert len(np.unique(codes)) > 20


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_activations_stay_finite_and_of_their_size(dtype: mx.Dtype) -> None:
    subject = synthetic_subject("tiny")
    state = Engine(runnable(TINY, dtype), compiled=False).prefill(subject.request(0, 1).prompt)
    size = mx.sqrt(mx.mean(mx.square(state.hidden.astype(mx.float32)))).item()
    assert 0.1 < size < 10


def test_codec_makes_finite_sound() -> None:
    samples = np.array(random_codec(TINY).decode(mx.zeros((1, 10, 3), dtype=mx.int32)))
    assert samples.shape == (1, 3 * TINY.codec_frame_size)
    assert np.isfinite(samples).all()


def test_subjects_of_another_recipe_have_another_fingerprint() -> None:
    found = {
        synthetic_subject("tiny", bits=bits, prompt_columns=columns).fingerprint
        for bits, columns in ((4, 64), (8, 64), (16, 64), (16, 100))
    }
    assert len(found) == 3  # the prompt is no part of the model


def test_prompt_length_is_taken_and_checked() -> None:
    subject = synthetic_subject("tiny", prompt_columns=100)
    prompt = subject.request(0, 1).prompt
    assert prompt.columns.shape == (11, 100)
    assert isinstance(subject.request(3, 7), Request)
    assert prompt.columns[0].max() < TINY.eos_token_id
    with pytest.raises(WarbleError, match="columns"):
        synthetic_subject("tiny", prompt_columns=20)


def test_unknown_bits_and_dtypes_are_refused() -> None:
    with pytest.raises(WarbleError, match="bits 7"):
        synthetic_subject("tiny", bits=7)
    with pytest.raises(WarbleError, match="float8"):
        synthetic_subject("tiny", dtype="float8")
