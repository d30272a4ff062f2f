"""How this package comes by MLX: the first import, a fast BLAS on Linux, device and dtype.

`prepare()` runs before the first `import mlx.core`. Two things have to happen that early:

* MLX's Linux wheels link a slow reference BLAS. If OpenBLAS is in the process with global
  symbols before MLX's library is loaded, MLX binds to it instead; afterwards it is too late.
  macOS has its own BLAS (Accelerate) and is left alone.
* On a machine without a build of MLX the import fails with a message about a shared library.
  It is replaced by one that names the machine and the command that helps.

Nothing heavy is imported when this module is.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from warble_mlx.errors import WarbleError

OPENBLAS = "libopenblas.so.0"
OPENBLAS_HINT = (
    "install OpenBLAS (Debian, Ubuntu: `sudo apt install libopenblas0`) to make fp32 matrix"
    " products on the CPU 5 to 70 times faster"
)
MIN_MACOS = (14, 0)  # oldest system that wheels of mlx >= 0.30 are built for

# Distributions that hold MLX's library. The Linux ones write the same file, mlx/lib/libmlx.so.
BACKEND_WHEELS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")

BlasStatus = Literal["not tried", "not needed", "loaded", "already there", "absent", "too late"]


class PlatformError(WarbleError, ImportError):
    """MLX cannot be imported here; the message names the machine and what to install."""


@dataclass(frozen=True)
class Blas:
    """What `prepare()` did about BLAS. `library` is the file MLX's matrix products come from,
    if it is known; `hint` says what to do when they are slow, and is empty when all is well."""

    status: BlasStatus
    library: str | None = None
    hint: str = ""


@dataclass(frozen=True)
class Host:
    """The facts that decide which MLX a machine needs."""

    system: str
    machine: str
    os_version: str
    python: str
    rosetta: bool = False

    def __str__(self) -> str:
        name = {"Darwin": "macOS"}.get(self.system, self.system)
        return f"{name} {self.os_version} on {self.machine}, Python {self.python}"


_prepared = False
_blas = Blas("not tried")


def prepare() -> None:
    """Make `import mlx.core` succeed and be fast; safe to call again.

    Raises PlatformError (an ImportError) when there is no MLX for this machine or it is not
    completely installed.
    """
    global _prepared, _blas
    if _prepared:
        return
    _blas = load_blas(sys.platform, mlx_imported="mlx.core" in sys.modules)
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise PlatformError(missing_mlx(this_host(), wheels(), error)) from error
    _prepared = True


def blas() -> Blas:
    """What the last `prepare()` did about BLAS."""
    return _blas


def load_blas(system: str, *, mlx_imported: bool) -> Blas:
    """Load OpenBLAS with global symbols on Linux, unless a BLAS is there already.

    `system` is a value of sys.platform. Never fails: a slow BLAS works, too.
    """
    if not system.startswith("linux"):
        return Blas("not needed")
    import ctypes

    present = global_library("cblas_sgemm")
    if present is not None:
        return Blas("already there", present)
    if mlx_imported:
        hint = "import warble_mlx before mlx: OpenBLAS has to be loaded first"
        return Blas("too late", hint=hint)
    try:
        ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return Blas("absent", hint=OPENBLAS_HINT)
    return Blas("loaded", global_library("cblas_sgemm"))


def global_library(symbol: str) -> str | None:
    """File of the library that offers `symbol` to every library loaded later, or None."""
    import ctypes

    class Info(ctypes.Structure):  # Dl_info of dlfcn.h
        _fields_ = (
            ("dli_fname", ctypes.c_char_p),
            ("dli_fbase", ctypes.c_void_p),
            ("dli_sname", ctypes.c_char_p),
            ("dli_saddr", ctypes.c_void_p),
        )

    process = ctypes.CDLL(None)
    try:
        function = getattr(process, symbol)
        dladdr = process.dladdr
    except AttributeError:
        return None
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(Info))
    info = Info()
    found = dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return info.dli_fname.decode() if found and info.dli_fname else None


def this_host() -> Host:
    """The machine this runs on."""
    system = platform.system()
    version = platform.mac_ver()[0] if system == "Darwin" else platform.release()
    return Host(
        system=system,
        machine=platform.machine(),
        os_version=version,
        python=platform.python_version(),
        rosetta=system == "Darwin" and platform.machine() == "x86_64" and _is_translated(),
    )


def _is_translated() -> bool:
    """Whether this Intel process runs on Apple silicon, under Rosetta."""
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "sysctl.proc_translated"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.stdout.strip() == "1"


def wheels() -> dict[str, str]:
    """Installed distributions that hold MLX's library, with their versions."""
    from importlib import metadata

    found = {}
    for name in BACKEND_WHEELS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def clash(installed: dict[str, str]) -> str | None:
    """The sentence to show when two wheels have overwritten each other's libmlx.so, else None."""
    linux = [name for name in installed if name != "mlx-metal"]
    if len(linux) < 2:
        return None
    names = " and ".join(linux)
    return (
        f"{names} are both installed and write the same file, mlx/lib/libmlx.so: one of them is"
        f" broken. Keep one: pip uninstall -y {' '.join(linux)}, then"
        ' pip install "mlx[cpu]" or pip install "mlx[cuda13]"'
    )


def missing_mlx(host: Host, installed: dict[str, str], error: ImportError) -> str:
    """Why `import mlx.core` failed with `error` on `host`, and the command that helps."""
    start = f"MLX cannot be imported on this machine ({host}): {error}. "
    if host.system == "Darwin":
        return start + _mac_advice(host)
    overwritten = clash(installed)
    if overwritten:
        return start + overwritten
    if host.system == "Linux" and host.machine in ("x86_64", "aarch64"):
        return (
            start + "On Linux MLX needs a backend and glibc 2.35 or newer:"
            ' pip install "mlx[cpu]", or pip install "mlx[cuda13]" for an NVIDIA GPU'
        )
    if host.system == "Windows":
        return start + 'Use the Windows Subsystem for Linux, and there: pip install "mlx[cpu]"'
    return start + "MLX is built for Apple silicon and for Linux on x86_64 and aarch64 only"


def _mac_advice(host: Host) -> str:
    if host.rosetta:
        return (
            "This Python is an Intel build that runs under Rosetta, on a Mac with Apple silicon."
            " Install a native one (python.org, or Homebrew in /opt/homebrew) and run it with:"
            " arch -arm64 python3 -m pip install warble-mlx"
        )
    if host.machine != "arm64":
        return "MLX needs a Mac with Apple silicon; this one has an Intel processor"
    if _version(host.os_version) < MIN_MACOS:
        wanted = ".".join(map(str, MIN_MACOS))
        return f"MLX needs macOS {wanted} or newer: update the system, then pip install -U mlx"
    return "Install it again with: python3 -m pip install --force-reinstall mlx mlx-metal"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU (Metal or CUDA)."""
    prepare()
    import mlx.core as mx

    return bool(mx.default_device().type == mx.gpu)


def default_dtype() -> Literal["float32", "bfloat16"]:
    """The dtype weights are computed in: float32 on a CPU, bfloat16 on a GPU.

    CPUs have no fast bfloat16 product in MLX; on a GPU the published model was trained and is
    distributed in bfloat16.
    """
    return "bfloat16" if on_gpu() else "float32"
