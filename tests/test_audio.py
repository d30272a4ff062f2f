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

from warble_mlx import audio
from warble_mlx.audio import CLIP_RATE, FORMATS, encode, read_clip, write_audio
from warble_mlx.errors import AudioError, VoiceError

CLIPS = Path(__file__).parent / "cases" / "ref"
FRAME = 2048
RATE = 44_100
DB_LIMIT = 10 ** (-0.1 / 20)


def tone(seconds: float = 1.0, rate: int = RATE, level: float = 0.5) -> npt.NDArray[np.float32]:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def clip_of(path: Path, samples: npt.ArrayLike, rate: int = RATE, subtype: str = "PCM_16") -> Path:
    soundfile.write(path, np.asarray(samples), rate, subtype=subtype)
    return path


# ---------------------------------------------------------------------------------- writing


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
    with pytest.raises(AudioError, match="is a folder"):
        write_audio(tone(), RATE, tmp_path / "speech.wav")


def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "speech.wav"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audio.os, "replace", full)
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


# ---------------------------------------------------------------------------------- reading


def test_clip_at_44100_hz_is_read_as_it_is() -> None:
    samples, info = read_clip(CLIPS / "ref.flac")
    expected, _ = soundfile.read(CLIPS / "ref.flac", dtype="float32")
    assert samples.dtype == np.float32
    assert np.array_equal(samples, expected)
    assert (info.sample_rate, info.channels, info.format) == (RATE, 1, "FLAC PCM_16")
    assert info.seconds == pytest.approx(3.63, abs=0.01)
    assert info.warnings == ()


@pytest.mark.parametrize("name", ["ref.mp3", "ref_16k_mono.wav", "ref_8k_u8.wav"])
def test_other_rates_and_codecs_give_the_same_clip(name: str) -> None:
    baseline, _ = read_clip(CLIPS / "ref.flac")
    samples, info = read_clip(CLIPS / name)
    assert abs(len(samples) - len(baseline)) <= FRAME
    # Where the whole spectrum is not there, the part below 3 kHz still has to agree.
    n = min(len(samples), len(baseline))
    low = round(3000 / (RATE / n))
    a, b = np.fft.rfft(baseline[:n])[:low], np.fft.rfft(samples[:n])[:low]
    assert abs(np.vdot(a, b)) / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.97
    assert bool(info.warnings) is (info.sample_rate < 16_000)


@pytest.mark.parametrize(
    ("rate", "channels", "subtype"),
    [(48_000, 2, "PCM_16"), (24_000, 1, "FLOAT"), (44_100, 1, "PCM_24"), (96_000, 6, "PCM_24")],
)
def test_channels_and_depths(tmp_path: Path, rate: int, channels: int, subtype: str) -> None:
    spoken = tone(1.5, rate)
    path = clip_of(tmp_path / "clip.wav", np.stack([spoken] * channels, 1), rate, subtype)
    samples, info = read_clip(path)
    assert abs(len(samples) - round(1.5 * CLIP_RATE)) <= 1
    middle = slice(5000, 60_000)
    assert np.abs(samples[middle] - tone(1.5)[middle]).max() < 2e-3
    assert info.channels == channels


def test_channels_are_averaged(tmp_path: Path) -> None:
    path = clip_of(tmp_path / "clip.wav", np.stack([tone(), np.zeros(RATE)], 1), RATE, "FLOAT")
    samples, _ = read_clip(path)
    assert np.allclose(samples, tone() / 2, atol=1e-6)


def test_quiet_clip_is_accepted_at_its_level(tmp_path: Path) -> None:
    spoken, _ = soundfile.read(CLIPS / "ref.flac")
    quiet = spoken * (10 ** (-50 / 20) / np.abs(spoken).max())
    samples, info = read_clip(clip_of(tmp_path / "quiet.wav", quiet))
    assert np.abs(samples).max() == pytest.approx(10 ** (-50 / 20), rel=0.02)
    assert info.warnings == ()


