"""Samples to the bytes of one audio stream, piece by piece.

A stream begins before its length is known and cannot be gone back into, so headers say "unknown":
WAV carries the largest size, FLAC no length, MP3 and Ogg need none. The level is kept as in
`warble_mlx.live`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from warble_mlx.errors import AudioError, MissingExtraError
from warble_mlx.live import Level, Pcm

Samples = npt.NDArray[np.float32]

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
DEFAULT_FORMAT = "mp3"
PCM_RATE = 24_000  # Hz, what clients of OpenAI's interface take raw samples for
OPUS_RATE = 48_000
RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_OGG_PAGE_MS = 100.0  # libsndfile fills a page for a second by default
_SET_OGG_PAGE_LATENCY_MS = 0x1302


class Encoder(Protocol):
    """One stream. `rate`: samples per second of what comes out. `media_type`: what it is."""

    rate: int
    media_type: str

    def encode(self, samples: Samples) -> bytes:
        """Bytes that are ready after these samples [n]; may be none."""

    def finish(self) -> bytes:
        """The last bytes."""


def encoder_for(kind: str, model_rate: int, rate: int | None = None) -> Encoder:
    """An encoder of samples at `model_rate` Hz into a format of FORMATS.

    rate: samples per second wanted, for wav, flac and pcm. Raises AudioError for what the format
    cannot hold, MissingExtraError for aac without PyAV.
    """
    if kind not in FORMATS:
        raise AudioError(f"the format {kind!r} is not known; possible are {', '.join(FORMATS)}")
    if rate is not None:
        if kind not in ("wav", "flac", "pcm"):
            raise AudioError(
                f"sample_rate can be chosen for wav, flac and pcm only, not for {kind}"
            )
        if rate not in RATES:
            raise AudioError(f"sample_rate must be one of {', '.join(map(str, RATES))}, not {rate}")
    if kind == "pcm":
        return _Resampled(_Raw(rate or PCM_RATE), model_rate)
    if kind == "wav":
        return _Resampled(_Wav(rate or model_rate), model_rate)
    if kind == "aac":
        return _Aac(model_rate)
    return _Resampled(
        {
            "flac": lambda: _Library("FLAC", "PCM_16", rate or model_rate, "audio/flac"),
            # At a constant rate (128 kbit/s): without an index in its first frame, that is what a
            # player tells the length and the place in it from.
            "mp3": lambda: _Library(
                "MP3",
                "MPEG_LAYER_III",
                model_rate,
                "audio/mpeg",
                bitrate_mode="CONSTANT",
                compression_level=2 / 3,
            ),
            "opus": lambda: _Library("OGG", "OPUS", OPUS_RATE, "audio/ogg"),
        }[kind](),
        model_rate,
    )


def can_encode(kind: str) -> bool:
    """Whether the format is known and what it needs is installed."""
    return kind in FORMATS and (kind != "aac" or importlib.util.find_spec("av") is not None)


class _Resampled:
    """An encoder behind a resampler, if their rates differ."""

    def __init__(self, encoder: Encoder, source_rate: int) -> None:
        self._encoder = encoder
        self.rate, self.media_type = encoder.rate, encoder.media_type
        self._resampler: Any = None
        if encoder.rate != source_rate:
            self._resampler = soxr.ResampleStream(source_rate, encoder.rate, 1, dtype="float32")

    def encode(self, samples: Samples) -> bytes:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return self._encoder.encode(samples)

    def finish(self) -> bytes:
        rest = b""
        if self._resampler is not None:
            left = self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
            rest = self._encoder.encode(left)
        return rest + self._encoder.finish()


class _Raw:
    """Signed 16-bit little-endian samples and nothing else."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.media_type = f"audio/pcm; rate={rate}; channels=1"
        self._pcm = Pcm(rate)

    def encode(self, samples: Samples) -> bytes:
        return self._pcm.encode(samples) if samples.size else b""

    def finish(self) -> bytes:
        return b""


class _Wav(_Raw):
    """The same behind the header of a WAV of unknown length."""

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        self.media_type = "audio/wav"
        self._header = self._pcm.endless_header()

    def encode(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + super().encode(samples)

    def finish(self) -> bytes:
        return self._header


class _Sink:
    """A file for libsndfile whose new bytes can be taken away. What it goes back to write, sizes
    into a header that has left, is dropped."""

    def __init__(self) -> None:
        self._new = bytearray()
        self._at = self._end = 0

    def write(self, data: Any) -> int:
        raw = bytes(data)
        if self._at == self._end:
            self._new += raw
            self._end += len(raw)
        self._at += len(raw)
        return len(raw)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._end)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        raw = bytes(self._new)
        self._new.clear()
        return raw


class _Library:
    """A format that libsndfile writes."""

    def __init__(
        self, container: str, subtype: str, rate: int, media_type: str, **options: Any
    ) -> None:
        self.rate, self.media_type = rate, media_type
        self._level = Level(rate)
        self._sink = _Sink()
        self._file = soundfile.SoundFile(
            self._sink, "w", rate, 1, subtype, format=container, **options
        )
        if container == "OGG":
            # The module has no name for it, and without it the first sound comes a second late.
            value = soundfile._ffi.new("double *", _OGG_PAGE_MS)
            soundfile._snd.sf_command(
                self._file._file, _SET_OGG_PAGE_LATENCY_MS, value, soundfile._ffi.sizeof("double")
            )

    def encode(self, samples: Samples) -> bytes:
        if samples.size:
            self._file.write(self._level(samples))
        return self._sink.take()

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take()


class _Aac:
    """AAC in ADTS frames, by PyAV."""

    media_type = "audio/aac"

    def __init__(self, rate: int) -> None:
        try:
            self._av: Any = importlib.import_module("av")
        except ModuleNotFoundError as error:
            raise MissingExtraError("AAC", "PyAV", "av") from error
        self.rate = rate
        self._level = Level(rate)
        self._sink = _Sink()
        self._container = self._av.open(self._sink, "w", format="adts")
        self._stream = self._container.add_stream("aac", rate=rate, layout="mono")
        self._stream.bit_rate = 128_000
        self._at = 0

    def encode(self, samples: Samples) -> bytes:
        if samples.size:
            frame = self._av.AudioFrame.from_ndarray(
                np.ascontiguousarray(self._level(samples)[None]), format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = self.rate, self._at
            self._at += samples.size
            self._put(frame)
        return self._sink.take()

    def finish(self) -> bytes:
        self._put(None)
        self._container.close()
        return self._sink.take()

    def _put(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)
