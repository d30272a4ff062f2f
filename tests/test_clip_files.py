"""Files of reference clips: how they are read, repaired with a warning, or refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from clip_data import CLIPS, RATE, clip_of, codes_of, outcome, tone

from warble_mlx import clip_files
from warble_mlx.clips import (
    CLIP_RATE,
    read_clip,
)
from warble_mlx.errors import AudioError, VoiceError

FRAME = 2048
DB_LIMIT = 10 ** (-0.1 / 20)


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
    [
        (48_000, 2, "PCM_16"), (24_000, 1, "FLOAT"), (44_100, 1, "PCM_24"), (96_000, 6, "PCM_24"),
        (22_050, 1, "PCM_32"), (32_000, 3, "DOUBLE"), (192_000, 1, "PCM_16"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(("decibel", "raised"), [(-34.5, False), (-36, True), (-50, True)])
def test_quiet_clip_is_made_louder_and_the_user_told(
    tmp_path: Path, decibel: float, raised: bool
) -> None:
    spoken, _ = soundfile.read(CLIPS / "ref.flac")
    level = 10 ** (decibel / 20)
    quiet = spoken / np.abs(spoken).max() * level
    samples, info = read_clip(clip_of(tmp_path / "quiet.wav", quiet, subtype="PCM_24"))
    assert info.peak == pytest.approx(level, rel=0.02)
    assert np.abs(samples).max() == pytest.approx(10 ** (-3 / 20) if raised else level, rel=0.02)
    assert np.corrcoef(samples, spoken)[0, 1] > 0.999
    assert codes_of(info) == (["reference-quiet"] if raised else [])


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
def test_without_its_reader_an_m4a_names_two_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, command: str
) -> None:
    (tmp_path / "my memo.m4a").write_bytes((CLIPS / "ref_voice_memo.m4a").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clip_files.sys, "platform", platform)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(AudioError, match=r"it is m4a; .*reference-unreadable") as caught:
        read_clip("my memo.m4a")
    assert 'pip install "warble-mlx[av]"' in str(caught.value)
    assert command in str(caught.value)


def test_m4a_is_the_same_clip() -> None:
    pytest.importorskip("av")
    baseline, _ = read_clip(CLIPS / "ref.flac")
    samples, info = read_clip(CLIPS / "ref_voice_memo.m4a")
    assert info.format == "m4a aac"
    assert abs(len(samples) - len(baseline)) <= FRAME
    common = min(len(samples), len(baseline))  # decoders differ in what they drop at the end
    assert np.corrcoef(samples[:common], baseline[:common])[0, 1] > 0.97
    part, _ = read_clip(CLIPS / "ref_voice_memo.m4a", (1.0, 2.0))
    assert np.array_equal(part, samples[RATE : 2 * RATE])


@pytest.mark.parametrize("cut", [200, 12_000, 24_000])
def test_damaged_m4a_is_an_error_or_what_is_left(tmp_path: Path, cut: int) -> None:
    pytest.importorskip("av")
    path = tmp_path / "memo.m4a"
    path.write_bytes((CLIPS / "ref_voice_memo.m4a").read_bytes()[:cut])
    assert outcome(path)


def test_a_play_list_in_disguise_is_not_followed(tmp_path: Path) -> None:
    pytest.importorskip("av")
    path = tmp_path / "clip.m4a"
    path.write_bytes(b"#EXTM3U\n#EXTINF:4,\n" + str(CLIPS / "ref.flac").encode() + b"\n")
    with pytest.raises(AudioError, match="text, not audio"):
        read_clip(path)


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


def test_a_part_is_read_exactly_where_it_lies(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long = (0.1 * rng.standard_normal(40 * 8000)).astype(np.float32)
    for name, subtype in (("clip.wav", "FLOAT"), ("clip.flac", "PCM_24")):
        path = clip_of(tmp_path / name, long, 8000, subtype)
        whole = clip_files.read_file(path, (0, 30)).wave
        part = clip_files.read_file(path, (12.5, 20)).wave
        assert np.array_equal(part, whole[100_000:160_000])
        samples, info = read_clip(path, (12.5, 20))
        assert (len(samples), info.seconds) == (round(7.5 * RATE), 7.5)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ((0, 31), r"lasts 31\.0 s, at most 30 s"),
        ((39, 45), r"no part from 39 s to 45 s: it ends at 40\.0 s"),
        ((50, 55), r"no part from 50 s to 55 s: it ends at 40\.0 s"),
        ((5, 5), "to a later end"),
        ((-1, 5), "from 0 s or later"),
        ((0, float("nan")), "to a later end"),
        ((3, 3.1), "reference-too-short"),
    ],
)
def test_parts_that_make_no_voice(tmp_path: Path, span: tuple[float, float], words: str) -> None:
    path = clip_of(tmp_path / "clip.wav", tone(40, 8000), 8000)
    with pytest.raises(VoiceError, match=words):
        read_clip(path, span)


@pytest.mark.parametrize("other", [-1.0, -0.8])
def test_channels_that_cancel_are_not_averaged(
    tmp_path: Path, spoken: npt.NDArray[np.float64], other: float
) -> None:
    path = clip_of(tmp_path / "clip.wav", np.stack([spoken * other, spoken], 1), RATE, "FLOAT")
    samples, info = read_clip(path)
    assert codes_of(info) == ["reference-anti-phase"]
    assert "channel" in info.warnings[0]
    assert np.abs(np.corrcoef(samples, spoken)[0, 1]) > 0.9999
    assert np.abs(samples).max() == pytest.approx(np.abs(spoken).max(), rel=1e-4)


@pytest.mark.parametrize("channels", [2, 6])
def test_one_channel_among_silent_ones_is_no_cancelling(
    tmp_path: Path, spoken: npt.NDArray[np.float64], channels: int
) -> None:
    wave = np.zeros((len(spoken), channels))
    wave[:, -1] = spoken
    samples, info = read_clip(clip_of(tmp_path / "clip.wav", wave, RATE, "FLOAT"))
    assert info.warnings == ()
    assert np.corrcoef(samples, spoken)[0, 1] > 0.9999


def test_an_offset_is_taken_away(tmp_path: Path, spoken: npt.NDArray[np.float64]) -> None:
    samples, info = read_clip(clip_of(tmp_path / "clip.wav", spoken + 0.2, RATE, "FLOAT"))
    assert codes_of(info) == ["reference-offset"]
    assert "+0.20" in info.warnings[0]
    assert np.abs(samples - (spoken - spoken.mean())).max() < 1e-5


def test_beyond_full_scale_is_scaled_down(tmp_path: Path, spoken: npt.NDArray[np.float64]) -> None:
    samples, info = read_clip(clip_of(tmp_path / "clip.wav", spoken * 4, RATE, "FLOAT"))
    assert codes_of(info) == ["reference-clipped"]
    assert np.abs(samples).max() == pytest.approx(1)
    assert np.corrcoef(samples, spoken)[0, 1] > 0.9999


def test_8_bit_clips_are_clipped_below_one(tmp_path: Path, spoken: npt.NDArray[np.float64]) -> None:
    hot = np.clip(spoken * 10, -1, 1)
    low, _ = read_clip(clip_of(tmp_path / "low.wav", spoken, RATE, "PCM_U8"))
    assert len(low) == len(spoken)
    hot_info = read_clip(clip_of(tmp_path / "hot.wav", np.maximum(hot, -0.9), RATE, "PCM_U8"))[1]
    assert codes_of(hot_info) == ["reference-clipped"]


@pytest.mark.parametrize("decibel", [-66, -50, -40])
def test_faint_hiss_is_silence_but_a_faint_tone_is_not(tmp_path: Path, decibel: float) -> None:
    level = 10 ** (decibel / 20)
    noise = np.random.default_rng(0).standard_normal(3 * RATE)
    noise *= level / np.abs(noise).max()
    with pytest.raises(VoiceError, match=r"faint noise.*\(reference-silent\)"):
        read_clip(clip_of(tmp_path / "hiss.wav", noise, subtype="PCM_24"))
    tones = clip_of(tmp_path / "tone.wav", tone(3, level=level), subtype="PCM_24")
    assert codes_of(read_clip(tones)[1]) == ["reference-quiet"]


def test_a_click_is_no_voice(tmp_path: Path) -> None:
    wave = np.zeros(3 * RATE)
    wave[RATE : RATE + 4000] = tone()[:4000]
    with pytest.raises(VoiceError, match=r"only 0\.1\d? s of it are sound.*too-short"):
        read_clip(clip_of(tmp_path / "click.wav", wave))


@pytest.mark.parametrize(("rate", "channels"), [(1000, 1), (4_000_000, 1), (44_100, 64)])
def test_absurd_headers_are_refused(tmp_path: Path, rate: int, channels: int) -> None:
    path = clip_of(tmp_path / "clip.wav", np.zeros((100, channels)), rate)
    with pytest.raises(AudioError, match=rf"{channels} channels at {rate} Hz"):
        read_clip(path)


def test_one_nan_in_any_channel_is_found(tmp_path: Path) -> None:
    wave = np.stack([tone(), tone()], 1)
    wave[-1, 1] = np.inf
    with pytest.raises(VoiceError, match="reference-not-finite"):
        read_clip(clip_of(tmp_path / "clip.wav", wave, RATE, "FLOAT"))


def test_every_refusal_is_one_of_ours(tmp_path: Path) -> None:
    """Whatever a damaged file does to the readers, the caller sees one family of errors."""
    rng = np.random.default_rng(1)
    sources = [(CLIPS / n).read_bytes() for n in ("ref.flac", "ref.mp3", "ref_16k_mono.wav")]
    path = tmp_path / "clip.bin"
    for n in range(45):
        data = bytearray(sources[n % 3][: int(rng.integers(1, 9000))])
        for at in rng.integers(0, len(data), 8):
            data[at] = int(rng.integers(256))
        path.write_bytes(data)
        assert outcome(path)
