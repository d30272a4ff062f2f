"""What a bundle says about itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
import synthetic

from warble_mlx.convert import convert
from warble_mlx.convert.names import ENCODER, MODEL
from warble_mlx.errors import CheckpointError
from warble_mlx.inspect_bundle import describe_bundle, format_description


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    out = tmp_path / "bundle"
    convert(synthetic.write_source(tmp_path / "source"), out, source_id="a/warble", revision="r1")
    return out


def test_description(bundle: Path) -> None:
    found = describe_bundle(bundle)
    assert found.config.dim == 64
    assert found.can_register_voices
    assert found.quantization is None
    assert found.provenance["source"] == "a/warble"
    assert found.generation["top_k"] == 50
    assert found.voices.voices[0].name == "Silas"
    dtypes = {part.file: part.dtypes for part in found.parts}
    assert dtypes == {MODEL: ("bf16",), "codec_decoder.safetensors": ("fp16",), ENCODER: ("fp16",)}
    text = format_description(found)
    assert "a/warble at r1, converted by warble-mlx" in text
    assert "Silas, Narrator, Clara, Pip, Speaker 5" in text
    total = sum(part.parameters for part in found.parts)
    assert f"{total:,}" in text.splitlines()[-1]


def test_without_encoder(bundle: Path) -> None:
    (bundle / ENCODER).unlink()
    found = describe_bundle(bundle)
    assert not found.can_register_voices
    assert f"no, without {ENCODER}" in format_description(found)


def quantise_one(bundle: Path, path: str) -> None:
    weights = dict(mx.load(str(bundle / MODEL)).items())
    packed, scales, biases = mx.quantize(weights.pop(f"{path}.weight"), group_size=32, bits=4)
    weights |= {f"{path}.weight": packed, f"{path}.scales": scales, f"{path}.biases": biases}
    mx.save_safetensors(str(bundle / MODEL), weights, {"format": "mlx"})


def test_packed_weights_count_as_what_they_stand_for(bundle: Path) -> None:
    before = {part.name: part for part in describe_bundle(bundle).parts}
    quantise_one(bundle, "layers.0.attention.wo")
    config = {**synthetic.config(), "quantization": {"group_size": 32, "bits": 4}}
    synthetic.write_json(bundle / "config.json", config)
    after = {part.name: part for part in describe_bundle(bundle).parts}
    part = after["slow AR layers"]
    assert part.parameters == before["slow AR layers"].parameters
    assert part.dtypes == ("4-bit", "bf16")
    assert part.nbytes < before["slow AR layers"].nbytes
    with pytest.raises(CheckpointError, match=r"already quantised \(1 packed tensors\)"):
        convert(bundle, bundle.parent / "again")


def test_bits_of_one_layer(bundle: Path) -> None:
    quantise_one(bundle, "embeddings")
    own = {"group_size": 32, "bits": 4}
    block = {"group_size": 64, "bits": 8, "embeddings": own}
    synthetic.write_json(bundle / "config.json", {**synthetic.config(), "quantization": block})
    part = describe_bundle(bundle).parts[0]
    assert (part.name, part.dtypes) == ("text embedding (tied head)", ("4-bit",))
    assert part.parameters == synthetic.config()["vocab_size"] * 64


def test_packed_weights_without_a_block(bundle: Path) -> None:
    quantise_one(bundle, "layers.0.attention.wo")
    with pytest.raises(CheckpointError, match="no quantization block that tells their bits"):
        describe_bundle(bundle)


def test_all_missing_files_at_once(bundle: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "codec_decoder.safetensors"):
        (bundle / name).unlink()
    said = r"Missing: codec_decoder\.safetensors, tokenizer\.json"
    with pytest.raises(CheckpointError, match=said):
        describe_bundle(bundle)
    with pytest.raises(CheckpointError, match=r"Missing: config\.json, model\.safetensors,"):
        describe_bundle(tmp_path / "gone")


def test_damaged_parts(bundle: Path) -> None:
    shutil.copyfile(bundle / "README.md", bundle / "voices.json")
    with pytest.raises(CheckpointError, match=r"voices\.json: "):
        describe_bundle(bundle)
    raw = (bundle / MODEL).read_bytes()
    (bundle / MODEL).write_bytes(raw[:-2])
    with pytest.raises(CheckpointError, match="truncated"):
        describe_bundle(bundle)
