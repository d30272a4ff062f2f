"""Quantised bundles: what is packed and recorded, what is proven, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import packing_stand_in
import pytest
import synthetic

from warble_mlx.config import read_config
from warble_mlx.convert import convert
from warble_mlx.convert.names import DECODER, MODEL, expected_tensors
from warble_mlx.dual_ar import DualAR
from warble_mlx.errors import CheckpointError, MissingExtraError, WarbleError
from warble_mlx.fidelity.compare import stored_packings
from warble_mlx.inspect_bundle import describe_bundle, format_description
from warble_mlx.quant import LayerException, Packing, quantize
from warble_mlx.quant.policy import packing, plan
from warble_mlx.quant.proof import PUBLISHED_LIMIT, PUBLISHED_PARAMETERS, check_size
from warble_mlx.weights import load_dual_ar

LAYERS = 2  # of each transformer
NAMES = ("attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
BLOCK_LINEARS = {
    f"{prefix}.{i}.{name}"
    for prefix in ("layers", "fast_layers")
    for i in range(LAYERS)
    for name in NAMES
}
KEPT = {"codebook_embeddings", "embeddings", "fast_embeddings", "fast_output"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, converted."""
    folder = tmp_path_factory.mktemp("small")
    source = synthetic.write_source(folder / "source")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (source / "NOTICE").write_text("Credits.\n")
    convert(source, folder / "bundle", source_id="someone/model", revision="abc")
    (folder / "bundle" / "self_test.json").write_text("{}")
    return folder / "bundle"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    packing_stand_in.install(monkeypatch)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def tensors(folder: Path) -> dict[str, mx.array]:
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    return found


def test_the_block_linears_are_packed_and_nothing_else_moves(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = quantize(bundle, out, check=False)
    before, after = tensors(bundle), tensors(out)
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    assert packed == BLOCK_LINEARS == result.layers.keys()
    for name in before.keys() - {f"{path}.weight" for path in packed}:
        assert after[name].dtype == before[name].dtype
        assert mx.array_equal(after[name], before[name]), name
    for path in packed:
        wanted = mx.quantize(before[f"{path}.weight"], 64, 4)
        for kind, value in zip(("weight", "scales", "biases"), wanted, strict=True):
            assert mx.array_equal(after[f"{path}.{kind}"], value), path
    assert not (out / "self_test.json").exists(), "what was measured on the source is not of this"
    for name in ("codec_decoder.safetensors", "tokenizer.json", "voices.json", "NOTICE"):
        assert (out / name).read_bytes() == (bundle / name).read_bytes()


def test_what_is_written_about_it(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(bundle, out, check=False)
    config = config_of(out)
    block = config["quantization"]
    assert config["quantization_config"] == block
    assert block == {
        "group_size": 64, "bits": 4, "mode": "affine", **dict.fromkeys(KEPT, False)
    }  # fmt: skip
    assert config["provenance"]["source"] == "someone/model"
    quantizer = config["provenance"]["quantizer"]
    assert quantizer["method"] == "rounding to nearest"
    assert quantizer["policy"] == "transformer-linears"
    assert "rounding to nearest" in format_description(describe_bundle(out))
    card = (out / "README.md").read_text()
    front = card.split("---\n")[1].splitlines()
    for line in (
        "library_name: mlx",
        "pipeline_tag: text-to-speech",
        "license: apache-2.0",
        "base_model: someone/model",
        "base_model_relation: quantized",
        "- quantized",
        "- 4-bit",
    ):
        assert line in front
    assert "20 Linears of the transformer blocks in 4 bits (affine, groups of 64" in card


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("affine", Packing(4, 64, "affine")),
        ("mxfp4", Packing(4, 32, "mxfp4")),
        ("nvfp4", Packing(4, 16, "nvfp4")),
        ("mxfp8", Packing(8, 32, "mxfp8")),
    ],
)
def test_each_mode_has_its_own_group_size(
    bundle: Path, tmp_path: Path, mode: str, wanted: Packing
) -> None:
    out = tmp_path / "out"
    quantize(bundle, out, mode=mode, check=False)
    assert set(stored_packings(out).values()) == {wanted}
    model = load_dual_ar(out, mx.float32)
    assert isinstance(model.layers[0].attention.wo, nn.QuantizedLinear)


