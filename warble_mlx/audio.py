"""Audio files in and out: reading a reference clip, writing speech.

Level. Samples are float32 in ±1. Speech that peaks above the limit of its format is scaled down
as a whole before it is written: clipping only the peaks would distort, and wrapping them would
crack. Nothing is ever made louder, neither here nor when a clip is read: a quiet clip is passed on
as it is, and whoever uses it decides on its gain.
"""

from __future__ import annotations

import io
import math
import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from warble_mlx.errors import AudioError, VoiceError

Samples = npt.NDArray[np.float32]

CLIP_RATE = 44_100  # Hz, what the codec hears
MIN_CLIP_SECONDS = 0.3
MAX_CLIP_SECONDS = 30.0
SILENCE_PEAK = 10 ** (-70 / 20)  # 8-bit and 16-bit noise lies below, whispers lie above
FULL_SCALE = 0.999
SPOILT_PEAK = 8.0  # 18 dB above full scale: no recording, no codec output
PEAK_LIMIT = 10 ** (-0.1 / 20) - 2**-15  # -0.1 dBFS, less the last bit of 16
LOW_BANDWIDTH_RATE = 16_000  # Hz; below it, telephone sound

_ENCODER_ROUNDS = 4  # of lowering the level until a lossy format's own overshoot fits, too


class Format(NamedTuple):
    """A file format as the audio library names it."""

    container: str
    subtype: str
    lossy: bool


FORMATS = {
    "wav": Format("WAV", "PCM_16", lossy=False),
    "flac": Format("FLAC", "PCM_16", lossy=False),
    "mp3": Format("MP3", "MPEG_LAYER_III", lossy=True),
    "ogg": Format("OGG", "VORBIS", lossy=True),
}


def format_of(target: Path, wanted: str | None = None) -> str:
    """The key of FORMATS to write `target` in: `wanted`, or what its suffix says.

    A device or pipe (/dev/stdout) needs no suffix: wav. Raises AudioError with the list of what
    is possible.
    """
    name = target.suffix.lstrip(".") if wanted is None else wanted
    if not name and target.exists() and not target.is_file() and not target.is_dir():
        return "wav"
    key = name.lower()
    if key in FORMATS:
        return key
    possible = ", ".join(f".{key}" for key in FORMATS)
    given = f"{target.name} has no suffix" if not name else f'the format "{name}" is not known'
    raise AudioError(f"{given}: audio can be written as {possible}")


def check_target(target: Path) -> None:
    """Raise AudioError if `target` cannot become an audio file, before any work is done for it."""
    format_of(target)
    if target.is_dir():
        raise AudioError(f"{target} is a folder: name a file in it")
    folder = target.parent
    if not folder.is_dir():
        raise AudioError(f"there is no folder {folder}: make it first, with mkdir -p {folder}")
    if not os.access(folder if not target.exists() else target, os.W_OK):
        raise AudioError(f"{target} cannot be written: permission denied")


def write_audio(
    samples: npt.ArrayLike,
    sample_rate: int,
    target: str | Path | BinaryIO,
    format: str | None = None,
) -> None:
    """Write mono float samples [n] in ±1 at `sample_rate` Hz.

    A path's format is that of its suffix unless `format` (a key of FORMATS) is given; the file
    appears under its name only when it is complete. A binary stream gets the whole file at once,
    sizes in its header included (wav unless `format` says otherwise), and need not be seekable.

    Raises AudioError for samples that are no audio ("audio-not-finite"), an unknown format, or a
    file that cannot be written; then nothing is.
    """
    if isinstance(target, (str, Path)):
        path = Path(target)
        check_target(path)
        data = encode(samples, sample_rate, format_of(path, format))
        _write_file(path, data)
    else:
        left = memoryview(encode(samples, sample_rate, format_of(Path("-"), format or "wav")))
        while left:  # an unbuffered stream takes what it has room for
            left = left[target.write(left) :]
        target.flush()


