"""Packed weights as Core ML holds them: the bundle's own grid. Needs no extra."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from warble_mlx.errors import CheckpointError
from warble_mlx.ios_export.mil_weights import Store, grid_error
from warble_mlx.weights import MODEL_FILE

PATH = "layers.0.attention.wqkv"


def store(folder: Path, bits: int = 4, group: int = 64, dtype: mx.Dtype = mx.bfloat16) -> Store:
    """A model file with one packed Linear [96, 256] and a table."""
    weight = mx.random.normal((96, 256), key=mx.random.key(bits)).astype(dtype)
    weight[5, :64] = 0  # a group without any range
    packed, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
    tensors = {
        f"{PATH}.weight": packed,
        f"{PATH}.scales": scales,
        f"{PATH}.biases": biases,
        "embeddings.weight": weight,
    }
    mx.save_safetensors(str(folder / MODEL_FILE), tensors)
    return Store(folder, {"quantization": {"bits": bits, "group_size": group, "mode": "affine"}})


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (8, 64), (3, 64), (6, 128)])
def test_unpacked_values_are_mlx_s(tmp_path: Path, bits: int, group: int) -> None:
    found = store(tmp_path, bits, group)
    exact, grid = found.exact(PATH), found.grid(PATH)
    assert exact.integers.max() == 2**bits - 1
    wide = [np.repeat(part, group, axis=1) for part in (exact.scales, exact.biases)]
    tensors = mx.load(str(tmp_path / MODEL_FILE))
    assert isinstance(tensors, dict)
    wanted = mx.dequantize(
        tensors[f"{PATH}.weight"],
        *(tensors[f"{PATH}.{part}"].astype(mx.float32) for part in ("scales", "biases")),
        group_size=group,
        bits=bits,
    )
    np.testing.assert_allclose(wide[0] * exact.integers + wide[1], np.array(wanted), atol=1e-6)
    assert 0 < grid_error(grid, exact) <= 1
    if bits <= 4:
        offsets = np.repeat(exact.biases / exact.scales + grid.offsets, group, axis=1)
        assert 0 < np.abs(offsets).max() < 0.01  # of a step


def test_a_grid_that_differs_is_noticed(tmp_path: Path) -> None:
    found = store(tmp_path)
    exact, grid = found.exact(PATH), found.grid(PATH)
    integers, scales, offsets = (part.copy() for part in grid[:3])
    integers[3, 7] ^= 1
    assert grid_error(grid._replace(integers=integers), exact) == np.inf
    scales[3, 1] = np.nextafter(scales[3, 1], np.float16(np.inf))
    assert grid_error(grid._replace(scales=scales), exact) == np.inf
    offsets[3, 1] += np.float16(0.125)
    assert grid_error(grid._replace(offsets=offsets), exact) > 10


def test_a_mode_that_core_ml_lacks_is_named(tmp_path: Path) -> None:
    store(tmp_path)
    other = Store(tmp_path, {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})
    with pytest.raises(CheckpointError, match=r"wqkv is packed in mode mxfp4.*--mode affine"):
        other.grid(PATH)


def test_rows_of_a_table_are_widened(tmp_path: Path) -> None:
    found = store(tmp_path)
    whole = found.plain("embeddings.weight")
    assert whole.dtype == np.float32
    assert np.array_equal(found.rows("embeddings.weight", 3, 6), whole[3:6])
    assert found.packed == [PATH]
    assert json.dumps(sorted(found.header.entries)).count(PATH) == 3
