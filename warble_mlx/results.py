"""What was said: samples, codes, and how it came about."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from warble_mlx.audio import write_audio
from warble_mlx.engine import FinishReason
from warble_mlx.errors import WarbleError
from warble_mlx.reading import Piece


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds since the call, and the parts that generation and codec took."""

    first_audio_s: float
    generate_s: float
    codec_s: float
    total_s: float


@dataclass(frozen=True)
class Speech:
    """What was said: an utterance, or a long text in several pieces with silence between them."""

    # [n], mono, within -1 … 1; empty if they were only streamed
    samples: npt.NDArray[np.float32] = field(repr=False)
    sample_rate: int
    codes: npt.NDArray[np.int32] = field(repr=False)  # [10, frames] of all pieces
    finish_reason: FinishReason  # "stop": the model ended it; "length": a budget cut some of it
    seed: int
    text: str  # as given to the model, after cleaning
    voice: str | None
    model: str
    timings: Timings
    warnings: tuple[str, ...] = ()  # sentences on what may not have been spoken well
    # Attempts that were no speech and were dropped. `seed` is the last one's, but for a text of
    # several pieces it is the one that all of them follow from: `pieces` have their own.
    retries: int = 0
    pieces: tuple[Piece, ...] = field(default=(), repr=False)
    streamed: int | None = None  # number of samples, if they were not kept

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        length = len(self.samples) if self.streamed is None else self.streamed
        return length / self.sample_rate

    @property
    def rtf(self) -> float:
        """Real-time factor: time taken over time spoken; below 1 is faster than real time."""
        return self.timings.total_s / self.seconds if self.seconds else math.inf

    def save(self, path: str | Path) -> Path:
        """Write the audio; the suffix gives the format (wav, flac, mp3, ogg).

        Raises WarbleError if it was streamed without keeping the samples.
        """
        if self.streamed is not None:
            raise WarbleError(
                "this speech was streamed and its samples were not kept: use say(), or"
                " stream(..., keep_samples=True)"
            )
        path = Path(path)
        write_audio(self.samples, self.sample_rate, path)
        return path
