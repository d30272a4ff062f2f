"""The machine, the software and the command behind a figure."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import msgspec

from warble_mlx import __version__, backend


class Machine(msgspec.Struct, frozen=True):
    """Where and with what something was measured."""

    device: str  # that MLX computes on
    processor: str
    cores: int
    system: str
    python: str
    mlx: str
    mlx_wheels: dict[str, str]
    warble_mlx: str
    blas: str


def this_machine() -> Machine:
    """The facts about this process."""
    host = backend.this_host()
    wheels = backend.wheels()
    blas = backend.blas()
    kind = "GPU" if backend.on_gpu() else "CPU"
    return Machine(
        device=f"{kind}, {_device_name()}",
        processor=_processor(host.system),
        cores=_cores(),
        system=f"{host.system} {host.os_version} on {host.machine}",
        python=host.python,
        mlx=_version("mlx") or str(getattr(mx, "__version__", "unknown")),
        mlx_wheels=wheels,
        warble_mlx=__version__,
        blas=blas.library or blas.status,
    )


def this_command() -> str:
    """The command line of this process, with the program's name instead of its path."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _device_name() -> str:
    described: dict[str, object] = getattr(
        mx, "device_info", dict
    )()  # older versions have no such function
    return str(described.get("device_name", platform.processor()))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor(system: str) -> str:
    if system == "Darwin":
        named = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        return named.stdout.strip() or platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # unpacked beside the interpreter, not installed
        return ""
