"""Rounding learned from token streams: the packed format, and that it is better than to nearest."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from warble_mlx.bench.synthetic import linear_shapes
from warble_mlx.errors import WarbleError
from warble_mlx.fidelity.compare import open_float32, with_frames
from warble_mlx.fidelity.divergence import Reference
from warble_mlx.fidelity.streams import generate, requests_for
from warble_mlx.fidelity.sweep import replaced, rounded
from warble_mlx.fidelity.texts import CALIBRATION, EVALUATION
from warble_mlx.hub import bundled_folder
from warble_mlx.quant.affine import grid, packed
from warble_mlx.quant.calibration import calibration_streams, check_modes, learn
from warble_mlx.quant.compensation import compensate, damped, inverse_factor
from warble_mlx.quant.policy import Packing, plan

GROUP = 32


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_is_that_of_mlx(bits: int) -> None:
    rng = np.random.default_rng(bits)
    integers = rng.integers(0, 2**bits, (6, 64), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, (6, 2)).astype(np.float32)
    biases = rng.normal(size=(6, 2)).astype(np.float32)
    words = packed(integers, bits)
    assert words.dtype == mx.uint32
    got = mx.dequantize(words, mx.array(scales), mx.array(biases), group_size=GROUP, bits=bits)
    wanted = integers * np.repeat(scales, GROUP, 1) + np.repeat(biases, GROUP, 1)
    assert np.abs(np.array(got) - wanted).max() < 1e-4


def test_the_grid_gives_way_where_inputs_matter_little() -> None:
    """Outliers whose inputs are hardly ever there do not stretch the others' grid."""
    weight = np.linspace(-1, 1, GROUP, dtype=np.float32)[:, None].repeat(2, 1)
    weight[0], weight[1] = -1.5, 1.5
    importance = np.ones(GROUP, np.float32)
    shrinks = np.array([1, 0.7], np.float32)
    even, _ = grid(weight, importance, 4, mx.float32, shrinks)
    importance[:2] = 0
    given_way, _ = grid(weight, importance, 4, mx.float32, shrinks)
    assert (given_way < even).all()


@pytest.mark.parametrize("bits", [3, 4])
def test_compensation_lessens_the_error_of_the_outputs(bits: int) -> None:
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(64, 64)) / 4
    inputs = (rng.normal(size=(500, 64)) @ mixing).astype(np.float32)
    weight = rng.normal(size=(48, 64)).astype(np.float32)
    products = damped(inputs.T.astype(np.float64) @ inputs)
    learned = compensate(
        weight, inverse_factor(products), np.diag(products), bits, GROUP, mx.bfloat16
    )
    assert learned.scales.dtype == learned.biases.dtype == mx.bfloat16
    plain = mx.quantize(mx.array(weight).astype(mx.bfloat16), GROUP, bits)
    assert [p.shape for p in learned] == [p.shape for p in plain]
    errors = []
    for weights, scales, biases in (learned, plain):
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        back = mx.dequantize(weights, scales, biases, group_size=GROUP, bits=bits)
        errors.append(np.square(inputs @ (np.array(back) - weight).T).mean())
    assert errors[0] < 0.7 * errors[1]


def test_the_inverse_factor() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 12))
    products = damped(x.T @ x)
    factor = inverse_factor(products).astype(np.float64)
    assert np.allclose(np.triu(factor), factor)
    assert np.allclose(factor.T @ factor @ products, np.eye(12), atol=1e-4)


def test_only_affine_scales_can_be_learned() -> None:
    check_modes({"a": Packing(4, 64, "affine")})
    with pytest.raises(WarbleError, match="not in nvfp4: leave out --calibrate, or --mode"):
        check_modes({"a": Packing(4, 64, "affine"), "b": Packing(4, 16, "nvfp4")})


def test_too_many_texts_are_refused() -> None:
    warble = open_float32(bundled_folder())
    with pytest.raises(WarbleError, match=r"129 calibration texts are more than.*at most 128"):
        calibration_streams(warble, ["Yes."] * 129)


def test_it_beats_rounding_on_other_texts() -> None:
    """The bundled model's fast AR at 3 bits, on a few sentences."""
    warble = open_float32(bundled_folder())
    model = warble.engine.model
    layers = plan(linear_shapes(model), Packing(3, 64, "affine"), "fast-linears")
    names = layers | {p.replace(".w1", ".w3"): own for p, own in layers.items()}
    given = calibration_streams(warble, [CALIBRATION[i] for i in (9, 25, 27)])
    before = dict(tree_flatten(model.parameters()))
    learned = learn(model, names, given)
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert learned.keys() == names.keys()

    streams = with_frames(generate(warble.engine, requests_for(warble, EVALUATION[18:19], 1001)))
    known = Reference(model, streams)
    with rounded(model, layers):
        plain = known.compare(model)
    with replaced(model, learned, names):
        better = known.compare(model)
    assert better.fast_kl < 0.8 * plain.fast_kl
    assert known.compare(model).fast_kl < 1e-6, "the model's own weights are back"
