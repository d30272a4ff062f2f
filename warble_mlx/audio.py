"""Writing speech to audio files.

Level. Samples are float32 in ±1. Speech that peaks above the limit of its format is scaled down
as a whole before it is written: clipping only the peaks would distort, and wrapping them would
crack. Nothing is ever made louder.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile

from warble_mlx.errors import AudioError
from warble_mlx.staging import staged_file

Samples = npt.NDArray[np.float32]

SPOILT_PEAK = 8.0  # 18 dB above full scale: no recording, no codec output
PEAK_LIMIT = 10 ** (-0.1 / 20) - 2**-15  # -0.1 dBFS, less the last bit of 16

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
    try:
        target.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # a name that no file can have, among others
        reason = getattr(error, "strerror", None) or error
        raise AudioError(f"{str(target)[:100]!r} cannot be written: {reason}") from error
    if target.is_dir():
        raise AudioError(f"{target} is a folder: name a file in it")
    format_of(target)
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
        with staged_file(path) as part:
            part.write_bytes(data)
    except OSError as error:
        raise AudioError(f"{path} cannot be written: {error.strerror or error}") from error