def test_exceptions_are_recorded_and_read(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exceptions = [LayerException("fast_layers", 8), LayerException("layers.1.attention", 6)]
    quantize(bundle, out, bits=4, group_size=32, exceptions=exceptions, check=False)
    assert config_of(out)["quantization"]["fast_layers.0.attention.wo"] == {
        "bits": 8, "group_size": 32, "mode": "affine"
    }  # fmt: skip
    bits = {path: packing.bits for path, packing in stored_packings(out).items()}
    assert bits["layers.1.feed_forward.w2"] == bits["layers.0.attention.wo"] == 4
    assert bits["layers.1.attention.wo"] == 6
    assert {b for path, b in bits.items() if path.startswith("fast_layers")} == {8}
    model = load_dual_ar(out, mx.float32)
    assert model.fast_layers[1].feed_forward.w13.bits == 8
    assert "10 of them in 8 bits" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bits": 7}, "bits 7 is not possible in mode affine; choose 2, 3, 4, 5, 6, 8"),
        ({"mode": "mxfp4", "bits": 8}, "bits 8 is not possible in mode mxfp4; choose 4"),
        ({"group_size": 48}, "group size 48 is not possible in mode affine; choose 32, 64, 128"),
        ({"mode": "int4"}, "mode 'int4' is not one of affine, mxfp4, nvfp4, mxfp8"),
        ({"group_size": 128}, r"group size 128 does not divide the input width of 16 Linears"),
        ({"policy": "all"}, "policy 'all' is not one of transformer-linears, slow-linears"),
        (
            {"exceptions": [LayerException("layers.7", 8)]},
            "no quantised Linear lies under 'layers.7'",
        ),
        (
            {"exceptions": [LayerException("layers.0.feed_forward.w1", 8)]},
            "w1 and w3 are one product.*layers.0.feed_forward differ.*whole feed_forward",
        ),
        (
            {"mode": "mxfp4", "calibration": ["Hello."]},
            "calibration works in mode affine, not in mxfp4",
        ),
        (
            {"calibration": ["One.", "Two."], "report": ["Three.", "Two."]},
            r"1 of the texts to measure on are those learned from \('Two\.'\)",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    bundle: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(WarbleError, match=says):
        quantize(bundle, tmp_path / "out", check=False, **options)
    assert not list(tmp_path.iterdir())


def test_a_quantised_source_is_refused(bundle: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    quantize(bundle, once, check=False)
    with pytest.raises(CheckpointError, match="is quantised already: give the bundle it was made"):
        quantize(once, tmp_path / "twice", check=False)
    config = config_of(once)
    del config["quantization"], config["quantization_config"]
    synthetic.write_json(once / "config.json", config)
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize(once, tmp_path / "twice", check=False)
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_layer": 3}, r"8 missing \(layers\.2\.attention"),
        ({"n_fast_layer": 1}, r"\d+ unexpected \(fast_layers\.1\."),
        ({"intermediate_size": 256}, r"of another shape .*feed_forward"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    bundle: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    source = shutil.copytree(bundle, tmp_path / "source")
    synthetic.write_json(source / "config.json", config_of(bundle) | change)
    with pytest.raises(CheckpointError, match=says):
        quantize(source, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()


def test_without_mlx_lm_the_pip_line_is_shown(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    with pytest.raises(MissingExtraError, match=r'pip install "warble-mlx\[quant\]"'):
        quantize(bundle, tmp_path / "out", check=False)


def packs_too_much(model: nn.Module, *args: Any, **options: Any) -> Any:
    predicate = options.pop("quant_predicate")
    return packing_stand_in.quantize_model(
        model, *args, **options,
        quant_predicate=lambda path, m: predicate(path, m) or path == "fast_output",
    )  # fmt: skip


def moves_a_norm(model: nn.Module, *args: Any, **options: Any) -> Any:
    model.norm.weight = model.norm.weight + 1
    return packing_stand_in.quantize_model(model, *args, **options)


def widens_a_table(model: nn.Module, *args: Any, **options: Any) -> Any:
    model.embeddings.weight = model.embeddings.weight.astype(mx.float32)
    return packing_stand_in.quantize_model(model, *args, **options)


def adds_a_tensor(model: nn.Module, *args: Any, **options: Any) -> Any:
    model.norm.extra = mx.zeros((2,))
    return packing_stand_in.quantize_model(model, *args, **options)


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        (packs_too_much, r"21 Linears came out packed, 20 should be: fast_output"),
        (moves_a_norm, r"norm\.weight changed"),
        (widens_a_table, r"embeddings\.weight changed"),
        (adds_a_tensor, r"tensors appeared.*norm\.extra"),
    ],
)
def test_a_result_that_is_not_as_planned_does_not_appear(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: Any, says: str
) -> None:
    packing_stand_in.install(monkeypatch, faulty)
    with pytest.raises(CheckpointError, match=says):
        quantize(bundle, tmp_path / "out", check=False)
    assert not list(tmp_path.iterdir())


def test_a_result_that_does_not_speak_does_not_appear(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(WarbleError):  # random weights: no end, or no speech
        quantize(bundle, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_published_model_by_the_policy(full_tokenizer: Path) -> None:
    """120 + 20 Linears, and the bytes that follow: the tables' lines, without any weights."""
    specs = expected_tensors(read_config(full_tokenizer), encoder=False)
    shapes = {
        name.removesuffix(".weight"): spec.shape
        for name, spec in specs.items()
        if name.endswith(".weight") and spec.file == MODEL and len(spec.shape) == 2
    }
    layers = plan(shapes, packing(4))
    fast = [path for path in layers if path.startswith("fast_layers.")]
    assert (len(layers) - len(fast), len(fast)) == (120, 20)
    packed = sum(math.prod(shapes[path]) for path in layers)
    sizes = dict.fromkeys((MODEL, DECODER), 0)
    for spec in specs.values():
        sizes[spec.file] += math.prod(spec.shape)
    assert sizes[MODEL] == PUBLISHED_PARAMETERS
    nbytes = packed * 9 // 16 + 2 * (sizes[MODEL] - packed + sizes[DECODER])
    assert 855e6 < nbytes < PUBLISHED_LIMIT - 20e6  # room for the tokenizer


def test_the_size_limit_of_the_published_model() -> None:
    four, eight = {"a": Packing(4, 64, "affine")}, {"a": Packing(8, 64, "affine")}
    check_size(PUBLISHED_PARAMETERS, PUBLISHED_LIMIT, four)
    with pytest.raises(CheckpointError, match="910 MB, over the limit of 909 MB"):
        check_size(PUBLISHED_PARAMETERS, PUBLISHED_LIMIT + 1_000_000, four)
    check_size(PUBLISHED_PARAMETERS, PUBLISHED_LIMIT + 1, eight)
    check_size(PUBLISHED_PARAMETERS + 1, PUBLISHED_LIMIT + 1, four)


# ------------------------------------------------------------------------ other tools


class PlainAttention(nn.Module):
    def __init__(self, c: dict[str, Any], bias: bool) -> None:
        super().__init__()
        rows = (c["n_head"] + 2 * c["n_local_heads"]) * c["head_dim"]
        self.wqkv = nn.Linear(c["dim"], rows, bias=bias)
        self.wo = nn.Linear(c["n_head"] * c["head_dim"], c["dim"], bias=False)


class PlainFeedForward(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.w1 = nn.Linear(c["dim"], c["intermediate_size"], bias=False)
        self.w3 = nn.Linear(c["dim"], c["intermediate_size"], bias=False)
        self.w2 = nn.Linear(c["intermediate_size"], c["dim"], bias=False)


class PlainBlock(nn.Module):
    def __init__(self, c: dict[str, Any], bias: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = PlainAttention(c, bias), PlainFeedForward(c)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(c["dim"]), nn.RMSNorm(c["dim"])


class PlainModel(nn.Module):
    """What somebody else would write down for this architecture; embeddings can be quantised."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(c["vocab_size"], c["dim"])
        self.codebook_embeddings = nn.Embedding(c["num_codebooks"] * c["codebook_size"], c["dim"])
        self.layers = [PlainBlock(c, c["attention_qkv_bias"]) for _ in range(c["n_layer"])]
        self.norm = nn.RMSNorm(c["dim"])
        self.fast_embeddings = nn.Embedding(c["codebook_size"], c["dim"])
        self.fast_layers = [PlainBlock(c, False) for _ in range(c["n_fast_layer"])]
        self.fast_norm = nn.RMSNorm(c["dim"])
        self.fast_output = nn.Linear(c["dim"], c["codebook_size"], bias=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 4, "exceptions": [LayerException("fast_layers", 8)]}, {"mode": "nvfp4"}],
)
def test_plain_mlx_reloads_it_from_the_config_block_alone(
    bundle: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    quantize(bundle, out, check=False, **options)
    config = config_of(out)
    block = config["quantization"]
    model = PlainModel(config)
    nn.quantize(
        model,
        block["group_size"],
        block["bits"],
        mode=block["mode"],
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and block.get(path, True),
    )
    model.load_weights(str(out / "model.safetensors"), strict=True)
    assert type(model.embeddings) is nn.Embedding
    assert type(model.layers[1].feed_forward.w3) is nn.QuantizedLinear
    ours: DualAR = load_dual_ar(out, mx.float32, dequantize=True)
    x = mx.random.normal((3, config["dim"]), key=mx.random.key(0))
    got = np.array(model.fast_layers[0].feed_forward.w3(x).astype(mx.float32))
    rows = config["intermediate_size"]
    wanted = np.array(x @ ours.fast_layers[0].feed_forward.w13.weight[rows:].T)
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


def test_mlx_lm_itself_gives_the_same_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exceptions = [LayerException("fast_layers", 8)]
    quantize(bundle, tmp_path / "stand-in", exceptions=exceptions, check=False)
    monkeypatch.undo()
    pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed", exc_type=ImportError)
    quantize(bundle, tmp_path / "real", exceptions=exceptions, check=False)
    for file in ("config.json", "README.md"):
        assert (tmp_path / "real" / file).read_text() == (tmp_path / "stand-in" / file).read_text()
    real, own = tensors(tmp_path / "real"), tensors(tmp_path / "stand-in")
    assert real.keys() == own.keys()
    assert all(mx.array_equal(real[name], own[name]) for name in real)
