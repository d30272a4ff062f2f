"""Counting the primitives of a graph, and of the frame step."""

from __future__ import annotations

import mlx.core as mx
import pytest

from warble_mlx.bench.graph import (
    FUSED,
    cache_slots,
    primitives,
    step_primitives,
    unfused_primitives,
    without_fusion,
)
from warble_mlx.bench.subject import synthetic_prompt
from warble_mlx.bench.synthetic import TINY, runnable
from warble_mlx.engine import Engine, Request, Sampling


def chain(x: mx.array) -> mx.array:
    turned = (x * 2 + 1).T  # two primitives and a view
    return mx.softmax(mx.exp(turned), axis=-1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(runnable(TINY, mx.float32), compiled=True)


@pytest.fixture(scope="module")
def request_() -> Request:
    return Request(synthetic_prompt(TINY), 40, Sampling(), 0)


def test_views_are_not_dispatched() -> None:
    x = mx.ones((4, 8))
    mx.eval(x)
    counted = primitives([chain(x)])
    assert {n: counted.by_name[n] for n in ("Multiply", "Add", "Exp", "Softmax", "Transpose")} == {
        "Multiply": 1,
        "Add": 1,
        "Exp": 1,
        "Softmax": 1,
        "Transpose": 1,
    }
    assert counted.dispatched == 4
    assert counted.views == sum(counted.by_name.values()) - 4


def test_a_fused_group_is_one_primitive() -> None:
    x = mx.ones((4, 8))
    mx.eval(x)
    counted = primitives([mx.compile(lambda x: mx.softmax(mx.exp(x * 2 + 1), axis=-1))(x)])
    assert counted.by_name == {FUSED: 1, "Softmax": 1}


def test_what_is_evaluated_already_does_not_count() -> None:
    x = mx.ones((4, 8)) * 2
    mx.eval(x)
    assert primitives([mx.exp(x)]).by_name == {"Exp": 1}


def test_fusion_is_switched_on_again() -> None:
    x = mx.ones((4,))
    mx.eval(x)
    twice = mx.compile(lambda x: mx.exp(x * 2))
    with without_fusion():
        assert FUSED not in primitives([twice(x)]).by_name
    assert primitives([twice(x)]).by_name == {FUSED: 1}
    with pytest.raises(RuntimeError, match="inside"), without_fusion():
        raise RuntimeError("inside")
    assert primitives([twice(x)]).by_name == {FUSED: 1}


def test_step(engine: Engine, request_: Request) -> None:
    fused, unfused = step_primitives(engine, request_), unfused_primitives(engine, request_)
    layers = TINY.n_layer + (TINY.num_codebooks - 1) * TINY.n_fast_layer
    # Four Linears per block, the head, nine fast outputs, two products in each attention.
    products = layers * 4 + 1 + TINY.num_codebooks - 1
    assert unfused.by_name["Matmul"] >= products
    assert fused.by_name["Matmul"] == unfused.by_name["Matmul"]
    assert FUSED not in unfused.by_name
    assert fused.by_name[FUSED] > layers
    assert fused.dispatched < unfused.dispatched


def test_counting_computes_and_changes_nothing(engine: Engine, request_: Request) -> None:
    traces = engine.traces
    first = step_primitives(engine, request_)
    assert step_primitives(engine, request_) == first
    assert engine.traces <= traces + 1


def test_cache_slots_follow_prompt_and_frames(engine: Engine) -> None:
    # A prefix of 20, then 44 columns padded to 64.
    prompt = synthetic_prompt(TINY, 64)
    assert cache_slots(engine, Request(prompt, 172, Sampling(), 0)) == 256
    assert cache_slots(engine, Request(prompt, 173, Sampling(), 0)) == 512