def test_clipped_clip_is_doubted(tmp_path: Path) -> None:
    spoken, _ = soundfile.read(CLIPS / "ref.flac")
    _, info = read_clip(clip_of(tmp_path / "hot.wav", np.clip(spoken * 10, -1, 1)))
    assert len(info.warnings) == 1
    assert "reference-clipped" in info.warnings[0]


def test_one_sample_at_full_scale_is_no_clipping(tmp_path: Path) -> None:
    spoken = tone(level=0.9)
    spoken[1000] = 1.0
    assert read_clip(clip_of(tmp_path / "normalised.wav", spoken))[1].warnings == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ref_zero_bytes.wav", "empty, 0 bytes"),
        ("ref_not_audio.wav", "text, not audio"),
        ("ref_voice_memo.m4a", "m4a. Convert it first"),
        ("no_such_clip.wav", "does not exist"),
        ("", "is a folder"),
    ],
)
def test_unreadable_clips_say_what_they_are(name: str, words: str) -> None:
    with pytest.raises(AudioError, match="reference-unreadable") as caught:
        read_clip(CLIPS / name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"<!DOCTYPE html><html>", "a web page"),
        (b'{"error": "not found"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"%PDF-1.7 \x00\xff", "PDF"),
        (b"\x1aE\xdf\xa3\x01\x00\x00", "WebM"),
        (b"RIFF\x00\x00\x00\x00WAVEjunk", "a damaged WAV"),
        ("Grüße".encode(), "text, not audio"),
    ],
)
def test_other_files_are_named(tmp_path: Path, head: bytes, words: str) -> None:
    path = tmp_path / "clip.wav"
    path.write_bytes(head)
    with pytest.raises(AudioError, match=words):
        read_clip(path)


@pytest.mark.parametrize(
    ("platform", "command"),
    [("darwin", "afconvert -f WAVE -d LEI16 'my memo.m4a'"), ("linux", "ffmpeg -i 'my memo.m4a'")],
)
def test_conversion_hint_fits_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, command: str
) -> None:
    (tmp_path / "my memo.m4a").write_bytes((CLIPS / "ref_voice_memo.m4a").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(audio.sys, "platform", platform)
    with pytest.raises(AudioError) as caught:
        read_clip("my memo.m4a")
    assert command in str(caught.value)


def test_unusable_clips_have_distinct_codes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal(3 * RATE) * 3e-5
    spoken = tone(1.0)
    broken = spoken.copy()
    broken[100] = np.nan
    cases = {
        "reference-silent": clip_of(tmp_path / "noise.wav", noise),
        "reference-too-short": CLIPS / "ref_short_0p2s.wav",
        "reference-too-long": clip_of(tmp_path / "long.wav", tone(95.0, 8000), 8000),
        "reference-not-finite": clip_of(tmp_path / "nan.wav", broken, RATE, "FLOAT"),
    }
    for code, path in cases.items():
        with pytest.raises(VoiceError, match=code):
            read_clip(path)


def test_constant_offset_is_silence(tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match="reference-silent"):
        read_clip(clip_of(tmp_path / "offset.wav", np.full(RATE, 0.25)))


def test_unscaled_float_clip_is_refused(tmp_path: Path) -> None:
    path = clip_of(tmp_path / "raw.wav", tone() * 32768, RATE, "FLOAT")
    with pytest.raises(VoiceError, match="times full scale"):
        read_clip(path)


@pytest.mark.parametrize(("seconds", "fits"), [(30.0, True), (30.5, False)])
def test_length_limit_names_the_numbers(tmp_path: Path, seconds: float, fits: bool) -> None:
    path = clip_of(tmp_path / "clip.wav", tone(seconds, 16_000), 16_000)
    if fits:
        assert len(read_clip(path)[0]) == 30 * CLIP_RATE
        return
    with pytest.raises(VoiceError, match=r"lasts 30\.5 s, at most 30 s"):
        read_clip(path)
