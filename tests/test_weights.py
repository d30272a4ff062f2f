"""Loading a bundle: strict about names and shapes, exact about what is quantised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from warble_mlx.dual_ar import DualAR
from warble_mlx.errors import CheckpointError
from warble_mlx.layers import project
from warble_mlx.packed_check import check_packed_products
from warble_mlx.weights import load_dual_ar

GATE = "layers.1.feed_forward.w1"


@pytest.fixture
def folder(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "model"))


def rewrite(folder: Path, change: dict[str, mx.array | None]) -> None:
    """Replace or (None) remove tensors of model.safetensors."""
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    mx.eval(list(weights.values()))
    weights |= {k: v for k, v in change.items() if v is not None}
    for name in [k for k, v in change.items() if v is None]:
        del weights[name]
    mx.save_safetensors(str(path), weights)


def test_every_parameter_is_the_files(tiny_source: Path, tiny_dual_ar: DualAR) -> None:
    stored = mx.load(str(tiny_source / "model.safetensors"))
    gates = [stored[f"layers.1.feed_forward.{n}.weight"].astype(mx.float32) for n in ("w1", "w3")]
    joined = tiny_dual_ar.layers[1].feed_forward.w13.weight
    assert mx.array_equal(joined, mx.concatenate(gates)).item()
    assert tiny_dual_ar.embeddings.weight.dtype == mx.bfloat16, "tables stay as stored"
    assert mx.array_equal(tiny_dual_ar.embeddings.weight, stored["embeddings.weight"]).item()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm.weight": None}, r"1 missing \(norm\.weight\)"),
        ({"extra.weight": mx.zeros((2,))}, r"1 unexpected \(extra\.weight\)"),
        ({"norm.weight": mx.zeros((64,))}, r"1 of another shape \(norm\.weight\)"),
        ({"layers.0.feed_forward.w3.weight": None}, r"layers\.0\.feed_forward\.w1.* no w3"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, change: dict[str, mx.array | None], says: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=says):
        load_dual_ar(folder, mx.float32)


def test_a_config_that_wants_more_than_the_file_has(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_qk_norm": True}))
    with pytest.raises(CheckpointError, match=r"k_norm"):
        load_dual_ar(folder, mx.float32)


def quantise(folder: Path, bits: int = 4, block: dict[str, object] | None = None) -> None:
    """Pack every block Linear, as the quantiser does."""
    stored = mx.load(str(folder / "model.safetensors"))
    change: dict[str, mx.array | None] = {}
    for name, weight in stored.items():
        if "layers." in name and weight.ndim == 2:
            packed, scales, biases = mx.quantize(weight, 64, bits)
            path = name.removesuffix(".weight")
            change |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
    mx.eval(list(change.values()))
    rewrite(folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": 64} if block is None else block
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_and_dequantised_linears_agree(folder: Path, bits: int) -> None:
    quantise(folder, bits)
    packed = load_dual_ar(folder, mx.float32)
    plain = load_dual_ar(folder, mx.float32, dequantize=True)
    x = mx.random.normal((3, 128), key=mx.random.key(0))
    for model in (packed, plain):
        kind = nn.QuantizedLinear if model is packed else nn.Linear
        assert type(model.layers[0].feed_forward.w13) is kind
        assert type(model.fast_output) is nn.Linear
    got, wanted = (project(m.fast_layers[1].feed_forward.w13, x) for m in (packed, plain))
    assert np.abs(np.array(got) - np.array(wanted)).max() < 1e-4


def test_packed_weights_without_a_block_are_explained(folder: Path) -> None:
    quantise(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match='no "quantization" block'):
        load_dual_ar(folder, mx.float32)


def test_packed_weights_that_the_block_denies(folder: Path) -> None:
    quantise(folder, block={"bits": 4, "group_size": 64, GATE: False})
    with pytest.raises(CheckpointError, match=rf"packed weights for {GATE}"):
        load_dual_ar(folder, mx.float32)


def test_a_damaged_file_is_described(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_dual_ar(folder, mx.float32)


def test_wrong_packed_products_are_noticed_when_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise(folder)
    load_dual_ar(folder, mx.float32)
    right = mx.quantized_matmul

    def zeros(x: mx.array, *args: object, **settings: object) -> mx.array:
        result = right(x, *args, **settings)
        return mx.zeros_like(result) if x.shape[0] > 1 else result

    monkeypatch.setattr(mx, "quantized_matmul", zeros)
    with pytest.raises(CheckpointError, match=rf"33 rows.*MLX {mx.__version__}.*--dequantize"):
        load_dual_ar(folder, mx.float32)
    load_dual_ar(folder, mx.float32, dequantize=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_right_packed_products_pass_in_every_dtype(folder: Path, dtype: mx.Dtype) -> None:
    quantise(folder)
    assert check_packed_products(load_dual_ar(folder, dtype), dtype) == 4
