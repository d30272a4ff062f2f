"""codec.pth in all its forms, and what is refused. Torch is an extra: without it most of this is
skipped, except that its absence gives the line that installs it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic

from warble_mlx.convert import convert
from warble_mlx.convert.names import FILES
from warble_mlx.errors import CheckpointError, MissingExtraError

CASES = Path(__file__).parent / "cases" / "weights"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is only needed to read a .pth")


def write_pth(
    folder: Path, torch: Any, wrap: Callable[[dict[str, Any]], Any] = dict, **save: Any
) -> Path:
    """The small source with its codec as codec.pth."""
    source = synthetic.write_source(folder, codec_filename="codec.pth")
    (source / "codec.safetensors").unlink()
    tensors = synthetic.codec(synthetic.config())
    state = {name: torch.from_numpy(value) for name, value in tensors.items()}
    torch.save(wrap(state), source / "codec.pth", **save)
    return source


def training(torch: Any) -> Callable[[dict[str, Any]], Any]:
    def wrap(state: dict[str, Any]) -> Any:
        named = {f"generator.{name}": value for name, value in state.items()}
        named["generator.quantizer.post_module.freqs_cis"] = torch.zeros(4, 32, 2)
        named["generator.quantizer.post_module.causal_mask"] = torch.zeros(4, 4, dtype=torch.bool)
        named["discriminator.weight"] = torch.zeros(3)
        named["step"] = 7
        return {"state_dict": named, "epoch": 3}

    return wrap


@pytest.fixture
def bundle(tmp_path: Path) -> dict[str, bytes]:
    source = synthetic.write_source(tmp_path / "plain")
    convert(source, tmp_path / "plain-out", codec_dtype="float32")
    return {file: (tmp_path / "plain-out" / file).read_bytes() for file in FILES}


def converted(source: Path, out: Path) -> dict[str, bytes]:
    convert(source, out, codec_dtype="float32")
    return {file: (out / file).read_bytes() for file in FILES}


def test_plain_state_dict(torch: Any, bundle: dict[str, bytes], tmp_path: Path) -> None:
    assert converted(write_pth(tmp_path / "s", torch), tmp_path / "out") == bundle


def test_nested_state_dict(torch: Any, bundle: dict[str, bytes], tmp_path: Path) -> None:
    source = write_pth(tmp_path / "s", torch, lambda state: {"state_dict": state})
    assert converted(source, tmp_path / "out") == bundle


def test_training_checkpoint(torch: Any, bundle: dict[str, bytes], tmp_path: Path) -> None:
    source = write_pth(tmp_path / "s", torch, training(torch))
    report = convert(source, tmp_path / "out", codec_dtype="float32")
    assert {file: (tmp_path / "out" / file).read_bytes() for file in FILES} == bundle
    assert sorted(drop.name for drop in report.dropped) == [
        "discriminator.weight",
        "quantizer.post_module.causal_mask",
        "quantizer.post_module.freqs_cis",
        "step",
    ]


def test_mark_more_than_once(torch: Any, bundle: dict[str, bytes], tmp_path: Path) -> None:
    def wrap(state: dict[str, Any]) -> Any:
        return {f"generator.generator.{name}": value for name, value in state.items()}

    assert converted(write_pth(tmp_path / "s", torch, wrap), tmp_path / "out") == bundle


def test_old_file_format(torch: Any, bundle: dict[str, bytes], tmp_path: Path) -> None:
    source = write_pth(tmp_path / "s", torch, _use_new_zipfile_serialization=False)
    assert converted(source, tmp_path / "out") == bundle


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(torch: Any, tmp_path: Path, dtype: str) -> None:
    import mlx.core as mx
    import numpy as np

    source = write_pth(
        tmp_path / "s", torch, lambda s: {n: v.to(getattr(torch, dtype)) for n, v in s.items()}
    )
    convert(source, tmp_path / "out", codec_dtype="float32")
    got = mx.load(str(tmp_path / "out" / "codec_decoder.safetensors"))
    value = synthetic.codec(synthetic.config())["decoder.model.6.conv.bias"]
    want = torch.from_numpy(value).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(np.array(got["decoder.model.6.conv.bias"]), want)


def test_parameters_that_require_gradients(
    torch: Any, bundle: dict[str, bytes], tmp_path: Path
) -> None:
    source = write_pth(
        tmp_path / "s", torch, lambda s: {n: torch.nn.Parameter(v) for n, v in s.items()}
    )
    assert converted(source, tmp_path / "out") == bundle


@pytest.mark.parametrize("value", [7, "words", None, [1, 2]])
def test_entries_that_are_no_tensors(torch: Any, tmp_path: Path, value: Any) -> None:
    source = write_pth(tmp_path / "s", torch, lambda state: {**state, "step": value})
    with pytest.raises(CheckpointError, match="1 unexpected: step"):
        convert(source, tmp_path / "out")
    name = "decoder.model.6.conv.bias"
    source = write_pth(tmp_path / "s2", torch, lambda state: {**state, name: value})
    with pytest.raises(CheckpointError, match=name):
        convert(source, tmp_path / "out")


def test_integer_tensor(torch: Any, tmp_path: Path) -> None:
    name = "decoder.model.6.conv.bias"
    source = write_pth(
        tmp_path / "s", torch, lambda state: {**state, name: torch.zeros(1, dtype=torch.int32)}
    )
    with pytest.raises(CheckpointError, match=rf"not floating point: {name} is"):
        convert(source, tmp_path / "out")


class Touch:
    """Unpickled the ordinary way, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("form", ["torch", "pickle", "torch-old"])
