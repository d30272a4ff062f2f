"""Checkpoints that cannot be converted: one sentence that names what is wrong, nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import synthetic

from warble_mlx.convert import convert, converter
from warble_mlx.errors import CheckpointError
from warble_mlx.model_files import missing_files

CASES = Path(__file__).parent / "cases" / "weights"


def refused(source: Path, out: Path, said: str, **options: Any) -> str:
    with pytest.raises(CheckpointError, match=said) as caught:
        convert(source, out, **options)
    assert not out.exists()
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]
    return str(caught.value)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (
            "q4_no_config",
            r"model\.safetensors is already quantised \(1 packed tensors; config\.json has no"
            r" quantization block .*\)\. Convert the unquantised bundle or the original",
        ),
        ("q4_embedding_quantised", r"is already quantised \(2 packed tensors\)"),
        ("sharded_missing", r"shards that are not there: model-00002-of-00002\.safetensors"),
        (
            "rawkeys_marked_mlx",
            r"marked as an MLX file but still has weight-norm tensors"
            r" \(codec\.decoder\.0\.conv\.parametrizations\.weight\.original0",
        ),
        ("no_tokenizer", r"Missing: tokenizer\.json, codec\.pth or codec\.safetensors$"),
        ("dim80_group64", r"Missing: tokenizer\.json, codec\.pth or codec\.safetensors$"),
    ],
)
def test_broken_folders(tmp_path: Path, folder: str, said: str) -> None:
    refused(CASES / folder, tmp_path / "out", said)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("truncated.safetensors", "truncated: have 16677 of 25016 bytes"),
        ("lfs_pointer.safetensors", "Git LFS pointer"),
        ("zero_bytes.safetensors", "is empty"),
        ("html_login_page.safetensors", "is a web page"),
        ("header_len_huge.safetensors", "not a safetensors file"),
    ],
)
@pytest.mark.parametrize("place", ["model.safetensors", "codec.safetensors"])
def test_broken_files(tmp_path: Path, file: str, said: str, place: str) -> None:
    source = synthetic.write_source(tmp_path / "source")
    shutil.copyfile(CASES / file, source / place)
    assert place in refused(source, tmp_path / "out", said)


def test_a_config_flag_without_its_tensors(tmp_path: Path) -> None:
    flags = synthetic.make_checkpoint.json.loads(
        (CASES / "config_flag_contradicts_tensors.json").read_text()
    )
    source = synthetic.write_source(tmp_path / "source")
    synthetic.write_json(source / "config.json", {**synthetic.config(), **flags})
    text = refused(source, tmp_path / "out", "4 missing")
    assert "layers.0.attention.q_norm.weight (config.json sets attention_qk_norm)" in text
    assert "2 unexpected: layers.0.attention.wqkv.bias, layers.1.attention.wqkv.bias" in text


def without(*names: str) -> Callable[[synthetic.Arrays], synthetic.Arrays]:
    return lambda tensors: {n: v for n, v in tensors.items() if n not in names}


def test_the_first_five_of_each_kind_are_named(tmp_path: Path) -> None:
    def edit(tensors: synthetic.Arrays) -> synthetic.Arrays:
        lost = [n for n in tensors if n.startswith("layers.0.")]
        assert len(lost) == 8
        tensors = without(*lost[1:])(tensors)
        tensors["norm.weight"] = tensors["norm.weight"][:-1]
        return tensors | {f"z{i}.weight": np.zeros(2, np.uint16) for i in range(7)}

    source = synthetic.write_source(tmp_path / "source", edit_model=edit)
    text = refused(source, tmp_path / "out", "are not those of its config")
    lost = (
        "layers.0.attention.wqkv.bias (config.json sets attention_qkv_bias),"
        " layers.0.attention.wo.weight, layers.0.feed_forward.w1.weight,"
        " layers.0.feed_forward.w2.weight, layers.0.feed_forward.w3.weight, …"
    )
    assert f"7 missing: {lost}; 7 unexpected: z0.weight, z1.weight, z2.weight, z3.weight," in text
    assert "z4.weight, …; 1 of the wrong shape: norm.weight is [63], not [64]" in text


@pytest.mark.parametrize("name", sorted(synthetic.codec(synthetic.config()))[::37])
def test_any_codec_tensor_is_missed(tmp_path: Path, name: str) -> None:
    source = synthetic.write_source(tmp_path / "source", edit_codec=without(name))
    for magnitude, direction in (synthetic.NEW_FORM, synthetic.OLD_FORM):
        if name.endswith((magnitude, direction)):
            name = f"{name.removesuffix(magnitude).removesuffix(direction)}.weight"
    assert name in refused(source, tmp_path / "out", "missing")


def test_a_magnitude_of_another_shape(tmp_path: Path) -> None:
    name = "decoder.model.0.conv.parametrizations.weight.original0"
    source = synthetic.write_source(
        tmp_path / "source", edit_codec=lambda t: {**t, name: t[name].reshape(1, -1, 1)}
    )
    said = r"magnitude of decoder\.model\.0\.conv\.weight is \[1, 64, 1\], not \[64, 1, 1\]"
    refused(source, tmp_path / "out", said)


def test_integers_where_numbers_belong(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    path = str(source / "model.safetensors")
    tensors = dict(mx.load(path).items())
    tensors["norm.weight"] = tensors["norm.weight"].astype(mx.int32)
    mx.save_safetensors(path, tensors)
    refused(source, tmp_path / "out", r"1 not floating point: norm\.weight is I32")


def test_two_layouts_mixed(tmp_path: Path) -> None:
    name = "decoder.model.5.alpha"
    source = synthetic.write_source(
        tmp_path / "source", edit_codec=lambda t: {**t, name: t[name].reshape(1, 1, -1)}
    )
    said = r"mixes two layouts: .*alpha is channels first, decoder\.model\.5\.alpha channels last"
    refused(source, tmp_path / "out", said)


def test_channels_last_names_with_channels_first_shapes(tmp_path: Path) -> None:
    source = synthetic.write_mlx_source(tmp_path / "source")
    tensors = synthetic.channels_last(synthetic.folded(synthetic.codec(synthetic.config())))
    name = "encoder.block.1.block.4.conv.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    named = {f"codec.{n}": v for n, v in tensors.items()}
    synthetic.write(source / "codec.safetensors", named, "mlx")
    refused(source, tmp_path / "out", rf"{name} is \[16, 8, 4\], not \[16, 4, 8\]")


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    source = synthetic.write_source(
        tmp_path / "source", edit_model=lambda t: {**t, "model.norm.weight": t["norm.weight"]}
    )
    refused(source, tmp_path / "out", r"model\.norm\.weight, which was already read as norm\.wei")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n_layer": 3}, "n_layer is 3, but 2 layers are stored as layers"),
        ({"n_layer": 1}, "n_layer is 1, but 2 layers"),
        ({"n_fast_layer": 12_000_000}, "n_fast_layer is 12000000, but 2 layers"),
        ({"dim": 0}, "dim is 0, which is not a usable size"),
        ({"dim": "64"}, r"Expected `int`, got `str` - at `\$.dim`"),
        ({"model_type": "llama"}, 'model_type is "llama"'),
        ({"intermediate_size": 96}, r"w1\.weight is \[128, 64\], not \[96, 64\]"),
        ({"quantization": {"bits": 4}}, r"already quantised \(says config\.json\)"),
        ({"codec_filename": "../codec.pth"}, "only plain file names are read"),
    ],
)
def test_config_fields_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    source = synthetic.write_source(tmp_path / "source")
    synthetic.write_json(source / "config.json", {**synthetic.config(), **fields})
    refused(source, tmp_path / "out", said)


def test_everything_missing_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    refused(
        tmp_path / "source",
        tmp_path / "out",
        r"Missing: config\.json, tokenizer\.json, model\.safetensors \(or shards with"
        r" model\.safetensors\.index\.json\), codec\.pth or codec\.safetensors",
    )


def test_a_golden_checkpoint_has_no_codec(tiny_source: Path, tmp_path: Path) -> None:
    refused(tiny_source, tmp_path / "out", r"Missing: codec\.pth or codec\.safetensors")


def test_a_file_or_nothing_as_source(tmp_path: Path) -> None:
    refused(CASES / "truncated.safetensors", tmp_path / "out", "is a file: give the folder")
    refused(tmp_path / "gone", tmp_path / "out", "is not there: give the folder")


def test_broken_json(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    (source / "config.json").write_text("{")
    refused(source, tmp_path / "out", r"config\.json: .*fetch it again")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_bytes(b'{"weight_map": "\xff"}')
    synthetic.write_json(source / "config.json", synthetic.config())
    refused(source, tmp_path / "out", r"index\.json: ")


def test_unknown_dtype(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    said = "'int8' is not known. Give one of bfloat16, float16, float32"
    refused(source, tmp_path / "out", said, codec_dtype="int8")


def test_not_enough_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = synthetic.write_source(tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda _: usage)
    refused(source, tmp_path / "out", r"needs \d+ MB, but only 1 MB are free")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, error: type[BaseException], exists: bool
) -> None:
    source = synthetic.write_source(tmp_path / "source")
    out = tmp_path / "out"
    if exists:
        convert(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()} if exists else {}
    seen: list[int] = []

    def interrupt(tensor: str, done: int, total: int) -> None:
        seen.append(done)
        if done > total / 2:
            raise error

    with pytest.raises(error):
        convert(source, out, codec_dtype="float32", force=exists, progress=interrupt)
    assert len(seen) > 50
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out"] if exists else []) + ["source"]
    after = {path.name: path.read_bytes() for path in out.iterdir()} if exists else {}
    assert after == before


def test_a_bad_value_late_in_the_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    def edit(tensors: synthetic.Arrays) -> synthetic.Arrays:
        tensors["quantizer.pre_module.norm.weight"][5] = np.nan
        return tensors

    source = synthetic.write_source(tmp_path / "source", edit_codec=edit)
    refused(source, tmp_path / "out", r"quantizer\.pre_module\.norm\.weight holds NaN")


def test_a_file_that_does_not_read_back_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = synthetic.write_source(tmp_path / "source")
    write = converter.write_safetensors

    def losing(path: Path, tensors: dict[str, Any], produce: Any) -> None:
        kept = {n: t for n, t in tensors.items() if n != "decoder.model.5.alpha"}
        write(path, kept, produce)

    monkeypatch.setattr(converter, "write_safetensors", losing)
    refused(source, tmp_path / "out", "codec_decoder.safetensors does not read back as written")


def test_existing_output(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", codec_dtype="float32", force=True)
    assert report.out == tmp_path / "out"
    with pytest.raises(CheckpointError, match="is the source itself"):
        convert(source, source, force=True)
    with pytest.raises(CheckpointError, match="inside each other"):
        convert(source, source / "out")


def test_an_unreadable_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = synthetic.write_source(tmp_path / "source")

    def failing(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr("warble_mlx.convert.companions.shutil.copyfile", failing)
    refused(source, tmp_path / "out", r"tokenizer\.json: Permission denied; nothing was written")


def test_what_is_not_accepted_does_not_appear(tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source")
    seen: list[Path] = []

    def accept(folder: Path) -> None:
        seen.append(folder)
        assert missing_files(folder) == []
        raise CheckpointError("it does not speak")

    refused(source, tmp_path / "out", "it does not speak", accept=accept)
    (folder,) = seen
    assert folder.parent == tmp_path
    assert folder != tmp_path / "out"
