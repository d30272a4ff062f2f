"""Reference clips and transcripts: what is accepted, doubted and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr
from clip_data import CLIPS, RATE, SAID, clip_of, codes_of

import warble_mlx
from warble_mlx import Warble
from warble_mlx.audio import encode
from warble_mlx.clips import (
    ClipInfo,
    check_transcript,
    prepare_clip,
    speech_seconds,
)
from warble_mlx.errors import AudioError, VoiceError, VoiceWarning

MANIFEST: dict[str, dict[str, Any]] = json.loads((CLIPS / "manifest.json").read_text())
TRANSCRIPTS = [json.loads(x) for x in (CLIPS / "transcripts.jsonl").read_text().splitlines()]


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
