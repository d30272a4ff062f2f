"""The arithmetic of conversion against formulas written another way."""

from __future__ import annotations

import numpy as np
import pytest

from warble_mlx.convert.names import CONV, TRANSPOSED, Spec
from warble_mlx.convert.stored import StoredTensor
from warble_mlx.convert.transform import bundle_values, fold_weight_norm
from warble_mlx.errors import CheckpointError


def stored(values: np.ndarray, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(values.shape, dtype, lambda: values)


def spec(shape: tuple[int, ...], axes: tuple[int, int, int] | None = None) -> Spec:
    return Spec("some.weight", shape, axes, True, "model.safetensors", "")


def test_each_first_axis_slice_gets_the_length_of_the_magnitude() -> None:
    random = np.random.default_rng(1)
    v = random.standard_normal((6, 5, 7)).astype(np.float32)
    g = random.uniform(-2, 2, (6, 1, 1)).astype(np.float32)
    w = fold_weight_norm(g, v)
    assert w.dtype == np.float32
    for i in range(6):
        exact = v[i].astype(np.float64) * float(g[i, 0, 0])
        exact /= np.sqrt(sum(float(x) ** 2 for x in v[i].ravel()))
        assert np.abs(w[i] - exact).max() < 1e-7 * np.abs(exact).max() * 2
        assert np.linalg.norm(w[i].astype(np.float64)) == pytest.approx(abs(g[i, 0, 0]), rel=1e-6)


def test_the_norm_is_not_taken_over_the_second_axis() -> None:
    v = np.ones((2, 3, 4), np.float32)
    w = fold_weight_norm(np.ones((2, 1, 1), np.float32), v)
    assert w[0, 0, 0] == pytest.approx(1 / np.sqrt(12))


def test_folding_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is only needed to read a .pth")
    random = np.random.default_rng(2)
    v = random.standard_normal((64, 32, 16)).astype(np.float32)
    g = random.uniform(0.1, 2, (64, 1, 1)).astype(np.float32)
    want = torch._weight_norm(torch.from_numpy(v), torch.from_numpy(g), 0).numpy()
    assert np.abs(fold_weight_norm(g, v) - want).max() <= 1e-7


def test_axes() -> None:
    conv = np.arange(24, dtype=np.float32).reshape(2, 3, 4)  # out, in, k
    got = bundle_values(spec((2, 3, 4), CONV), (stored(conv),), "F32", channels_last=False)
    assert got.shape == (2, 4, 3)
    assert all(got[o, k, i] == conv[o, i, k] for o in range(2) for i in range(3) for k in range(4))
    up = np.arange(24, dtype=np.float32).reshape(2, 3, 4)  # in, out, k
    got = bundle_values(spec((2, 3, 4), TRANSPOSED), (stored(up),), "F32", channels_last=False)
    assert got.shape == (3, 4, 2)
    assert all(got[o, k, i] == up[i, o, k] for i in range(2) for o in range(3) for k in range(4))


def test_channels_last_is_left_alone() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    got = bundle_values(spec((2, 3, 4), CONV), (stored(values),), "F32", channels_last=True)
    assert np.array_equal(got, values)


def test_same_dtype_is_passed_through_bit_for_bit() -> None:
    bits = np.array([0x0001, 0x8000, 0x3F80, 0x7F7F], np.uint16)
    got = bundle_values(spec((4,)), (stored(bits, "BF16"),), "BF16", channels_last=False)
    assert np.array_equal(got, bits)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_named(bad: float, dtype: str) -> None:
    values = np.array([1, bad], np.float32)
    raw = {"F32": values, "F16": values.astype(np.float16), "BF16": values.view(np.uint16)[1::2]}
    with pytest.raises(CheckpointError, match=r"some\.weight holds NaN or infinity"):
        bundle_values(spec((2,)), (stored(raw[dtype], dtype),), "F32", channels_last=False)


def test_not_finite_magnitude_is_named() -> None:
    g, v = np.array([[[np.nan]]], np.float32), np.ones((1, 2, 3), np.float32)
    with pytest.raises(CheckpointError, match=r"some\.weight holds NaN or infinity"):
        bundle_values(spec((1, 2, 3)), (stored(g), stored(v)), "F32", channels_last=False)


def test_direction_of_length_zero_is_named() -> None:
    g, v = np.ones((2, 1, 1), np.float32), np.ones((2, 2, 3), np.float32)
    v[1] = 0
    with pytest.raises(CheckpointError, match=r"some\.weight has a weight-norm direction of len"):
        bundle_values(spec((2, 2, 3)), (stored(g), stored(v)), "F32", channels_last=False)


def test_overflow_of_float16_is_an_error_and_bfloat16_takes_it() -> None:
    values = np.array([1, 70000], np.float32)
    with pytest.raises(CheckpointError, match=r"some\.weight holds values too large for F16"):
        bundle_values(spec((2,)), (stored(values),), "F16", channels_last=False)
    got = bundle_values(spec((2,)), (stored(values),), "BF16", channels_last=False)
    assert got.tolist() == [0x3F80, 0x4789]
