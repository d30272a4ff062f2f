"""Reference clips for tests: made ones, and those of tests/cases/ref."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from warble_mlx.clips import ClipInfo, read_clip
from warble_mlx.errors import WarbleError

CLIPS = Path(__file__).parent / "cases" / "ref"
SAID = "The old lighthouse keeper counted every passing ship before the fog."
RATE = 44_100


def tone(seconds: float = 1.0, rate: int = RATE, level: float = 0.5) -> npt.NDArray[np.float32]:
    """Samples [n] of a pure 440 Hz."""
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def clip_of(path: Path, samples: npt.ArrayLike, rate: int = RATE, subtype: str = "PCM_16") -> Path:
    """Write samples as they are."""
    soundfile.write(path, np.asarray(samples), rate, subtype=subtype)
    return path


def outcome(path: Path) -> bool:
    """Whether a damaged clip is refused in our own words, or what is left of it is sound."""
    try:
        samples, _ = read_clip(path)
    except WarbleError as error:
        return "(reference-" in str(error)
    return bool(np.isfinite(samples).all() and len(samples) < 31 * RATE)


def codes_of(info: ClipInfo) -> list[str]:
    """The short names at the ends of the warnings."""
    return [re.findall(r"\(([a-z-]+)\)$", warning)[0] for warning in info.warnings]
