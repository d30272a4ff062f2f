"""The safetensors reader and writer: against MLX's own, and against damaged files."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import (
    from_float32,
    is_finite,
    read_header,
    to_float32,
    write_safetensors,
)

CASES = Path(__file__).parent / "cases" / "weights"


def file_of(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_mlx_writes(tmp_path: Path) -> None:
    arrays = {
        "f32": mx.random.normal((3, 5)),
        "f16": mx.random.normal((2, 3, 4)).astype(mx.float16),
        "bf16": mx.random.normal((7,)).astype(mx.bfloat16),
        "u32": mx.array([[1, 2**32 - 1]], mx.uint32),
        "bool": mx.array([True, False]),
        "scalar": mx.array(1.5),
    }
    path = tmp_path / "x.safetensors"
    mx.save_safetensors(str(path), arrays, {"format": "mlx", "more": "words"})
    header = read_header(path)
    assert header.metadata == {"format": "mlx", "more": "words"}
    assert {n: e.shape for n, e in header.entries.items()} == {
        n: a.shape for n, a in arrays.items()
    }
    for name, array in arrays.items():
        got = header.read(name)
        want = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        assert got.dtype == np.array(want).dtype
        assert np.array_equal(got, np.array(want)), name


def test_no_metadata_as_mlx_writes_it(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.ones((2,))})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {}
    assert header.read("a").tolist() == [1, 1]


def test_mlx_reads_what_is_written(tmp_path: Path) -> None:
    values = {
        "b.odd": np.arange(3, dtype=np.float16),
        "a.wide": np.arange(4, dtype=np.float32).reshape(2, 2),
        "c.bits": np.array([0x3F80, 0xC000], np.uint16),
        "d.empty": np.zeros((0, 2), np.float32),
    }
    dtypes = {"b.odd": "F16", "a.wide": "F32", "c.bits": "BF16", "d.empty": "F32"}
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {n: (dtypes[n], v.shape) for n, v in values.items()}, values.get)
    got, metadata = mx.load(str(path), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert got["c.bits"].tolist() == [1.0, -2.0]
    assert got["b.odd"].tolist() == [0, 1, 2]
    assert got["a.wide"].tolist() == [[0, 1], [2, 3]]
    assert got["d.empty"].shape == (0, 2)


def test_wide_dtypes_first_then_names_so_that_all_are_aligned(tmp_path: Path) -> None:
    layout = {"z": ("F32", (1,)), "a": ("BF16", (1,)), "m": ("F32", (1,)), "b": ("U8", (1,))}
    values = {"z": np.float32, "a": np.uint16, "m": np.float32, "b": np.uint8}
    path = tmp_path / "x.safetensors"
    asked: list[str] = []

    def produce(name: str) -> np.ndarray:
        asked.append(name)
        return np.ones(1, values[name])

    write_safetensors(path, layout, produce)
    assert asked == ["m", "z", "a", "b"] == list(read_header(path).entries)
    assert read_header(path).data_start % 8 == 0


def test_a_tensor_that_is_not_as_declared_is_a_mistake(tmp_path: Path) -> None:
    for value in (np.ones(3, np.float32), np.ones(2, np.float64)):
        with pytest.raises(ValueError, match="declared F32"):
            write_safetensors(
                tmp_path / "x.safetensors", {"a": ("F32", (2,))}, lambda _, value=value: value
            )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_a_sentence() -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        write_safetensors(Path("/dev/full"), {"a": ("F32", (2,))}, lambda _: np.ones(2, np.float32))


def test_bfloat16_rounds_as_mlx_does() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate(
        [
            random.standard_normal(20000).astype(np.float32),
            (random.standard_normal(2000) * 1e-39).astype(np.float32),  # subnormal
            np.array([0, -0.0, 1, 3.3895e38, -3.4e38], np.float32),
            # exactly half way between two neighbours: to the even one
            np.array([0x3F808000, 0x3F818000, 0x3F80FFFF], np.uint32).view(np.float32),
        ]
    )
    got = from_float32(values, "BF16")
    want = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(got, want)
    assert np.array_equal(
        to_float32(got, "BF16"), np.array(mx.array(want).view(mx.bfloat16).astype(mx.float32))
    )


def test_finite() -> None:
    for dtype in ("F32", "F16", "BF16"):
        good = from_float32(np.array([1, -65504, 0], np.float32), dtype)
        assert is_finite(good, dtype)
        for bad in (np.inf, -np.inf, np.nan):
            wide = np.array([1, bad], np.float32)
            raw = wide.view(np.uint16)[1::2] if dtype == "BF16" else from_float32(wide, dtype)
            assert not is_finite(raw, dtype)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("truncated.safetensors", "is truncated: have 16677 of 25016 bytes"),
        ("lfs_pointer.safetensors", "Git LFS pointer.*have 135 of 1202318848 bytes.*git lfs pull"),
        ("zero_bytes.safetensors", r"is empty \(0 bytes\)"),
        ("html_login_page.safetensors", "is a web page, not a weights file"),
        ("header_len_huge.safetensors", "a header of 9223372036854775808 bytes in a file of 10"),
    ],
)
def test_damaged_files_are_named_without_large_allocations(file: str, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=said) as caught:
            read_header(CASES / file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file in str(caught.value)
    assert peak < 1_000_000


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    values = np.arange(6, dtype=np.float32)
    write_safetensors(whole, {"a": ("F32", (6,))}, lambda _: values)
    raw = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(raw)):
        cut.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"truncated|empty|not a safetensors"):
            read_header(cut)
        if length >= read_header(whole).data_start:
            with pytest.raises(CheckpointError, match=f"have {length} of {len(raw)} bytes"):
                read_header(cut)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry("F32", [2], 0, 4)}, 4, "its offsets span 4"),
        ({"a": entry("F32", [2**62, 2**62], 0, 8)}, 8, "its offsets span 8"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, 6, "b overlaps another"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, "b leaves a gap"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "its offsets span -4"),
        ({"a": entry("F32", [1], 0, 4)}, 9, "5 bytes follow the last tensor"),
        ({"a": entry("F99", [1], 0, 4)}, 4, "a has the unknown dtype 'F99'"),
        ({"a": entry("F32", [-1], 0, 4)}, 4, "header is broken"),
        ({"a": entry("F32", [1.0], 0, 4)}, 4, "header is broken"),
        ({"a": entry("F32", ["1"], 0, 4)}, 4, "header is broken"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "header is broken"),
        ({"a": 3}, 4, "header is broken"),
        ({"__metadata__": {"a": 3}}, 0, "header is broken"),
        (b"{" + b"x" * 20, 0, "header is broken"),
        (b"[1, 2, 3]", 0, "not a safetensors file"),
        (b'{"a": "\xff"}', 0, "header is broken"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 0, "header is broken"),
    ],
)  # fmt: skip
def test_inconsistent_headers(tmp_path: Path, header: Any, data: int, said: str) -> None:
    path = file_of(tmp_path / "bad.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)


def test_a_name_twice_leaves_a_gap(tmp_path: Path) -> None:
    one, two = (json.dumps(entry("F32", [1], at, at + 4)).encode() for at in (0, 4))
    path = file_of(tmp_path / "x.safetensors", b'{"a": ' + one + b', "a": ' + two + b"}", bytes(8))
    with pytest.raises(CheckpointError, match="a leaves a gap"):
        read_header(path)


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: No such file"):
        read_header(tmp_path / "gone.safetensors")


def test_cut_off_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (6,))}, lambda _: np.ones(6, np.float32))
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="changed while a was read"):
        header.read("a")
