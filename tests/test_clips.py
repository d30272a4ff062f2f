"""Reference clips: what is read, what is repaired with a warning, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr

import warble_mlx
from warble_mlx import Warble, clip_files
from warble_mlx.audio import encode
from warble_mlx.clips import (
    CLIP_RATE,
    ClipInfo,
    check_transcript,
    prepare_clip,
    read_clip,
    speech_seconds,
)
from warble_mlx.errors import AudioError, VoiceError, VoiceWarning, WarbleError

CLIPS = Path(__file__).parent / "cases" / "ref"
MANIFEST: dict[str, dict[str, Any]] = json.loads((CLIPS / "manifest.json").read_text())
TRANSCRIPTS = [json.loads(x) for x in (CLIPS / "transcripts.jsonl").read_text().splitlines()]
SAID = "The old lighthouse keeper counted every passing ship before the fog."
FRAME = 2048
RATE = 44_100
DB_LIMIT = 10 ** (-0.1 / 20)


def tone(seconds: float = 1.0, rate: int = RATE, level: float = 0.5) -> npt.NDArray[np.float32]:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def clip_of(path: Path, samples: npt.ArrayLike, rate: int = RATE, subtype: str = "PCM_16") -> Path:
    soundfile.write(path, np.asarray(samples), rate, subtype=subtype)
    return path


def outcome(path: Path) -> bool:
    """Whether a damaged clip is refused in our own words, or what is left of it is sound."""
    try:
        samples, _ = read_clip(path)
    except WarbleError as error:
        return "(reference-" in str(error)
    return bool(np.isfinite(samples).all() and len(samples) < 31 * RATE)


def codes_of(info: ClipInfo) -> list[str]:
    """The short names at the ends of the warnings."""
    return [re.findall(r"\(([a-z-]+)\)$", warning)[0] for warning in info.warnings]


@pytest.fixture(scope="session")
def spoken() -> npt.NDArray[np.float64]:
    samples: npt.NDArray[np.float64] = soundfile.read(CLIPS / "ref.flac")[0]
    return samples


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory, spoken: npt.NDArray[np.float64]) -> Path:
    """A folder with every clip of the manifest. The large ones follow from `ref.flac`."""
    folder = tmp_path_factory.mktemp("clips")
    for name in MANIFEST:
        if (CLIPS / name).is_file():
            shutil.copyfile(CLIPS / name, folder / name)
    clip_of(folder / "ref_clean_44k.wav", spoken)
    stereo = soxr.resample(np.stack([spoken, spoken], 1), RATE, 48_000)
    clip_of(folder / "ref_48k_stereo.wav", stereo, 48_000)
    clip_of(folder / "ref_quiet_minus50dB.wav", spoken / np.abs(spoken).max() * 10 ** (-50 / 20))
    noise = np.random.default_rng(0).integers(-1, 2, 3 * RATE) / 2**15
    clip_of(folder / "ref_silent_3s.wav", noise)
    long = np.tile(soxr.resample(spoken, RATE, 16_000), 27)[: 95 * 16_000]
    soundfile.write(folder / "ref_long_95s.ogg", long, 16_000, format="OGG", subtype="VORBIS")
    assert {path.name for path in folder.iterdir()} == set(MANIFEST)
    return folder


@pytest.fixture(scope="session")
def warble() -> Warble:
    return warble_mlx.load()


@pytest.fixture(scope="session")
def baseline(warble: Warble, clips: Path) -> npt.NDArray[np.int32]:
    return warble.register(clips / "ref_clean_44k.wav", SAID).codes


# --------------------------------------------------------------------------------- the manifest


def behave(warble: Warble, path: Path, expect: dict[str, Any], base: npt.NDArray[np.int32]) -> None:
    """Check one entry of the manifest against the file at `path`."""
    if expect["outcome"] == "reject":
        with pytest.raises((AudioError, VoiceError), match=rf"\({expect['error']}\)"):
            warble.register(path, SAID)
        return
    if expect["outcome"] == "ok_or_reject" and find_spec("av") is None:
        with pytest.raises(AudioError, match=r"m4a.*pip install"):
            warble.register(path, SAID)
        return
    made = warble.register(path, SAID)
    assert abs(made.codes.shape[1] - base.shape[1]) <= expect.get("frames_within", 1)
    told = [re.findall(r"\(([a-z-]+)\)$", warning)[0] for warning in made.warnings]
    allowed = {"reference-quiet"} if "gain up" in expect.get("note", "") else set()
    assert set(told) - allowed == ({expect["warn"]} if "warn" in expect else set())
    if "codes_equal" in expect:
        share = (made.codes == base).mean()
        assert share >= int(re.findall(r"(\d+)%", expect["codes_equal"])[0]) / 100
    if "output_peak_dbfs_max" in expect:
        speech = warble.say("Yes.", voice=made, seed=0, max_seconds=1.5)
        data = encode(speech.samples, speech.sample_rate, "wav")
        highest = np.abs(np.frombuffer(data[44:], np.int16)).max() / 2**15
        assert 20 * np.log10(highest) <= expect["output_peak_dbfs_max"]


@pytest.mark.parametrize("name", MANIFEST)
def test_every_clip_behaves_as_the_manifest_says(
    warble: Warble, clips: Path, baseline: npt.NDArray[np.int32], name: str
) -> None:
    behave(warble, clips / name, MANIFEST[name]["expect"], baseline)


@pytest.mark.skipif("WARBLE_SHARED" not in os.environ, reason="needs the original clips")
@pytest.mark.parametrize("name", MANIFEST)
def test_every_original_clip_behaves_as_the_manifest_says(
    warble: Warble, baseline: npt.NDArray[np.int32], name: str
) -> None:
    path = Path(os.environ["WARBLE_SHARED"]) / "cases" / "ref" / name
    behave(warble, path, MANIFEST[name]["expect"], baseline)


def test_a_quiet_clip_has_codes_of_a_loud_one(
    warble: Warble, clips: Path, baseline: npt.NDArray[np.int32]
) -> None:
    """The first codebook carries the words; without gain none of them would agree."""
    codes = warble.register(clips / "ref_quiet_minus50dB.wav", SAID).codes
    samples, _ = soundfile.read(clips / "ref_quiet_minus50dB.wav", dtype="float32")
    untouched = warble._speakers.encode(samples)
    assert (codes[0] == baseline[0]).mean() > (untouched[0] == baseline[0]).mean() + 0.2


@pytest.mark.parametrize(
    "case", [c for c in TRANSCRIPTS if c["ref"]], ids=lambda c: c["transcript"][:20] or "none"
)
def test_every_transcript_behaves_as_expected(clips: Path, case: dict[str, Any]) -> None:
    expect = case["expect"]
    path = clips / case["ref"]
    if expect["outcome"] == "reject":
        with pytest.raises(VoiceError, match=expect["error"]):
            prepare_clip(path, case["transcript"])
        return
    info = prepare_clip(path, case["transcript"])[2]
    assert codes_of(info) == ([expect["warn"]] if expect["warn"] else [])


def test_clip_and_transcript_go_together(warble: Warble, clips: Path) -> None:
    clip = clips / "ref.flac"
    (alone,) = (case for case in TRANSCRIPTS if case["ref"] is None)
    with pytest.raises(VoiceError, match=rf"\({alone['expect']['error']}\)"):
        warble.say("Yes.", ref_text=alone["transcript"])
    for text in (None, "", " \n"):
        with pytest.raises(VoiceError, match=r"\(reference-text-required\)"):
            warble.say("Yes.", ref_audio=clip, ref_text=text)


def test_doubts_are_warnings_in_python(warble: Warble, clips: Path) -> None:
    with pytest.warns(VoiceWarning, match="transcript-too-short-for-clip"):
        warble.stream("Yes.", ref_audio=clips / "ref.flac", ref_text="The old lighthouse.").close()


# ------------------------------------------------------------------------------- the transcript


def info_of(seconds: float) -> ClipInfo:
    return ClipInfo(Path("clip.wav"), seconds, RATE, 1, "WAV PCM_16", 0.5, seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (SAID, 3.2),
        (SAID, 8.0),  # slowly
        (SAID, 2.4),  # fast
        ("1984 to 1999", 4.0),  # four words each
        ("+1 555 0199 2030", 8.0),
        ("今日は天気がいいですね", 1.8),
        ("今天天气很好我们去公园散步吧", 3.0),
        ("안녕하세요 만나서 반갑습니다", 2.2),
    ],
)
def test_what_is_spoken_at_a_usual_speed_is_not_doubted(text: str, seconds: float) -> None:
    assert check_transcript(text, info_of(seconds)) == []


@pytest.mark.parametrize(
    ("text", "seconds", "code", "refused"),
    [
        (SAID, 9.0, "transcript-too-short-for-clip", False),
        (SAID, 25.0, "transcript-too-short-for-clip", True),
        ("Yes.", 3.0, "transcript-too-short-for-clip", True),
        (SAID, 2.0, "transcript-too-long-for-clip", False),
        (SAID, 1.5, "transcript-too-long-for-clip", True),
        ("今天天气很好我们去公园散步吧", 0.6, "transcript-too-long-for-clip", True),
        ("今天天气", 4.0, "transcript-too-short-for-clip", False),
    ],
)
def test_what_nobody_speaks_like_is_doubted_or_refused(
    text: str, seconds: float, code: str, refused: bool
) -> None:
    if refused:
        with pytest.raises(VoiceError, match=code):
            check_transcript(text, info_of(seconds))
        return
    (doubt,) = check_transcript(text, info_of(seconds))
    assert code in doubt
    assert f"{len(text)} characters" in doubt
    assert f"{seconds:.1f} s" in doubt


def test_pauses_are_no_speech(spoken: npt.NDArray[np.float64]) -> None:
    alone = speech_seconds(spoken.astype(np.float32), RATE)
    assert 2.5 < alone < 3.63
    padded = np.concatenate([spoken * 0.02, np.zeros(2 * RATE)])
    padded[-RATE:][:400] = 1.0  # a click, far louder than the speech
    assert speech_seconds(padded.astype(np.float32), RATE) == pytest.approx(alone, abs=0.3)


# ---------------------------------------------------------------------------------- the samples


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
    assert np.corrcoef(samples[: len(baseline)], baseline)[0, 1] > 0.97
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
