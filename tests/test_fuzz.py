"""Files that somebody or something has damaged: each is read, or refused by an error of ours.

Any other exception fails, and so does one that takes long or much memory: what is made here is
small, whatever it claims to be.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warble_mlx.bench.report import read_report
from warble_mlx.clip_files import read_file
from warble_mlx.config import parse_config, read_config
from warble_mlx.convert.source import open_source
from warble_mlx.errors import WarbleError
from warble_mlx.model_files import check_complete
from warble_mlx.registered import read_voice
from warble_mlx.safetensors_file import read_header
from warble_mlx.verify.dump import read_dump
from warble_mlx.voices import read_voices

CASES = Path(__file__).parent / "cases"
MOST_BYTES = 64e6  # of Python's memory while a file of a few KB is read
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**70), 10**30, 0.5, -1.5, 1e308, float("nan"), float("inf")]),
    st.text(max_size=4),
    st.sampled_from(
        ["", "../../x", "/", "a" * 300, "\u0000", "\ud800", "F64", "model.safetensors"]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def damaged(data: st.DataObject, raw: bytes) -> bytes:
    """Bytes with a few of them changed, removed, repeated or put in."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(["cut", "flip", "drop", "insert", "repeat"]))
        some = data.draw(st.binary(min_size=1, max_size=8))
        if kind == "cut":
            raw = raw[:at]
        elif kind == "flip":
            raw = raw[:at] + some + raw[at + len(some) :]
        elif kind == "drop":
            raw = raw[:at] + raw[at + len(some) :]
        elif kind == "insert":
            raw = raw[:at] + some + raw[at:]
        else:
            raw = raw[:at] + raw[max(at - 64, 0) : at] + raw[at:]
    return raw


def altered(data: st.DataObject, value: Any) -> Any:
    """JSON with one value somewhere in it replaced, removed or added."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value)))
        kind = data.draw(st.sampled_from(["inside", "inside", "drop", "add"]))
        if kind == "inside":
            return value | {key: altered(data, value[key])}
        if kind == "drop":
            return {name: inner for name, inner in value.items() if name != key}
        return value | {data.draw(st.text(max_size=4)): data.draw(VALUES)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], altered(data, value[at]), *value[at + 1 :]]
    return data.draw(VALUES)


def read_or_refused(read: Callable[[], object]) -> None:
    tracemalloc.start()
    said = "nothing, since it was read"
    try:
        read()
    except WarbleError as error:
        said = str(error).strip()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert said
    assert peak < MOST_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where damaged files are written, one after the other."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> bytes:
    """A small safetensors file."""
    path = folder / "whole.safetensors"
    arrays = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    synthetic.write(path, arrays, "pt")
    return path.read_bytes()


@FUZZ
@given(data=st.data())
def test_safetensors_bytes(folder: Path, tensors: bytes, data: st.DataObject) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damaged(data, tensors))

    def read() -> None:
        header = read_header(path)
        for name in header.entries:
            header.read(name)

    read_or_refused(read)


@FUZZ
@given(data=st.data())
def test_safetensors_headers(folder: Path, tensors: bytes, data: st.DataObject) -> None:
    size = int.from_bytes(tensors[:8], "little")
    header = altered(data, json.loads(tensors[8 : 8 + size]))
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    path = folder / "header.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + tensors[8 + size :])

    def read() -> None:
        found = read_header(path)
        for name in found.entries:
            found.read(name)

    read_or_refused(read)


@FUZZ
@given(data=st.data())
def test_configs(data: st.DataObject) -> None:
    fields = altered(data, synthetic.config())
    read_or_refused(lambda: parse_config(json.dumps(fields), "config.json"))


@FUZZ
@given(data=st.data())
def test_config_bytes(folder: Path, data: st.DataObject) -> None:
    (folder / "config.json").write_bytes(damaged(data, json.dumps(synthetic.config()).encode()))
    read_or_refused(lambda: read_config(folder))


@FUZZ
@given(data=st.data())
def test_indexes(folder: Path, tensors: bytes, data: st.DataObject) -> None:
    model = folder / "sharded"
    model.mkdir(exist_ok=True)
    synthetic.write_json(model / "config.json", synthetic.config())
    (model / "model-00001-of-00002.safetensors").write_bytes(tensors)
    index = {
        "metadata": {"total_size": 40},
        "weight_map": {
            "a.weight": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }
    text = json.dumps(altered(data, index))
    (model / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    read_or_refused(lambda: check_complete(model))
    read_or_refused(lambda: open_source(model))


@FUZZ
@given(data=st.data())
def test_voice_lists(folder: Path, data: st.DataObject) -> None:
    listed = {
        "default": "Ada",
        "voices": [{"number": 1, "name": "Ada", "token": "<|speaker:1|>", "language": "en"}],
    }
    (folder / "voices.json").write_bytes(
        json.dumps(altered(data, listed)).encode("utf-8", "surrogatepass")
    )
    read_or_refused(lambda: read_voices(folder))


def voice_header() -> dict[str, Any]:
    metadata = {
        "format": "warble-voice",
        "format_version": "1",
        "name": "ada",
        "transcript": "Hello there.",
        "description": "",
        "language": "en",
        "codec": "a codec",
        "codec_sha256": "0" * 64,
        "clip_seconds": "1.5",
        "clip_sample_rate": "44100",
        "made_by": "a test",
    }
    codes = {"dtype": "I32", "shape": [10, 2], "data_offsets": [0, 80]}
    return {"__metadata__": metadata, "codes": codes}


def voice_bytes(header: Any) -> bytes:
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + bytes(80)


@FUZZ
@given(data=st.data())
def test_registered_voices(folder: Path, data: st.DataObject) -> None:
    path = folder / "ada.safetensors"
    path.write_bytes(voice_bytes(altered(data, voice_header())))
    read_or_refused(lambda: read_voice(path))


def test_the_voice_that_is_altered_is_a_good_one(folder: Path) -> None:
    """Or the test above would try nothing behind the first check."""
    path = folder / "good.safetensors"
    path.write_bytes(voice_bytes(voice_header()))
    assert read_voice(path).name == "ada"


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("name", ["ref_16k_mono.wav", "ref.flac", "ref.mp3"])
def test_clips(folder: Path, name: str, data: st.DataObject) -> None:
    path = folder / name
    path.write_bytes(damaged(data, (CASES / "ref" / name).read_bytes()[:20_000]))
    read_or_refused(lambda: read_file(path))


@FUZZ
@given(data=st.data())
def test_reports_and_dumps(folder: Path, tensors: bytes, data: st.DataObject) -> None:
    report = folder / "report.json"
    report.write_bytes(damaged(data, b'{"schema": "warble-bench/1", "date": "2026-01-01"}'))
    read_or_refused(lambda: read_report(report))
    dump = folder / "dump.safetensors"
    dump.write_bytes(damaged(data, tensors))
    read_or_refused(lambda: read_dump(dump))
