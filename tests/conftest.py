"""Checkpoints that the tests share. They are generated: every value follows from a name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

# `python -m pytest` puts the tree in front, where some packages lie in other folders than they are
# imported from. What is tested is what is installed.
TREE = Path(__file__).resolve().parent.parent
if not (TREE / "warble_mlx" / "convert").is_dir():  # as it is in the copies of mutations.py
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TREE]

from warble_mlx.backend import on_gpu, prepare  # noqa: E402

prepare()  # before the first import of MLX, as the package does it

import mlx.core as mx  # noqa: E402
from clip_data import CLIPS  # noqa: E402
from command_line import fake, run  # noqa: E402, F401  # fixtures

from warble_mlx.dual_ar import DualAR  # noqa: E402
from warble_mlx.engine import Engine  # noqa: E402
from warble_mlx.weights import load_dual_ar  # noqa: E402

GENERATOR = Path(__file__).parent / "golden" / "make_checkpoint.py"


def generate(folder: Path, *options: str) -> Path:
    subprocess.run([sys.executable, GENERATOR, folder, *options], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def away_from_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`python -c` looks for packages in the current folder first, and in that of the sources some
    lie elsewhere than they are imported from."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """For what is exact on a CPU only, such as what its allocator holds."""
    with mx.stream(mx.cpu):
        yield


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden data's small DualAR checkpoint; no codec."""
    return generate(tmp_path_factory.mktemp("tiny"), "--preset", "tiny")


@pytest.fixture(scope="session")
def tiny_dual_ar(tiny_source: Path) -> DualAR:
    return load_dual_ar(tiny_source, mx.float32)


@pytest.fixture(scope="session")
def compiled_tiny_engine(tiny_dual_ar: DualAR) -> Engine:
    """Shared, so that each shape is traced and compiled once in a test run."""
    if not on_gpu() and shutil.which("g++") is None:
        pytest.skip("MLX compiles traced functions on a CPU with g++, which is not installed")
    return Engine(tiny_dual_ar, compiled=True)


@pytest.fixture(scope="session")
def full_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer.json with the published ids; no weights."""
    return generate(tmp_path_factory.mktemp("ids"), "--preset", "full", "--no-lm")


@pytest.fixture(scope="session")
def full_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the published size, 2.6 GB, codec as safetensors."""
    options = ("--preset", "full", "--codec", "full", "--no-pth")
    return generate(tmp_path_factory.mktemp("full"), *options)


@pytest.fixture(scope="session")
def full_dual_ar(full_source: Path) -> DualAR:
    return load_dual_ar(full_source, mx.float32)


@pytest.fixture(scope="session")
def full_bundle(full_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full-size checkpoint converted, its codec kept in float32."""
    from warble_mlx.convert import convert

    out = tmp_path_factory.mktemp("bundles") / "full"
    convert(full_source, out, codec_dtype="float32")
    return out


@pytest.fixture(scope="session")
def spoken() -> npt.NDArray[np.float64]:
    """Samples [n] of a short clip, 44.1 kHz."""
    import soundfile

    samples: npt.NDArray[np.float64] = soundfile.read(CLIPS / "ref.flac")[0]
    return samples


@pytest.fixture(scope="module")
def quick_rows() -> Iterator[None]:
    """Rows that speak noise. What those of a real model say beside each other is the matter of
    test_ensemble.py."""
    from speaking import QuickBatch

    from warble_mlx import ensemble

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble, "Batch", QuickBatch)
        yield


@pytest.fixture(autouse=True)
def no_registered_voices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty voice folder, so that no test sees or touches the user's own."""
    folder = tmp_path.with_name(f"{tmp_path.name}-voices")
    monkeypatch.setenv("WARBLE_VOICES", str(folder))
    return folder
