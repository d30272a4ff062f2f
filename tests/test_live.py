"""Speech as a stream of bytes while it is made."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile

from warble_mlx.audio import PEAK_LIMIT, encode
from warble_mlx.errors import AudioError
from warble_mlx.live import UNKNOWN, Level, Pcm

RATE = 44_100


def wave(peak: float, size: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.uniform(-1, 1, size) * peak).astype(np.float32)


def test_the_bytes_are_those_of_a_file_written_at_once() -> None:
    samples = wave(0.7)
    whole = encode(samples, RATE, "wav")
    pcm = Pcm(RATE)
    data = b"".join(pcm.encode(part) for part in np.split(samples, [1, 700, 9000]))
    assert pcm.header() + data == whole
    assert pcm.samples == samples.size


def test_an_endless_header_is_read_to_the_end_of_the_stream() -> None:
    pcm, samples = Pcm(RATE), wave(0.5)
    stream = pcm.endless_header() + pcm.encode(samples)
    assert struct.unpack_from("<I", stream, 4) == struct.unpack_from("<I", stream, 40) == (UNKNOWN,)
    read, rate = soundfile.read(io.BytesIO(stream), dtype="int16")
    assert rate == RATE
    assert read.tobytes() == stream[44:]


def test_a_length_that_a_wav_cannot_tell_stays_unknown() -> None:
    pcm = Pcm(RATE)
    pcm.samples = 2**31
    assert pcm.header() == pcm.endless_header()
    pcm.samples = 2**30
    assert struct.unpack_from("<I", pcm.header(), 40) == (2**31,)


@pytest.mark.parametrize("at", [0, 3, 5000])
def test_the_level_goes_down_before_a_peak_and_stays(at: int) -> None:
    level = Level(RATE)
    quiet, loud = wave(0.5), wave(0.5)
    loud[at] = 2.0
    assert np.array_equal(level(quiet), quiet)
    after = level(loud)
    assert np.abs(after).max() <= PEAK_LIMIT * 1.000001
    assert np.allclose(after[at:], loud[at:] * PEAK_LIMIT / 2)
    # Down to there in a ramp, without a step.
    gains = after[:at] / loud[:at]
    assert (np.diff(gains) <= 1e-6).all()
    assert at < 300 or np.abs(np.diff(gains)).max() < 0.01
    assert np.allclose(level(quiet), quiet * PEAK_LIMIT / 2)


def test_samples_that_are_no_audio_are_refused() -> None:
    with pytest.raises(AudioError, match="audio-not-finite"):
        Pcm(RATE).encode(np.full(5, np.nan, np.float32))
