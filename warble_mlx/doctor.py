"""`warble doctor`: what this installation is made of, what is wrong with it, and whether it speaks.

Every check is one line: a name, what was found, and, if it matters, what to do. A "problem" keeps
the package from doing its work; a "note" does not.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from warble_mlx import __version__, backend
from warble_mlx.errors import WarbleError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from warble_mlx.speech import Speech

# A sentence and the codes that the reference engine finds for it, greedily, in float32.
SELF_TEST = Path(__file__).parent / "bundled" / "self_test.json"
TEST_TEXT = "This is a short test."
TEST_SECONDS = (0.4, 6.0)  # of speech that the test text can take
LIBRARIES = ("numpy", "tokenizers", "huggingface_hub", "soundfile", "soxr", "msgspec", "click")
# What the optional parts of the package are for; what each one needs, its metadata says.
EXTRAS = {
    "play": "playing speech",
    "convert": "converting a codec.pth",
    "av": "clips in m4a, AAC, WebM and the like, and AAC from warble serve",
    "text": "numbers as words (--normalise)",
    "quant": "quantising",
    "bench": "charts of warble bench and warble fidelity",
    "server": "warble serve",
    "wyoming": "Home Assistant (warble wyoming)",
    "ios": "Core ML packages (warble export-ios)",
}
# From this version on, loading the published model's own code with transformers leaves its RoPE
# tables unset: it then speaks noise without an error.
UNSAFE_TRANSFORMERS = 5
# A full model takes about 1.8 GB to download and as much again once it is converted; 4-bit, it
# speaks in about 1.6 GB of memory.
DISK_BYTES = 4e9
MEMORY_BYTES = 4e9

State = Literal["good", "note", "problem"]


class Check(NamedTuple):
    """One finding. `advice` is what to do, empty when there is nothing to do."""

    name: str
    found: str
    state: State = "good"
    advice: str = ""


def examine() -> Iterator[Check]:
    """All checks, in the order in which one would look."""
    host = backend.this_host()
    yield Check("python", host.python)
    yield Check("system", f"{host.system} {host.os_version} on {host.machine}")
    yield Check("warble-mlx", __version__)
    yield from check_mlx()
    yield Check("libraries", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES))
    yield from check_extras()
    yield from check_transformers(_version("transformers"))
    yield from check_room()
    yield check_cache()
    yield from check_speech()


def check_mlx() -> Iterator[Check]:
    """MLX's version, the wheels behind it, the device, the dtype and the BLAS."""
    wheels = backend.wheels()
    named = ", ".join(f"{name} {version}" for name, version in wheels.items())
    overwritten = backend.clash(wheels)
    if overwritten:
        yield Check("mlx wheels", named, "problem", overwritten)
    try:
        backend.prepare()
    except backend.PlatformError as error:
        yield Check("mlx", "cannot be imported", "problem", str(error))
        return
    import mlx.core as mx

    yield Check("mlx", _version("mlx") + (f" ({named})" if named else ""))
    kind = "GPU" if backend.on_gpu() else "CPU"
    facts = mx.device_info() if hasattr(mx, "device_info") else {}  # new in recent versions
    yield Check("device", f"{kind}, {facts.get('device_name', platform.processor())}")
    yield Check("dtype", backend.default_dtype())
    yield check_blas(backend.blas(), on_gpu=backend.on_gpu())


def check_blas(blas: backend.Blas, *, on_gpu: bool) -> Check:
    """Where the CPU's matrix products come from; a slow BLAS matters only where there is no GPU."""
    if blas.status == "not needed":
        return Check("blas", "Accelerate, part of the system")
    if blas.status in ("loaded", "already there"):
        return Check("blas", blas.library or backend.OPENBLAS)
    slow = f"the slow one of MLX's wheel (OpenBLAS: {blas.status})"
    return Check("blas", slow, "good" if on_gpu else "note", "" if on_gpu else blas.hint)


def check_extras() -> Iterator[Check]:
    """Optional parts: all that each one needs, or what is missing or too old, and the pip line."""
    for extra, purpose in EXTRAS.items():
        there, wrong = [], []
        for needed in requirements(extra):
            version = _version(needed.name)
            if version == "absent":
                wrong.append(f"{needed.name} is not installed")
            elif not needed.specifier.contains(version, prereleases=True):
                wrong.append(f"{needed.name} {version} is not {needed.specifier}")
            else:
                there.append(f"{needed.name} {version}")
        if wrong:
            advice = f'for {purpose}: pip install "warble-mlx[{extra}]"'
            yield Check(f"extra {extra}", ", ".join(wrong), "note", advice)
        else:
            yield Check(f"extra {extra}", ", ".join(there))
    if _version("sounddevice") != "absent":
        from warble_mlx.player import why_mute

        lacking = why_mute()
        if lacking is None:
            yield Check("loudspeaker", "found")
        else:
            advice = f"speech is written to a file instead: {lacking}"
            yield Check("loudspeaker", "none", "note", advice)