def test_pickled_code_is_never_run(torch: Any, tmp_path: Path, form: str) -> None:
    trap = tmp_path / "trap"
    source = write_pth(tmp_path / "s", torch)
    state = {"decoder.model.6.conv.bias": Touch(trap)}
    if form == "pickle":
        (source / "codec.pth").write_bytes(pickle.dumps(state))
    else:
        zipped = form == "torch"
        torch.save(state, source / "codec.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"damaged or holds pickled code, which is never run"):
        convert(source, tmp_path / "out")
    assert not trap.exists()


@pytest.mark.parametrize("keep", [0.2, 0.9, 0.999])
def test_cut_off(torch: Any, tmp_path: Path, keep: float) -> None:
    source = write_pth(tmp_path / "s", torch)
    raw = (source / "codec.pth").read_bytes()
    (source / "codec.pth").write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(CheckpointError, match=r"codec\.pth is damaged"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("content", [b"\0" * 1000, b"words\n" * 100, b"PK\x03\x04" + b"x" * 50])
def test_rubbish(torch: Any, tmp_path: Path, content: bytes) -> None:
    source = write_pth(tmp_path / "s", torch)
    (source / "codec.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"codec\.pth is damaged"):
        convert(source, tmp_path / "out")


def test_not_a_state_dict(torch: Any, tmp_path: Path) -> None:
    source = write_pth(tmp_path / "s", torch, lambda state: [1, 2])
    with pytest.raises(CheckpointError, match="holds a list, not a state dict"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("lfs_pointer.safetensors", "Git LFS pointer"),
        ("zero_bytes.safetensors", "is empty"),
        ("html_login_page.safetensors", "is a web page"),
    ],
)
def test_a_broken_download_is_named_even_without_torch(
    tmp_path: Path, file: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    source = synthetic.write_source(tmp_path / "source", codec_filename="codec.pth")
    (source / "codec.pth").write_bytes((CASES / file).read_bytes())
    with pytest.raises(CheckpointError, match=said):
        convert(source, tmp_path / "out")


def test_without_torch_the_pip_line_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    source = synthetic.write_source(tmp_path / "source", codec_filename="codec.pth")
    (source / "codec.pth").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(MissingExtraError, match=r"Reading codec\.pth needs torch.*\[convert\]"):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