def encode(samples: npt.ArrayLike, sample_rate: int, format: str) -> bytes:
    """A whole file of samples [n] in `format`, a key of FORMATS, peaking at -0.1 dBFS at most.

    A lossy format may decode to higher peaks than went in, so it is decoded again and, if it
    does, encoded from a lower level.
    """
    kind = FORMATS[format]
    wave = limit_peak(checked(samples))
    for _ in range(_ENCODER_ROUNDS):
        buffer = io.BytesIO()
        try:
            soundfile.write(buffer, wave, sample_rate, format=kind.container, subtype=kind.subtype)
        except soundfile.SoundFileError as error:
            raise AudioError(f"no {format} of {sample_rate} Hz can be written: {error}") from error
        if not kind.lossy:
            break
        buffer.seek(0)
        heard, _ = soundfile.read(buffer, dtype="float32")
        over = float(np.abs(heard).max(initial=0.0)) / PEAK_LIMIT
        if over <= 1:
            break
        wave = wave / np.float32(over * 1.01)
    return buffer.getvalue()


def checked(samples: npt.ArrayLike) -> Samples:
    """`samples` as float32 [n], or AudioError if they cannot be speech: several channels, none at
    all, not finite, or far beyond full scale."""
    wave = np.asarray(samples, dtype=np.float32)
    if wave.ndim != 1:
        raise AudioError(f"audio must be one channel, [n]; this has the shape {wave.shape}")
    if not wave.size:
        raise AudioError("there is no audio to write: it has no samples")
    bad = wave.size - int(np.count_nonzero(np.isfinite(wave)))
    if bad:
        raise AudioError(
            f"{bad} of {wave.size} samples are not finite numbers, so nothing was written: the"
            " model's weights or this MLX build are broken; run `warble doctor` (audio-not-finite)"
        )
    peak = float(np.abs(wave).max())
    if peak > SPOILT_PEAK:
        raise AudioError(
            f"the samples reach {peak:.3g} times full scale, so nothing was written: the model's"
            " weights or this MLX build are broken; run `warble doctor` (audio-not-finite)"
        )
    return wave


def limit_peak(wave: Samples) -> Samples:
    """`wave` [n], scaled down as a whole if it peaks above -0.1 dBFS."""
    peak = float(np.abs(wave).max(initial=0.0))
    return wave if peak <= PEAK_LIMIT else wave * np.float32(PEAK_LIMIT / peak)


def _write_file(path: Path, data: bytes) -> None:
    path = Path(os.path.realpath(path))  # through a link, not over it
    try:
        if path.exists() and not path.is_file():  # a device or a pipe cannot be renamed over
            path.write_bytes(data)
            return
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise AudioError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class ClipInfo:
    """What a clip was before it became mono at 44.1 kHz, and what may spoil a voice made of it."""

    path: Path
    seconds: float
    sample_rate: int  # Hz, of the file
    channels: int
    format: str  # such as "WAV PCM_16"
    peak: float  # of the mono signal, 1 = full scale
    warnings: tuple[str, ...] = ()


