"""Audio files in and out."""

from __future__ import annotations

import io
import os
import stat
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from warble_mlx import staging
from warble_mlx.audio import FORMATS, encode, write_audio
from warble_mlx.errors import AudioError

RATE = 44_100
DB_LIMIT = 10 ** (-0.1 / 20)


def tone(seconds: float = 1.0, rate: int = RATE, level: float = 0.5) -> npt.NDArray[np.float32]:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_each_format_holds_every_sample(tmp_path: Path, format: str) -> None:
    samples = tone()
    target = tmp_path / f"speech.{format}"
    write_audio(samples, RATE, target)
    heard, rate = soundfile.read(target, dtype="float32")
    assert soundfile.info(target).format == FORMATS[format].container
    assert rate == RATE
    assert heard.shape == samples.shape
    assert np.abs(heard - samples).max() < (0.02 if FORMATS[format].lossy else 1e-4)


def test_wav_header_has_exact_sizes() -> None:
    samples = tone(0.37)
    data = encode(samples, RATE, "wav")
    with wave.open(io.BytesIO(data)) as file:
        assert file.getnframes() == len(samples)
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert len(file.readframes(len(samples) + 1)) == 2 * len(samples)
    assert int.from_bytes(data[4:8], "little") == len(data) - 8


def test_stream_gets_the_whole_file_without_seeking() -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:  # type: ignore[override]
            taken = bytes(data[:5000])  # no more room
            self.data += taken
            return len(taken)

    pipe = Pipe()
    write_audio(tone(), RATE, pipe)  # type: ignore[arg-type]
    assert pipe.data == encode(tone(), RATE, "wav")


@pytest.mark.parametrize("name", ["speech.aiff", "speech.txt", "speech", "speech.WAVE"])
def test_unknown_suffix_lists_what_is_possible(tmp_path: Path, name: str) -> None:
    with pytest.raises(AudioError, match=r"\.wav, \.flac, \.mp3, \.ogg"):
        write_audio(tone(), RATE, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write_audio(tone(), RATE, tmp_path / "SPEECH.WAV")
    assert soundfile.info(tmp_path / "SPEECH.WAV").frames == RATE


@pytest.mark.parametrize(
    "spoilt", [np.nan, np.inf, -np.inf, 1e25, -8.5], ids=["nan", "inf", "-inf", "1e25", "-8.5"]
)
def test_what_is_no_audio_is_never_written(tmp_path: Path, spoilt: float) -> None:
    samples = tone()
    samples[7] = spoilt
    target = tmp_path / "speech.wav"
    target.write_bytes(b"before")
    with pytest.raises(AudioError, match="audio-not-finite"):
        write_audio(samples, RATE, target)
    with pytest.raises(AudioError, match="audio-not-finite"):
        write_audio(samples, RATE, io.BytesIO())
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]
    assert target.read_bytes() == b"before"


@pytest.mark.parametrize(("samples", "words"), [([], "no samples"), ([[0.1, 0.2]], "one channel")])
def test_wrong_shapes_are_refused(samples: npt.ArrayLike, words: str) -> None:
    with pytest.raises(AudioError, match=words):
        encode(samples, RATE, "wav")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("level", [1.0, 3.0, 7.9])
def test_peaks_are_limited_without_wrapping(format: str, level: float) -> None:
    # A square wave is what a lossy format overshoots most on.
    samples = np.sign(tone()) * level
    heard, _ = soundfile.read(io.BytesIO(encode(samples, RATE, format)), dtype="float32")
    assert 0.5 < np.abs(heard).max() <= DB_LIMIT
    assert np.corrcoef(heard, samples)[0, 1] > 0.95


def test_speech_below_the_limit_is_left_alone() -> None:
    samples = tone(level=0.98)
    heard, _ = soundfile.read(io.BytesIO(encode(samples, RATE, "wav")), dtype="float32")
    assert np.abs(heard - samples).max() < 1e-4


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"no folder .*nowhere"):
        write_audio(tone(), RATE, tmp_path / "nowhere" / "speech.wav")


def test_folder_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "speech.wav").mkdir()
    for folder in (tmp_path / "speech.wav", tmp_path, Path(".")):
        with pytest.raises(AudioError, match="is a folder"):
            write_audio(tone(), RATE, folder)


def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "speech.wav"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.os, "replace", full)
    with pytest.raises(AudioError, match="No space left on device"):
        write_audio(tone(), RATE, target)
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]
    assert target.read_bytes() == b"before"


def test_file_has_ordinary_rights_and_links_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "real.wav"
    real.write_bytes(b"")
    link = tmp_path / "link.wav"
    link.symlink_to(real)
    write_audio(tone(), RATE, link)
    assert link.is_symlink()
    assert soundfile.info(real).frames == RATE
    other = tmp_path / "other.wav"
    write_audio(tone(), RATE, other)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(other.stat().st_mode) == 0o666 & ~mask


def test_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_audio(tone(0.1), RATE, pipe)
        assert os.read(reader, 4) == b"RIFF"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
