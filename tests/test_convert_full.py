"""A checkpoint of the published size: counts, sizes, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import packing_stand_in
import pytest
from golden import make_checkpoint

from warble_mlx.config import read_config
from warble_mlx.convert.geometry import codec_fields
from warble_mlx.convert.names import DECODER, ENCODER, FILES, MODEL, expected_tensors
from warble_mlx.inspect_bundle import describe_bundle
from warble_mlx.safetensors_file import read_header

CONVERT = """
import resource, sys
from pathlib import Path
from warble_mlx.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
unit = 1 if sys.platform == "darwin" else 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


def test_the_table_has_the_published_counts(full_tokenizer: Path) -> None:
    config = read_config(full_tokenizer)
    specs = expected_tensors(config, encoder=True)
    parameters = dict.fromkeys(FILES, 0)
    tensors = dict.fromkeys(FILES, 0)
    for spec in specs.values():
        size = 1
        for n in spec.shape:
            size *= n
        parameters[spec.file] += size
        tensors[spec.file] += 1
    assert parameters[MODEL] == 601_159_424
    assert tensors[MODEL] == 226
    assert parameters[DECODER] == 130_380_129
    assert parameters[DECODER] + parameters[ENCODER] == 337_396_721
    assert tensors[DECODER] + tensors[ENCODER] == 455


def test_the_first_release_differs_in_its_post_module_only() -> None:
    published, first = (
        {
            name: shape
            for name, shape, *_ in make_checkpoint.codec(
                {"codec_post_n_local_heads": kv, "codec_post_intermediate_size": ffn}
            )
        }
        for kv, ffn in ((8, 1216), (16, 3072))
    )
    a, b = (codec_fields(shapes, {}, "config.json") for shapes in (published, first))
    assert {name: (a[name], b[name]) for name in a if a[name] != b[name]} == {
        "codec_post_n_local_heads": (8, 16),
        "codec_post_intermediate_size": (1216, 3072),
    }


@pytest.mark.slow
def test_full_conversion(full_source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, full_source, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 3e9  # bytes resident at most
    found = describe_bundle(tmp_path / "out")
    counts = {file: sum(p.parameters for p in found.parts if p.file == file) for file in FILES}
    assert counts == {MODEL: 601_159_424, DECODER: 130_380_129, ENCODER: 207_016_592}
    by_name = {part.name: part.parameters for part in found.parts}
    assert by_name == {
        "text embedding (tied head)": 139_575_296,
        "codebook embeddings": 36_700_160,
        "slow AR layers": 357_897_216,
        "fast AR layers": 59_644_928,
        "fast embedding and output": 7_340_032,
        "final norms": 1_792,
        "codec decoder": 54_091_105,
        "upsampling": 21_006_336,
        "post_module": 55_084_032,
        "codebooks and out_proj": 198_656,
        "codec encoder": 22_299_200,
        "encoder window transformer": 54_543_360,
        "downsampling": 21_006_336,
        "pre_module": 109_085_696,
        "in_proj": 82_000,
    }
    speaking = sum(read_header(tmp_path / "out" / file).nbytes for file in (MODEL, DECODER))
    assert speaking == pytest.approx(2 * (601_159_424 + 130_380_129), abs=100_000)


@pytest.mark.slow
def test_full_size_at_four_bits(
    full_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """140 packed Linears and 909 MB at most; with the codec in float32 it is refused."""
    from warble_mlx.convert import convert
    from warble_mlx.errors import CheckpointError
    from warble_mlx.fidelity.compare import stored_packings
    from warble_mlx.quant import quantize

    packing_stand_in.install(monkeypatch)
    convert(full_source, tmp_path / "half")
    result = quantize(tmp_path / "half", tmp_path / "out", bits=4, check=False)
    assert result.total_bytes <= 909_000_000
    fast = [path for path in stored_packings(tmp_path / "out") if path.startswith("fast_")]
    assert (len(result.layers), len(fast)) == (140, 20)
    convert(full_source, tmp_path / "wide", codec_dtype="float32")
    with pytest.raises(CheckpointError, match="over the limit of 909 MB"):
        quantize(tmp_path / "wide", tmp_path / "never", bits=4, check=False)
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_first_release_converts_without_its_fields(
    tmp_path: Path, full_tokenizer: Path, full_source: Path
) -> None:
    """391,430,530 numbers in the codec, and a config that does not say so."""
    import json

    from warble_mlx.convert import convert

    subprocess.run(
        [
            sys.executable,
            make_checkpoint.__file__,
            tmp_path / "source",
            *("--preset", "full", "--codec", "full", "--no-pth", "--no-lm"),
            *("--post-kv-heads", "16", "--post-ffn", "3072"),
        ],
        check=True,
        capture_output=True,
    )
    fields = json.loads((tmp_path / "source" / "config.json").read_text("utf-8"))
    bare = {name: v for name, v in fields.items() if not name.startswith("codec_post")}
    (tmp_path / "source" / "config.json").write_text(json.dumps(bare), "utf-8")
    (tmp_path / "source" / "model.safetensors").hardlink_to(full_source / "model.safetensors")
    convert(tmp_path / "source", tmp_path / "out")
    config = read_config(tmp_path / "out")
    assert config.codec_post_n_local_heads == 16
    assert config.codec_post_intermediate_size == 3072
    extra = 391_430_530 - 337_428_866
    counts = [p.parameters for p in describe_bundle(tmp_path / "out").parts]
    assert sum(counts) == 601_159_424 + 337_396_721 + extra
