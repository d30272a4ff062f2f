"""The C++ host speaks with the exported functions, and no Python is in its process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
import soundfile

from warble_mlx import load
from warble_mlx.backend import OPENBLAS
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export.exporter import export
from warble_mlx.ios_export.graph_file import retarget
from warble_mlx.ios_export.job import Options
from warble_mlx.ios_export.mlx_part import GRAPHS_FILE, Graph

pytestmark = pytest.mark.slow  # compiles against MLX's headers

HOST = Path(__file__).parent.parent / "samples" / "host_cpp"
TEXT = "Hello there."
SEED = 1


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built as its README says."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    spec = importlib.util.find_spec("mlx")
    assert spec is not None
    (mlx,) = spec.submodule_search_locations or []
    build = tmp_path_factory.mktemp("host")
    made = run("cmake", "-S", HOST, "-B", build, f"-DCMAKE_PREFIX_PATH={mlx}")
    assert made.returncode == 0, made.stdout + made.stderr
    built = run("cmake", "--build", build)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "warning" not in built.stdout + built.stderr
    return build / "warble_host"


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model exported for a GPU; where there is none, then moved to the CPU."""
    out = tmp_path_factory.mktemp("assets") / "out"
    options = Options(dtype="float32", check_frames=3)
    export(bundled_folder(), out, only=["mlxfn"], options=options)
    if mx.default_device().type == mx.cpu:
        folder = out / "mlxfn"
        graphs = msgspec.json.decode((folder / GRAPHS_FILE).read_bytes(), type=dict[str, Graph])
        for name, graph in graphs.items():
            retarget(folder / name, folder / "moved", graph.operations, "cpu")
            (folder / "moved").replace(folder / name)
    return out


@pytest.fixture(scope="session")
def spoken(host: Path, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hello.wav and its codes, from the host program alone."""
    folder = tmp_path_factory.mktemp("spoken")
    options = ("--text", TEXT, "--seed", str(SEED), "--codes", folder / "hello.txt")
    done = run(host, assets, folder / "hello.wav", *options, LD_PRELOAD=OPENBLAS)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_host_says_what_the_runtime_says(spoken: Path) -> None:
    speech = load(dtype="float32").say(TEXT, seed=SEED)
    codes = np.loadtxt(spoken / "hello.txt", dtype=np.int32)
    assert (speech.codes == codes.T).all()
    samples, rate = soundfile.read(spoken / "hello.wav", dtype="float32")
    assert rate == speech.sample_rate
    assert len(samples) == codes.shape[0] * 2048
    # The runtime also fades the ends and limits peaks; in between it is the same sound.
    middle = slice(2048, min(len(samples), len(speech.samples)) - 4096)
    assert np.abs(samples[middle] - speech.samples[middle]).max() < 2e-4


def test_the_host_tells_what_is_wrong(host: Path, assets: Path, tmp_path: Path) -> None:
    for arguments, told in (
        ((), "[--text TEXT]"),
        ((tmp_path, "x.wav"), "manifest.json cannot be read"),
        ((assets, "x.wav", "--tempo", "2"), "unknown or incomplete option --tempo"),
        ((assets, "x.wav", "--text", "a", "--voice", "nobody"), "no voice nobody"),
        ((assets, "x.wav", "--text", ""), "the text is empty"),
        ((assets, "x.wav", "--voice", "Vera"), "--voice needs --text"),
        ((assets, tmp_path / "no" / "x.wav", "--frames", "2"), "cannot be written"),
    ):
        done = run(host, *map(str, arguments))
        assert done.returncode == 2
        assert told in done.stderr


@pytest.mark.ear
def test_a_recogniser_reads_the_hosts_words(spoken: Path) -> None:
    from ear.recogniser import Recogniser, why_missing
    from ear.scoring import word_errors

    missing = why_missing()
    if missing:
        pytest.skip(missing)
    samples, rate = soundfile.read(spoken / "hello.wav", dtype="float32")
    assert word_errors(TEXT, Recogniser().read(samples, rate)).errors == 0
