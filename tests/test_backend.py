"""The first import of MLX: BLAS, missing builds, device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from warble_mlx import backend
from warble_mlx.backend import Host
from warble_mlx.errors import WarbleError

FAILED = ImportError("libmlx.so: cannot open shared object file")


def host(system: str, machine: str, version: str = "15.1", *, rosetta: bool = False) -> Host:
    return Host(system, machine, version, "3.12.1", rosetta)


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (
            host("Darwin", "x86_64", rosetta=True),
            ["macOS 15.1", "x86_64", "Rosetta", "arch -arm64"],
        ),
        (host("Darwin", "x86_64"), ["x86_64", "Apple silicon", "Intel"]),
        (host("Darwin", "arm64", "13.6"), ["macOS 13.6", "macOS 14.0", "pip install -U mlx"]),
        (host("Darwin", "arm64"), ["arm64", "pip install --force-reinstall mlx"]),
        (host("Linux", "x86_64", "6.8"), ["Linux 6.8", 'pip install "mlx[cpu]"', "mlx[cuda13]"]),
        (host("Linux", "aarch64", "6.8"), ["aarch64", 'pip install "mlx[cpu]"']),
        (host("Linux", "armv7l", "6.8"), ["armv7l", "x86_64 and aarch64"]),
        (host("Windows", "AMD64", "11"), ["Windows 11", "Subsystem for Linux"]),
    ],
)
def test_missing_mlx_names_machine_and_command(machine: Host, named: list[str]) -> None:
    message = backend.missing_mlx(machine, {}, FAILED)
    for words in [*named, "Python 3.12.1", "libmlx.so"]:
        assert words in message


def test_two_linux_wheels_clash() -> None:
    both = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    message = backend.clash(both)
    assert message is not None
    assert "pip uninstall -y mlx-cpu mlx-cuda-13" in message
    assert message in backend.missing_mlx(host("Linux", "x86_64"), both, FAILED)
    assert backend.clash({"mlx-cpu": "0.32.4"}) is None
    assert backend.clash({"mlx-metal": "0.32.4"}) is None


def test_prepare_explains_a_failed_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_prepared", False)
    monkeypatch.setattr(backend, "_blas", backend.Blas("not tried"))
    monkeypatch.setattr(backend.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend.platform, "mac_ver", lambda: ("14.5", ("", "", ""), "x86_64"))
    monkeypatch.setattr(backend, "_is_translated", lambda: True)

    def no_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(backend.importlib, "import_module", no_module)
    with pytest.raises(ImportError, match=r"macOS 14\.5 on x86_64.*Rosetta") as caught:
        backend.prepare()
    assert isinstance(caught.value, WarbleError)
    assert caught.value.exit_status == 2
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_translated_process_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"out": "1\n"}

    def sysctl(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=answers["out"])

    monkeypatch.setattr(backend.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(backend.subprocess, "run", sysctl)
    assert backend.this_host().rosetta
    answers["out"] = ""
    assert not backend.this_host().rosetta


def test_no_blas_is_loaded_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a library was opened")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert backend.load_blas("darwin", mlx_imported=False) == backend.Blas("not needed")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
class TestBlasOnLinux:
    def test_absent_library_gives_the_install_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "OPENBLAS", "libno-such-blas.so.0")
        monkeypatch.setattr(backend, "global_library", lambda symbol: None)
        blas = backend.load_blas("linux", mlx_imported=False)
        assert blas.status == "absent"
        assert "apt install libopenblas0" in blas.hint

    def test_imported_mlx_is_too_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "global_library", lambda symbol: None)
        blas = backend.load_blas("linux", mlx_imported=True)
        assert blas.status == "too late"
        assert "import warble_mlx before mlx" in blas.hint

    def test_a_blas_that_is_there_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "global_library", lambda symbol: "/opt/libfast.so")
        blas = backend.load_blas("linux", mlx_imported=False)
        assert blas == backend.Blas("already there", "/opt/libfast.so")

    def test_global_library_finds_the_file_of_a_symbol(self) -> None:
        file = backend.global_library("malloc")
        assert file is not None
        assert "libc" in file
        assert backend.global_library("no_such_function_anywhere") is None

    def test_mlx_binds_to_openblas(self) -> None:
        """In a fresh process, because it is decided by what is loaded first."""
        script = (
            "from warble_mlx import backend; backend.prepare(); b = backend.blas();"
            "print(b.status, b.library); import mlx.core as mx;"
            "print(mx.allclose(mx.ones((4, 8)) @ mx.ones((8, 4)), mx.full((4, 4), 8)).item())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        blas, product = done.stdout.splitlines()
        assert product == "True"
        assert blas == "absent None" or (
            blas.split()[0] in ("loaded", "already there") and "blas" in blas.split(maxsplit=1)[1]
        )


def test_prepare_twice_is_fine_and_dtype_follows_the_device() -> None:
    backend.prepare()
    backend.prepare()
    import mlx.core as mx

    gpu = mx.default_device().type == mx.gpu
    assert backend.on_gpu() is gpu
    assert backend.default_dtype() == ("bfloat16" if gpu else "float32")
