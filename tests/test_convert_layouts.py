"""Every published layout gives the same bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import synthetic

from warble_mlx.config import read_config
from warble_mlx.convert import convert
from warble_mlx.convert.names import DECODER, ENCODER, FILES, MODEL
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import read_header


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "bundle"
    convert(source, out, codec_dtype="float32")
    return out


def weights(folder: Path) -> dict[str, bytes]:
    return {file: (folder / file).read_bytes() for file in FILES if (folder / file).exists()}


def same_within(folder: Path, bundle: Path, tolerance: float) -> None:
    """Same names and shapes everywhere, values within `tolerance` of the largest of a tensor."""
    for file in FILES:
        got, want = mx.load(str(folder / file)), mx.load(str(bundle / file))
        assert {n: (v.shape, v.dtype) for n, v in got.items()} == {
            n: (v.shape, v.dtype) for n, v in want.items()
        }
        for name, value in want.items():
            a, b = (np.array(x.astype(mx.float32)) for x in (got[name], value))
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


def test_every_value_is_where_the_bundle_wants_it(bundle: Path) -> None:
    fields = synthetic.config()
    want = synthetic.channels_last(synthetic.folded(synthetic.codec(fields)))
    got = {**mx.load(str(bundle / DECODER)), **mx.load(str(bundle / ENCODER))}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert np.abs(np.array(got[name]) - value).max() <= 1e-7 * max(1, np.abs(value).max()), name
    model = mx.load(str(bundle / MODEL))
    want = synthetic.language_model(fields)
    assert model.keys() == want.keys()
    for name, bits in want.items():
        assert np.array_equal(np.array(model[name].view(mx.uint16)), bits), name


def test_the_files_hold_what_each_half_needs(bundle: Path) -> None:
    decoder, encoder = (set(read_header(bundle / file).entries) for file in (DECODER, ENCODER))
    heads = ("decoder.", "quantizer.upsample.", "quantizer.post_module.")
    tails = (".out_proj.weight", ".out_proj.bias", ".codebook.weight")
    assert all(name.startswith(heads) or name.endswith(tails) for name in decoder)
    heads = ("encoder.", "quantizer.downsample.", "quantizer.pre_module.")
    tails = (".in_proj.weight", ".in_proj.bias")
    assert all(name.startswith(heads) or name.endswith(tails) for name in encoder)
    assert sum(name.endswith(".codebook.weight") for name in decoder) == 10
    assert sum(name.endswith(".in_proj.weight") for name in encoder) == 10


def test_same_source_gives_the_same_bytes(source: Path, bundle: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "again", codec_dtype="float32")
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert again == {path.name: path.read_bytes() for path in bundle.iterdir()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (synthetic.NEW_FORM, synthetic.OLD_FORM),
        (synthetic.OLD_FORM, synthetic.NEW_FORM),
    ],
    ids=["all-g-v", "all-parametrizations"],
)
def test_both_weight_norm_forms_everywhere(
    bundle: Path, tmp_path: Path, old: tuple[str, str], new: tuple[str, str]
) -> None:
    source = synthetic.write_source(
        tmp_path / "source", edit_codec=lambda t: synthetic.renamed(t, old, new)
    )
    convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)


def test_folded_channels_first(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source", edit_codec=synthetic.folded)
    convert(source, tmp_path / "out", codec_dtype="float32")
    same_within(tmp_path / "out", bundle, 2e-7)


def test_mlx_layout_is_not_transposed_again(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_mlx_source(tmp_path / "source")
    convert(source, tmp_path / "out", codec_dtype="float32")
    same_within(tmp_path / "out", bundle, 2e-7)


def test_own_bundle_is_rewritten_bit_for_bit(bundle: Path, tmp_path: Path) -> None:
    report = convert(bundle, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)
    assert "is a bundle already" in report.notes[0]
    assert report.provenance["source"] == "source0"


def test_own_bundle_takes_the_new_codec_dtype(bundle: Path, tmp_path: Path) -> None:
    report = convert(bundle, tmp_path / "half", codec_dtype="float16")
    assert {e.dtype for e in read_header(tmp_path / "half" / DECODER).entries.values()} == {"F16"}
    assert weights(tmp_path / "half")[MODEL] == weights(bundle)[MODEL]
    assert len(report.notes) == 1
    back = convert(tmp_path / "half", tmp_path / "wide", codec_dtype="float32")
    assert "does not bring back" in back.notes[1]
    same_within(tmp_path / "wide", bundle, 5e-4)


def test_bundle_without_encoder_stays_without(bundle: Path, tmp_path: Path) -> None:
    lean = tmp_path / "lean"
    lean.mkdir()
    for path in bundle.iterdir():
        if path.name != ENCODER:
            (lean / path.name).write_bytes(path.read_bytes())
    report = convert(lean, tmp_path / "out", codec_dtype="float32")
    assert set(weights(tmp_path / "out")) == {MODEL, DECODER}
    assert weights(tmp_path / "out") == {f: b for f, b in weights(bundle).items() if f != ENCODER}
    assert any("cannot register" in note for note in report.notes)
    assert read_config(tmp_path / "out") == read_config(bundle)


def shard(folder: Path, names: tuple[str, str]) -> dict[str, Any]:
    """Split model.safetensors of `folder` in two; returns the index, which is written too."""
    tensors = synthetic.language_model(synthetic.config())
    (folder / "model.safetensors").unlink()
    placed = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in set(names):
        synthetic.write(folder / file, {n: v for n, v in tensors.items() if placed[n] == file})
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    synthetic.write_json(folder / "model.safetensors.index.json", index)
    return index


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_shards(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    shard(source, SHARDS)
    report = convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)
    assert set(SHARDS) <= report.provenance["source_files"].keys()


def test_a_tensor_that_the_index_promises_is_absent(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    index = shard(source, SHARDS)
    index["weight_map"]["layers.9.lost"] = SHARDS[1]
    synthetic.write_json(source / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"model-00002\S+ lacks layers\.9\.lost"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["../model.safetensors", "a/b.safetensors", "..\\x", "..", ""])
def test_shard_names_with_a_path_are_refused(tmp_path: Path, name: str) -> None:
    source = synthetic.write_source(tmp_path / "source")
    index = shard(source, SHARDS)
    (tmp_path / "model.safetensors").write_bytes((source / SHARDS[0]).read_bytes())
    index["weight_map"]["norm.weight"] = name
    synthetic.write_json(source / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match="only plain file names are read"):
        convert(source, tmp_path / "out")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    (source / "codec.safetensors").rename(tmp_path / "elsewhere")
    (source / "codec.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere, outside the folder"):
        convert(source, tmp_path / "out")


def test_the_links_of_the_hub_cache_are_followed(bundle: Path, tmp_path: Path) -> None:
    made = synthetic.write_source(tmp_path / "made")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(made.iterdir()):
        (blobs / str(i)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(i))
    convert(snapshot, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)


def test_prefixes_of_training_checkpoints(bundle: Path, tmp_path: Path) -> None:
    def training(tensors: synthetic.Arrays) -> synthetic.Arrays:
        state = {f"generator.{name}": value for name, value in tensors.items()}
        state["generator.quantizer.post_module.freqs_cis"] = np.zeros((4, 32, 2), np.float32)
        state["generator.quantizer.pre_module.causal_mask"] = np.zeros((4, 4), np.float32)
        return state | {"discriminator.weight": np.zeros(3, np.float32)}

    source = synthetic.write_source(tmp_path / "source", edit_codec=training)
    report = convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)
    assert {drop.name: drop.reason for drop in report.dropped} == {
        "discriminator.weight": "not part of the generator",
        "quantizer.post_module.freqs_cis": "RoPE table, computed at load",
        "quantizer.pre_module.causal_mask": "attention mask, computed at load",
    }


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.model."])
def test_prefixes_of_trainers(bundle: Path, tmp_path: Path, prefix: str) -> None:
    def wrapped(tensors: synthetic.Arrays) -> synthetic.Arrays:
        return {prefix + name: value for name, value in tensors.items()}

    source = synthetic.write_source(tmp_path / "source", edit_model=wrapped, edit_codec=wrapped)
    convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)


@pytest.mark.parametrize(
    ("prefix", "extra", "told"),
    [
        ("wrapper.", {}, r"0 layers are stored .* begin differently: wrapper\.layers\.0\."),
        ("", {"layers.0.attention.wo.lora_A.weight": np.zeros((4, 8), np.uint16)}, "merge it"),
    ],
)
def test_names_of_other_trainers_are_told(
    tmp_path: Path, prefix: str, extra: synthetic.Arrays, told: str
) -> None:
    def wrapped(tensors: synthetic.Arrays) -> synthetic.Arrays:
        return {prefix + name: value for name, value in tensors.items()} | extra

    source = synthetic.write_source(tmp_path / "source", edit_model=wrapped)
    with pytest.raises(CheckpointError, match=told):
        convert(source, tmp_path / "out")


def test_one_file_with_both_prefixes(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_mlx_source(tmp_path / "source")
    pool = {}
    for name in ("model.safetensors", "codec.safetensors"):
        pool |= mx.load(str(source / name))
    mx.eval(pool)  # some versions read late, and the file is about to be replaced
    (source / "codec.safetensors").unlink()
    mx.save_safetensors(str(source / "model.safetensors"), pool, {"format": "mlx"})
    convert(source, tmp_path / "out", codec_dtype="float32")
    same_within(tmp_path / "out", bundle, 2e-7)


def test_codec_found_under_another_name_than_the_config_gives(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source", codec_filename="codec.pth")
    convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_qk_norm": True},
        {"attention_o_bias": True},
        {"attention_qkv_bias": False},
        {"fast_attention_qk_norm": True, "fast_attention_o_bias": True},
        {"fast_attention_qkv_bias": True},
        {"fast_dim": 32, "fast_n_head": 2, "fast_n_local_heads": 1, "fast_intermediate_size": 64},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_optional_features(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = synthetic.write_source(tmp_path / "source", **changes)
    convert(source, tmp_path / "out")
    want = synthetic.language_model(synthetic.config(**changes))
    got = read_header(tmp_path / "out" / MODEL).entries
    assert {n: e.shape for n, e in got.items()} == {n: v.shape for n, v in want.items()}
    config = read_config(tmp_path / "out")
    assert all(getattr(config, name) == value for name, value in changes.items())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_language_model_of_another_dtype_is_rounded(tmp_path: Path, dtype: str) -> None:
    def drawn(tensors: synthetic.Arrays) -> synthetic.Arrays:
        random = np.random.default_rng(0)
        return {
            name: random.standard_normal(bits.shape).astype(dtype) for name, bits in tensors.items()
        }

    source = synthetic.write_source(tmp_path / "source", edit_model=drawn)
    convert(source, tmp_path / "out")
    got = mx.load(str(tmp_path / "out" / MODEL))
    for name, value in mx.load(str(source / MODEL)).items():
        assert value.dtype == getattr(mx, dtype)
        assert mx.array_equal(got[name], value.astype(mx.bfloat16)), name


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")]
)
def test_codec_dtypes(source: Path, bundle: Path, tmp_path: Path, dtype: str, stored: str) -> None:
    convert(source, tmp_path / "out", codec_dtype=dtype)
    for file in (DECODER, ENCODER):
        assert {e.dtype for e in read_header(tmp_path / "out" / file).entries.values()} == {stored}
        got, want = mx.load(str(tmp_path / "out" / file)), mx.load(str(bundle / file))
        for name, value in want.items():
            assert mx.array_equal(got[name], value.astype(getattr(mx, dtype))), name


def test_tied_head_is_dropped_if_equal(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_source(
        tmp_path / "source",
        edit_model=lambda t: {**t, "lm_head.weight": t["embeddings.weight"].copy()},
    )
    report = convert(source, tmp_path / "out", codec_dtype="float32")
    assert weights(tmp_path / "out") == weights(bundle)
    assert [drop.name for drop in report.dropped] == ["lm_head.weight"]


def test_untied_head_is_an_error(tmp_path: Path) -> None:
    source = synthetic.write_source(
        tmp_path / "source",
        edit_model=lambda t: {**t, "lm_head.weight": t["embeddings.weight"] ^ 1},
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embeddings\.weight"):
        convert(source, tmp_path / "out")