def read_clip(path: str | Path) -> tuple[Samples, ClipInfo]:
    """Read a reference clip of any rate, channels and depth: float32 mono [n] at 44,100 Hz.

    Channels are averaged before the rate is changed; the level is left alone. Raises AudioError
    for a file that cannot be read (reference-unreadable) and VoiceError for one that makes no
    voice (reference-silent, -too-short, -too-long, -not-finite).
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise AudioError(f"the clip {path} {what} (reference-unreadable)")
    try:
        with soundfile.SoundFile(path) as file:
            rate, kind = file.samplerate, f"{file.format} {file.subtype}"
            channels, declared = file.channels, file.frames
            # One frame more than allowed shows that it is too long, whatever the header says.
            wave = file.read(
                math.floor(MAX_CLIP_SECONDS * rate) + 1, dtype="float32", always_2d=True
            )
    except (soundfile.SoundFileError, OSError) as error:
        raise AudioError(_unreadable(path, error)) from error
    mono = wave.mean(axis=1, dtype=np.float64).astype(np.float32)
    seconds = len(mono) / rate
    if seconds > MAX_CLIP_SECONDS:
        _refuse_long(path, max(declared, len(mono)) / rate)
    if not np.isfinite(mono).all():
        raise VoiceError(
            f"the clip {path} holds samples that are not numbers: export it again, as 16-bit WAV"
            " (reference-not-finite)"
        )
    if seconds < MIN_CLIP_SECONDS:
        raise VoiceError(
            f"the clip {path} lasts {seconds:.2f} s, a voice needs at least {MIN_CLIP_SECONDS} s"
            " and 3 to 15 s are best (reference-too-short)"
        )
    peak = float(np.abs(mono).max())
    if peak > SPOILT_PEAK:
        raise VoiceError(
            f"the clip {path} peaks at {peak:.3g} times full scale: export it again, as 16-bit WAV"
            " (reference-not-finite)"
        )
    if float(np.abs(mono - mono.mean()).max()) < SILENCE_PEAK:
        raise VoiceError(
            f"the clip {path} is silent (its peak is {_decibel(peak)}): record it again"
            " (reference-silent)"
        )
    info = ClipInfo(path, seconds, rate, channels, kind, peak, tuple(_doubts(path, mono, rate)))
    if rate != CLIP_RATE:
        mono = soxr.resample(mono, rate, CLIP_RATE, quality="VHQ").astype(np.float32)
    return mono, info


def _refuse_long(path: Path, seconds: float) -> None:
    raise VoiceError(
        f"the clip {path} lasts {seconds:.1f} s, at most {MAX_CLIP_SECONDS:.0f} s are possible and"
        " 3 to 15 s are best: cut the clip, and its transcript to the same words, for example with"
        f" ffmpeg -t 12 -i {shlex.quote(str(path))} short.wav (reference-too-long)"
    )


def _decibel(peak: float) -> str:
    return f"{20 * math.log10(peak):.0f} dBFS" if peak else "exactly zero"


def _doubts(path: Path, mono: Samples, rate: int) -> list[str]:
    """Sentences on what will be heard in a voice made of this clip."""
    doubts = []
    if rate < LOW_BANDWIDTH_RATE:
        doubts.append(
            f"the clip {path} has {rate} Hz, so its voice will sound like a telephone's; 24 kHz or"
            " more are better (low-bandwidth)"
        )
    # Two neighbours at full scale are a flattened peak; one may be a normalised recording's.
    loud = np.abs(mono) >= FULL_SCALE
    flat = int(np.count_nonzero(loud[1:] & loud[:-1]))
    if flat:
        doubts.append(
            f"the clip {path} is clipped ({flat / len(mono):.1%} of it): record it at a lower level"
            " (reference-clipped)"
        )
    return doubts


# First bytes of what people take for a clip, at an offset, and what that is.
_KNOWN = (
    (4, b"ftyp", "m4a"),
    (0, b"\x1aE\xdf\xa3", "WebM or Matroska"),
    (0, b"\x30\x26\xb2\x75", "WMA"),
    (0, b"#!AMR", "AMR"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
    (0, b"RIFF", "a damaged WAV"),
    (0, b"OggS", "an Ogg whose codec is not known"),
    (0, b"ID3", "a damaged MP3"),
    (0, b"fLaC", "a damaged FLAC"),
)
_NO_AUDIO = (
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with git lfs pull"),
    (b"<", "a web page or XML, not audio"),
    (b"{", "JSON, not audio"),
    (b"%PDF", "a PDF, not audio"),
    (b"PK\x03\x04", "a ZIP archive, not audio"),
    (b"\x89PNG", "an image, not audio"),
    (b"\xff\xd8\xff", "an image, not audio"),
)


def _unreadable(path: Path, error: Exception) -> str:
    """What a file is that the audio library does not read, and how to make it readable."""
    start = f"the clip {path} cannot be read: "
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as failure:
        return f"{start}{failure.strerror or failure} (reference-unreadable)"
    if not head:
        return f"{start}it is empty, 0 bytes (reference-unreadable)"
    for offset, mark, name in _KNOWN:
        if head[offset : offset + len(mark)] == mark:
            return (
                f"{start}it is {name}. Convert it first: {_conversion(path)} (reference-unreadable)"
            )
    for mark, name in _NO_AUDIO:
        if head.lstrip().lower().startswith(mark.lower()):
            return f"{start}it is {name} (reference-unreadable)"
    if _is_text(head):
        return f"{start}it is text, not audio (reference-unreadable)"
    return f"{start}{str(error).rpartition(': ')[2]} (reference-unreadable)"


def _is_text(head: bytes) -> bool:
    printable = sum(byte in b"\t\n\r\f" or 32 <= byte != 127 for byte in head)
    return printable == len(head)


def _conversion(path: Path) -> str:
    """A command that turns `path` into a WAV; every Mac has afconvert."""
    source = shlex.quote(str(path))
    target = shlex.quote(str(path.with_suffix(".wav")))
    if sys.platform == "darwin":
        return f"afconvert -f WAVE -d LEI16 {source} {target}"
    return f"ffmpeg -i {source} {target}"
