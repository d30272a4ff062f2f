"""The published size with random 4-bit weights: what an app has to download, and what making it
costs. `pytest -rP` shows the figures. The bundle and each export are made in a process of their
own, started from a small one, whose size a new process counts as its own peak."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import ios_cost
import ios_data
import pytest

from warble_mlx.ios_export.mlx_functions import CODEC_FILE, LM_FILE
from warble_mlx.quant.proof import PUBLISHED_LIMIT

pytestmark = pytest.mark.slow


def alone() -> ProcessPoolExecutor:
    """A fresh process that runs one thing."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


@pytest.fixture(scope="module")
def bundle(full_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "q4"
    tokenizer = full_tokenizer / "tokenizer.json"
    with alone() as process:
        return process.submit(ios_data.full_four_bit_bundle, folder, tokenizer).result()


def test_the_swift_folder_is_below_the_published_size(bundle: Path, tmp_path: Path) -> None:
    with alone() as process:
        manifest, cost = process.submit(ios_cost.swift_folder, bundle, tmp_path / "out").result()
    print(f"mlx-swift: {manifest.parts[0].nbytes / 1e6:.1f} MB, {cost}")
    assert 850e6 < manifest.parts[0].nbytes < PUBLISHED_LIMIT
    found = {check.name: check.result for check in manifest.parts[0].checks}
    assert found["size of the folder"] == "pass"
    assert found["Linears packed against the policy"] == "pass"
    assert found["packed weights of model.safetensors that are not the bundle's"] == "pass"
    assert manifest.quantization is not None
    assert manifest.quantization.linears == 140
    assert 0.2 < manifest.bandwidth.real_time_factor_floor < 0.3


def test_the_core_ml_transformers_fit_a_small_machine(bundle: Path, tmp_path: Path) -> None:
    if any(find_spec(package) is None for package in ("coremltools", "torch")):
        pytest.skip("the extra ios is not installed")
    with alone() as process:
        cost, compared, checks = process.submit(ios_cost.transformers, bundle, tmp_path).result()
    sizes = {
        name: sum(f.stat().st_size for f in (tmp_path / name).rglob("*") if f.is_file())
        for name in ("slow_ar.mlpackage", "fast_ar.mlpackage")
    }
    each = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    print(f"{each}; written in {cost}; compared in {compared}")
    for check in checks:
        print(check.name, check.value, check.unit, check.note)
    assert [c.name for c in checks if c.result != "pass"] == []
    assert sum(sizes.values()) < 265e6
    assert compared.peak_bytes < 8e9


def test_the_functions_are_below_the_published_size(bundle: Path, tmp_path: Path) -> None:
    with alone() as process:
        written, cost, checks = process.submit(ios_cost.functions, bundle, tmp_path).result()
    sizes = {name: (tmp_path / name).stat().st_size for name in (LM_FILE, CODEC_FILE)}
    longest = max(function.longest_axis for function in written)
    each = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items())
    print(f"mlxfn: {sum(sizes.values()) / 1e6:.1f} MB ({each}), longest axis {longest}, {cost}")
    assert 850e6 < sum(sizes.values()) < PUBLISHED_LIMIT
    assert longest <= 16_384
    assert [f.name for f in written if f.name.startswith("frame")] == [
        "frame_512", "frame_1024", "frame_2048",
    ]  # fmt: skip
    assert [check.result for check in checks] == ["pass"]