def check_transformers(version: str) -> Iterator[Check]:
    """A line only if transformers is installed; this package does not use it."""
    if version.partition(".")[0].isdigit():
        unsafe = int(version.partition(".")[0]) >= UNSAFE_TRANSFORMERS
        advice = (
            "not used here; but the published model's own code speaks noise with it:"
            " pip install transformers==4.57.5"
        )
        yield Check("transformers", version, "note" if unsafe else "good", advice if unsafe else "")


def check_cache() -> Check:
    """Where models from the hub and their conversions are kept."""
    from huggingface_hub import constants

    from warble_mlx.hub import cache_folder

    offline = ", downloads are off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    return Check("caches", f"{constants.HF_HUB_CACHE}, {cache_folder()}{offline}")


def check_room() -> Iterator[Check]:
    """Memory of the machine and space for models."""
    from warble_mlx.hub import cache_folder

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    little = "little for a full model: quantise it to 4 bits (warble convert --bits 4)"
    state: State = "good" if memory >= MEMORY_BYTES else "note"
    yield Check("memory", f"{memory / 1e9:.1f} GB", state, little if state == "note" else "")
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    full = "little for downloading and converting a full model; WARBLE_CACHE moves the folder"
    state = "good" if free >= DISK_BYTES else "note"
    yield Check("disk", f"{free / 1e9:.1f} GB free", state, full if state == "note" else "")


def check_speech() -> Iterator[Check]:
    """Let the bundled voice speak a sentence, and look at what comes."""
    try:
        import warble_mlx

        speech = warble_mlx.load().say(TEST_TEXT, greedy=True, seed=0)
    except (WarbleError, ImportError) as error:
        yield Check("self-test", "failed", "problem", str(error))
        return
    yield check_sound(speech)
    yield check_codes(speech, backend.default_dtype())


def check_sound(speech: Speech) -> Check:
    """Whether it can be the test sentence: its end, its length, its level."""
    import numpy as np

    level = float(np.sqrt(np.mean(np.square(speech.samples)))) if speech.seconds else 0.0
    found = (
        f"{speech.seconds:.2f} s of speech, {speech.codes.shape[-1]} frames,"
        f" {speech.finish_reason}, RTF {speech.rtf:.2f}, {speech.model}"
    )
    shortest, longest = TEST_SECONDS
    if speech.finish_reason != "stop":
        wrong = "it did not end by itself"
    elif not shortest <= speech.seconds <= longest:
        wrong = f"it should last {shortest} to {longest} s"
    elif not (math.isfinite(level) and level > 1e-3):
        wrong = f"its level is {level:.2g}, which is no speech"
    else:
        return Check("self-test", found)
    advice = f"{wrong}: this MLX build computes wrong values, or the package's files are damaged"
    return Check("self-test", found, "problem", advice)


def check_codes(speech: Speech, dtype: str) -> Check:
    """Whether every code is the reference engine's. Only float32 promises that."""
    codes = json.loads(SELF_TEST.read_text())["codes"]
    if dtype != "float32":
        return Check("golden codes", f"not compared: this device computes in {dtype}")
    if speech.codes.tolist() == codes:
        return Check("golden codes", f"all {speech.codes.size} equal the reference's")
    return Check(
        "golden codes",
        "differ from the reference's",
        "problem",
        "this MLX build computes wrong values; warble verify shows where",
    )


def as_rows(checks: Sequence[Check]) -> list[tuple[str, str]]:
    """Two columns: the name, and what was found; advice on a line of its own, marked."""
    rows = []
    for check in checks:
        rows.append((check.name, check.found))
        if check.advice:
            rows.append(("", f"{check.state}: {check.advice}"))
    problems = sum(check.state == "problem" for check in checks)
    counted = f"{problems} problem{'' if problems == 1 else 's'}"
    rows.append(("result", counted if problems else "all is well"))
    return rows


def requirements(extra: str) -> list[Requirement]:
    """What an extra needs on this machine beyond what the package itself does."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in metadata.requires("warble-mlx") or ()]
    return [
        needed
        for needed in listed
        if needed.marker
        and needed.marker.evaluate({"extra": extra})
        and not needed.marker.evaluate({"extra": ""})
    ]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"
