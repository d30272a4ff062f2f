"""Speech that leaves while it is made: samples as 16-bit PCM, bare or as a WAV of unknown length.

Level. A whole speech that peaks above the limit is scaled as a whole (`audio.limit_peak`). Here
the peaks to come are unknown, so the level goes down before the first sample above the limit and
stays there. Speech below the limit, which is the rule, passes unchanged.
"""

from __future__ import annotations

import io
import struct

import numpy as np
import soundfile

from warble_mlx.audio import PEAK_LIMIT, Samples, checked

UNKNOWN = 0xFFFFFFFF  # bytes; what players take for "until the end of the stream"
_RAMP_S = 0.005
_WIDTH = 2  # bytes of a sample


class Level:
    """Keeps a stream of samples at -0.1 dBFS at most."""

    def __init__(self, sample_rate: int) -> None:
        self._gain = 1.0
        self._ramp = round(_RAMP_S * sample_rate)

    def __call__(self, samples: Samples) -> Samples:
        """The following samples [n]; AudioError if they are no audio ("audio-not-finite")."""
        wave = checked(samples)
        peak = float(np.abs(wave).max())
        before = self._gain
        if peak * before > PEAK_LIMIT:
            self._gain = PEAK_LIMIT / peak
            above = int(np.argmax(np.abs(wave) * before > PEAK_LIMIT))
            ramp = min(above, self._ramp)
            gains = np.full(wave.size, self._gain, np.float32)
            gains[: above - ramp] = before
            gains[above - ramp : above] = np.linspace(before, self._gain, ramp, endpoint=False)
            return np.asarray(wave * gains)
        return wave if before == 1 else np.asarray(wave * np.float32(before))


class Pcm:
    """Turns samples into the bytes of one continuous stream, 16-bit little-endian mono."""

    def __init__(self, sample_rate: int) -> None:
        self.samples = 0  # so far
        self._rate = sample_rate
        self._level = Level(sample_rate)

    def endless_header(self) -> bytes:
        """The 44 bytes that make a WAV of what follows, however long that will be."""
        return self._header(UNKNOWN, UNKNOWN)

    def header(self) -> bytes:
        """The same for the samples so far; as before if they are too many for a WAV."""
        size = self.samples * _WIDTH
        return self._header(size + 36, size) if size + 36 < UNKNOWN else self.endless_header()

    def _header(self, whole: int, data: int) -> bytes:
        rate = self._rate
        return struct.pack(
            "<4sI4s4sIHHIIHH4sI",
            b"RIFF", whole, b"WAVE", b"fmt ", 16, 1, 1, rate, rate * _WIDTH, _WIDTH, 8 * _WIDTH,
            b"data", data,
        )  # fmt: skip

    def encode(self, samples: Samples) -> bytes:
        """The bytes of the following samples [n]."""
        buffer = io.BytesIO()
        soundfile.write(
            buffer,
            self._level(samples),
            self._rate,
            format="RAW",
            subtype="PCM_16",
            endian="LITTLE",
        )
        self.samples += samples.size
        return buffer.getvalue()
