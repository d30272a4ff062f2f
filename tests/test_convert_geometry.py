"""The codec's dimensions follow the tensors, and config.json must not contradict them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic

from warble_mlx.config import read_config
from warble_mlx.convert import convert
from warble_mlx.convert.geometry import codec_fields
from warble_mlx.convert.names import ENCODER
from warble_mlx.convert.plan import make_plan
from warble_mlx.convert.source import open_source
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import read_header

# What no shape tells: the windows.
WINDOWS = ("codec_encoder_window_size", "codec_window_size")


def write_with_config(folder: Path, fields: dict[str, Any]) -> Path:
    """The small checkpoint, whose tensors stay, with another config.json."""
    synthetic.write_source(folder)
    synthetic.write_json(folder / "config.json", fields)
    return folder


@pytest.mark.parametrize("write", [synthetic.write_source, synthetic.write_mlx_source])
def test_all_dimensions_come_from_the_tensors(tmp_path: Path, write: Any) -> None:
    source = write(tmp_path / "source")
    bare = {name: v for name, v in synthetic.config().items() if name not in synthetic.CODEC}
    synthetic.write_json(source / "config.json", bare | {"codec_post_n_local_heads": 1})
    for name in ("codec_post_n_layer", "codec_post_n_head", "codec_post_intermediate_size"):
        bare.pop(name, None)
    synthetic.write_json(source / "config.json", bare)
    convert(source, tmp_path / "out")
    config = read_config(tmp_path / "out")
    for name, value in synthetic.CODEC.items():
        if name not in WINDOWS:
            want = tuple(value) if isinstance(value, list) else value
            assert getattr(config, name) == want, name
    assert config.codec_window_size == 128
    assert config.codec_encoder_window_size == 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec_encoder_dim", 16),
        ("codec_encoder_transformer_layers", [0, 0, 0, 2]),
        ("codec_latent_dim", 256),
        ("codec_decoder_dim", 128),
        ("codec_codebook_dim", 4),
        ("codec_semantic_codebook_size", 4096),
        ("codec_residual_codebook_size", 64),
        ("codec_pre_n_layer", 2),
        ("codec_pre_n_head", 4),
        ("codec_pre_n_local_heads", 1),
        ("codec_pre_intermediate_size", 128),
        ("codec_post_n_layer", 8),
        ("codec_post_n_head", 4),
        ("codec_post_n_local_heads", 2),
        ("codec_post_intermediate_size", 192),
    ],
)
def test_a_contradiction_names_field_value_and_tensors(
    tmp_path: Path, field: str, value: Any
) -> None:
    source = write_with_config(tmp_path / "source", synthetic.config(**{field: value}))
    with pytest.raises(CheckpointError, match="contradicts the tensors") as caught:
        convert(source, tmp_path / "out")
    text = str(caught.value)
    assert f"{field} is {value}, but " in text
    assert str(synthetic.CODEC[field]) in text.partition("but ")[2]
    assert not (tmp_path / "out").exists()


def test_windows_are_kept(tmp_path: Path) -> None:
    convert(synthetic.write_source(tmp_path / "source"), tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert (config.codec_window_size, config.codec_encoder_window_size) == (8, 16)


def test_first_release_post_module(tmp_path: Path) -> None:
    """Sixteen KV heads and FFN 3072 where the published checkpoint has 8 and 1216."""
    post = {
        "codec_latent_dim": 1024,
        "codec_post_n_layer": 1,
        "codec_post_n_head": 16,
        "codec_post_n_local_heads": 16,
        "codec_post_intermediate_size": 3072,
    }
    shapes = {
        name: shape
        for name, shape, *_ in synthetic.make_checkpoint.codec(synthetic.config(**post))
        if name.startswith("quantizer.post_module")
    }
    assert codec_fields(shapes, {}, "config.json") == post


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("quantizer.post_module.layers.0.attention.wo.weight", (128, 100)),
        ("quantizer.post_module.layers.0.attention.wqkv.weight", (250, 128)),
        ("quantizer.post_module.layers.0.attention.wqkv.weight", (128, 128)),
        ("quantizer.post_module.layers.0.attention.wqkv.weight", (320, 128)),
    ],
)
def test_heads_that_are_not_whole(name: str, shape: tuple[int, int]) -> None:
    stem = "quantizer.post_module.layers.0"
    shapes = {
        f"{stem}.attention.wo.weight": (128, 128),
        f"{stem}.attention.wqkv.weight": (256, 128),
        f"{stem}.feed_forward.w1.weight": (128, 128),
    }
    assert codec_fields(shapes, {}, "")["codec_post_n_local_heads"] == 1
    with pytest.raises(CheckpointError, match="do not give whole heads of width 64"):
        codec_fields({**shapes, name: shape}, {}, "")


def test_an_absurd_layer_number_costs_nothing(tmp_path: Path) -> None:
    def edit(tensors: synthetic.Arrays) -> synthetic.Arrays:
        name = "quantizer.pre_module.layers.0.ffn_norm.weight"
        far = name.replace("layers.0", "layers.999999999")
        return {far if n == name else n: value for n, value in tensors.items()}

    source = synthetic.write_source(tmp_path / "source", edit_codec=edit, codec_pre_n_layer=None)
    fields = synthetic.config()
    del fields["codec_pre_n_layer"]
    synthetic.write_json(source / "config.json", fields)
    with pytest.raises(CheckpointError, match=r"unexpected: .*layers\.999999999"):
        convert(source, tmp_path / "out")


def test_a_plan_covers_every_parameter(tmp_path: Path) -> None:
    source = open_source(synthetic.write_source(tmp_path / "source"))
    plan = make_plan(source, "F32")
    tensors = synthetic.folded(synthetic.codec(synthetic.config()))
    tensors |= synthetic.language_model(synthetic.config())
    assert {n: t.spec.pytorch_shape for n, t in plan.tensors.items()} == {
        n: v.shape for n, v in tensors.items()
    }


def test_the_encoder_window_transformer_may_be_absent_or_in_any_block(tmp_path: Path) -> None:
    for i, layers in enumerate(([0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 1, 1])):
        changes = {"codec_encoder_transformer_layers": layers, "codec_encoder_dim": 8}
        source = synthetic.write_source(tmp_path / f"source{i}", **changes)
        convert(source, tmp_path / f"out{i}")
        assert read_config(tmp_path / f"out{i}").codec_encoder_transformer_layers == tuple(layers)
        names = read_header(tmp_path / f"out{i}" / ENCODER).entries
        for block, count in enumerate(layers, 1):
            stem = f"encoder.block.{block}.block.5.layers."
            assert len({n.split(".")[6] for n in names if n.startswith(stem)}) == count
