"""Samples of an audio file, whatever its container; or what the file is instead.

libsndfile reads wav, flac, mp3, ogg and more. What it does not know (m4a, AAC, WebM, WMA, AMR)
goes through PyAV if the extra `av` is installed. PyAV is given the open file and one container
format that the file's first bytes name, never a file name: so no play list or network address in
it is ever followed.
"""

from __future__ import annotations

import math
import shlex
import stat
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile

from warble_mlx.errors import AudioError, VoiceError

Samples = npt.NDArray[np.float32]
Span = tuple[float, float]  # seconds, [begin, end)

MAX_CLIP_SECONDS = 30.0
RATES = (4_000, 384_000)  # Hz
MAX_CHANNELS = 32

# First bytes of what people take for a clip, at an offset, what that is, and FFmpeg's name of it.
_KNOWN = (
    (4, b"ftyp", "m4a", "mov"),
    (0, b"\x1aE\xdf\xa3", "WebM or Matroska", "matroska"),
    (0, b"\x30\x26\xb2\x75", "WMA", "asf"),
    (0, b"#!AMR", "AMR", "amr"),
    (0, b"\xff\xf1", "AAC", "aac"),
    (0, b"\xff\xf9", "AAC", "aac"),
    (0, b"RIFF", "a damaged WAV", ""),
    (0, b"OggS", "an Ogg whose codec is not known", "ogg"),
    (0, b"ID3", "a damaged MP3", ""),
    (0, b"fLaC", "a damaged FLAC", ""),
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


class FileSamples(NamedTuple):
    """What was read: float32 [n, channels], at most a little more than 30 s of it."""

    wave: Samples
    sample_rate: int  # Hz
    format: str
    seconds: float  # of the file, or of the part asked for; as far as is known


def read_file(path: Path, span: Span | None = None) -> FileSamples:
    """Read the first 30 s of a file, or of its part `span`, and a little more if there is more.

    Raises AudioError for what is no audio (reference-unreadable), VoiceError for a part that the
    file does not have.
    """
    begin, end = _checked_span(span)
    _check_is_file(path)
    declared = math.inf  # seconds of the file; a header may promise more than there is
    try:
        with soundfile.SoundFile(path) as file:
            rate, channels = file.samplerate, file.channels
            _check_shape(path, rate, channels)
            _skip(file, round(begin * rate))
            # A frame more than allowed shows that it is too long, whatever the header says.
            allowed = math.floor(min(end - begin, MAX_CLIP_SECONDS) * rate)
            more = 0 if end - begin <= MAX_CLIP_SECONDS else 1
            wave = file.read(allowed + more, dtype="float32", always_2d=True)
            kind, declared = f"{file.format} {file.subtype}", file.frames / rate
    except (soundfile.SoundFileError, OSError) as error:
        found = _foreign(path, error, begin, end)
    else:
        length = max(min(declared, end) - begin, len(wave) / rate)
        found = FileSamples(wave, rate, kind, length)
    if span is not None and len(found.wave) < (min(end - begin, MAX_CLIP_SECONDS) - 0.1) * (
        found.sample_rate
    ):
        last = begin + len(found.wave) / found.sample_rate if len(found.wave) else declared
        where = f"it ends at {last:.1f} s" if last < end else "it ends before that"
        raise VoiceError(f"the clip {path} has no part from {begin:g} s to {end:g} s: {where}")
    return found


def _check_is_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            what = "does not exist"
        else:
            what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise AudioError(f"the clip {str(path)[:100]} {what} (reference-unreadable)") from error
    if stat.S_ISDIR(mode):
        raise AudioError(f"the clip {path} is a folder (reference-unreadable)")
    if not stat.S_ISREG(mode):
        raise AudioError(
            f"the clip {path} is a pipe or a device: save it to a file first (reference-unreadable)"
        )
    if path.suffix.lower() == ".raw":
        raise AudioError(
            f"the clip {path} is bare PCM, whose rate nobody can tell; convert it first, for"
            f" example: ffmpeg -f s16le -ar 44100 -ac 1 -i {shlex.quote(str(path))}"
            f" {shlex.quote(str(path.with_suffix('.wav')))} (reference-unreadable)"
        )


def _checked_span(span: Span | None) -> Span:
    if span is None:
        return 0.0, math.inf
    begin, end = span
    if not (math.isfinite(begin) and math.isfinite(end) and 0 <= begin < end):
        raise VoiceError(f"a part of a clip runs from 0 s or later to a later end, not {span}")
    return begin, end


def _check_shape(path: Path, rate: int, channels: int) -> None:
    low, high = RATES
    if not low <= rate <= high or not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(
            f"the clip {path} cannot be read: it claims {channels} channels at {rate} Hz, possible"
            f" are 1 to {MAX_CHANNELS} at {low} to {high} Hz (reference-unreadable)"
        )


def _skip(file: soundfile.SoundFile, frames: int) -> None:
    """Read past `frames`: exact in every format, unlike seeking in a lossy one."""
    while frames > 0:
        read = len(file.read(min(frames, file.samplerate), dtype="float32", always_2d=True))
        if not read:
            return
        frames -= read


def _foreign(path: Path, error: Exception, begin: float, end: float) -> FileSamples:
    """Read what libsndfile does not, through PyAV; AudioError that says what the file is."""
    start = f"the clip {path} cannot be read: "
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as failure:
        raise AudioError(
            f"{start}{failure.strerror or failure} (reference-unreadable)"
        ) from failure
    if not head:
        raise AudioError(f"{start}it is empty, 0 bytes (reference-unreadable)") from error
    for offset, mark, name, container in _KNOWN:
        if head[offset : offset + len(mark)] != mark:
            continue
        if container:
            found = _through_av(path, name, container, begin, end)
            if found is not None:
                return found
            advice = (
                f'install the reader of such files: pip install "warble-mlx[av]", or convert it:'
                f" {_conversion(path)}"
            )
        else:
            advice = f"convert it first: {_conversion(path)}"
        raise AudioError(f"{start}it is {name}; {advice} (reference-unreadable)") from error
    raise AudioError(f"{start}{_what(head, error)} (reference-unreadable)") from error


def _through_av(
    path: Path, name: str, container: str, begin: float, end: float
) -> FileSamples | None:
    """The samples by PyAV, or None if it is not installed."""
    try:
        import av
    except ImportError:
        return None
    from av.error import FFmpegError

    pieces: list[Samples] = []
    try:
        with path.open("rb") as file, av.open(file, "r", format=container) as opened:
            if not opened.streams.audio:
                raise AudioError(
                    f"the clip {path} cannot be read: it is {name} without an audio track"
                    " (reference-unreadable)"
                )
            stream: Any = opened.streams.audio[0]
            rate, channels = int(stream.rate), int(stream.channels)
            _check_shape(path, rate, channels)
            converter = av.AudioResampler(format="fltp")
            first = round(begin * rate)
            wanted = math.floor(min(end - begin, MAX_CLIP_SECONDS) * rate)
            last = first + wanted + (0 if end - begin <= MAX_CLIP_SECONDS else 1)
            have = 0
            for packet in opened.decode(stream):
                for frame in converter.resample(packet):
                    piece = np.asarray(frame.to_ndarray(), np.float32).T
                    pieces.append(piece[max(first - have, 0) : max(last - have, 0)])
                    have += len(piece)
                if have >= last:
                    break
            whole = float(stream.duration * stream.time_base) if stream.duration else 0.0
    except (FFmpegError, OSError, ValueError, EOFError) as error:
        raise AudioError(
            f"the clip {path} cannot be read: it is {name}, but damaged or in a codec that is not"
            f" known ({error}); convert it: {_conversion(path)} (reference-unreadable)"
        ) from error
    wave = np.concatenate(pieces) if pieces else np.zeros((0, channels), np.float32)
    length = max(min(whole, end) - begin, len(wave) / rate)
    return FileSamples(wave, rate, f"{name} {stream.codec_context.name}", length)


def _what(head: bytes, error: Exception) -> str:
    """What a file that begins with `head` is."""
    for mark, name in _NO_AUDIO:
        if head.lstrip().lower().startswith(mark.lower()):
            return f"it is {name}"
    printable = sum(byte in b"\t\n\r\f" or 32 <= byte != 127 for byte in head)
    if printable == len(head):
        return "it is text, not audio"
    said = str(error).rpartition(": ")[2]
    # What libsndfile says of a head that it mistakes for that of another kind of file.
    return "its format is not known" if "regular file" in said else said


def _conversion(path: Path) -> str:
    """A command that turns `path` into a WAV; every Mac has afconvert."""
    source = shlex.quote(str(path))
    target = shlex.quote(str(path.with_suffix(".wav")))
    if sys.platform == "darwin":
        return f"afconvert -f WAVE -d LEI16 {source} {target}"
    return f"ffmpeg -i {source} {target}"
