"""The published size with random 4-bit weights: what an app has to download."""

from __future__ import annotations

from pathlib import Path

import ios_data
import mlx.core as mx
import pytest

from warble_mlx.ios_export.exporter import export
from warble_mlx.ios_export.mlx_functions import (
    CODEC_FILE,
    LM_FILE,
    load_for_export,
    write_codec,
    write_language_model,
)
from warble_mlx.quant.proof import PUBLISHED_LIMIT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(full_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "q4"
    return ios_data.full_four_bit_bundle(folder, full_tokenizer / "tokenizer.json")


def test_the_swift_folder_is_below_the_published_size(bundle: Path, tmp_path: Path) -> None:
    manifest = export(bundle, tmp_path / "out", only=["mlx-swift"])
    assert 850e6 < manifest.parts[0].nbytes < PUBLISHED_LIMIT
    found = {check.name: check.result for check in manifest.parts[0].checks}
    assert found["size of the folder"] == "pass"
    assert found["Linears packed against the policy"] == "pass"
    assert manifest.quantization is not None
    assert manifest.quantization.linears == 140
    assert 0.2 < manifest.bandwidth.real_time_factor_floor < 0.3


def test_the_functions_are_below_the_published_size(bundle: Path, tmp_path: Path) -> None:
    loaded = load_for_export(bundle, mx.bfloat16)
    functions = write_language_model(loaded, tmp_path)
    functions += write_codec(loaded, tmp_path, for_gpu=True)
    sizes = {name: (tmp_path / name).stat().st_size for name in (LM_FILE, CODEC_FILE)}
    assert 850e6 < sum(sizes.values()) < PUBLISHED_LIMIT
    assert max(function.longest_axis for function in functions) <= 16_384
    assert [f.name for f in functions if f.name.startswith("frame")] == [
        "frame_512", "frame_1024", "frame_2048",
    ]  # fmt: skip
