"""Sick streams and sick samples are refused, healthy ones are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from golden_data import FOLDER, tensors

from warble_mlx import health
from warble_mlx.errors import SickError

CASES = Path(__file__).parent / "cases"
CODES = json.loads((CASES / "codes" / "expect.json").read_text())
OUT = json.loads((CASES / "out" / "expect.json").read_text())
PUBLISHED = [4096] * 10
RATE = 21.533203125
SENTENCE = "Bring the heavy box to the second floor."  # 40 characters

Codes = npt.NDArray[np.int32]


def reason_of(codes: Codes, text: str | None = None, sizes: list[int] = PUBLISHED) -> str | None:
    try:
        health.check_codes(codes, sizes, text, RATE)
    except SickError as error:
        return error.reason
    return None


def reason_of_wave(
    wave: npt.NDArray[Any], rate: int = 44100, text: str | None = None
) -> str | None:
    try:
        health.check_waveform(wave, rate, text)
    except SickError as error:
        return error.reason
    return None


def feed(monitor: health.FrameMonitor, codes: Codes) -> None:
    for frame in codes.T:
        monitor.see(frame)


@pytest.fixture(scope="module")
def varied() -> Codes:
    """Codes of the codec's own sizes that never repeat a pattern."""
    rng = np.random.default_rng(5)
    return rng.integers(0, [[4096]] + [[1024]] * 9, (10, 200)).astype(np.int32)


# ------------------------------------------------------------------ the cases


def test_every_case_is_known() -> None:
    assert set(CODES) == {
        "healthy_synthetic.npy",
        "all_zero.npy",
        "residuals_all_zero.npy",
        "one_frame_repeats_after_60.npy",
        "two_frames_for_long_text.npy",
    }
    assert {p.name for p in (CASES / "out").iterdir()} == {
        *OUT, "expect.json", "bench_identical_durations.json"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("healthy_synthetic.npy", None, None),
        ("healthy_synthetic.npy", "x" * 150, None),
        ("all_zero.npy", None, "codes-all-zero"),
        ("residuals_all_zero.npy", None, "residuals-all-zero"),
        ("one_frame_repeats_after_60.npy", None, "codes-repeat"),
        ("two_frames_for_long_text.npy", "x" * 400, "too-short"),
        ("two_frames_for_long_text.npy", SENTENCE, "too-short"),
        ("two_frames_for_long_text.npy", "Hi", "too-short"),
    ],
)
def test_codes(name: str, text: str | None, reason: str | None) -> None:
    assert reason_of(np.load(CASES / "codes" / name), text) == reason
    assert CODES[name].startswith("pass") is (reason is None)


@pytest.mark.parametrize("name", ["audio_with_nan.npy", "audio_1e25.npy"])
def test_spoilt_samples(name: str) -> None:
    assert reason_of_wave(np.load(CASES / "codes" / name)) == "audio-not-finite"


@pytest.mark.parametrize(
    ("name", "reason", "clicks"),
    [
        ("ok_speech.wav", None, []),
        ("speech_then_8s_noise.wav", "noise-at-end", []),
        ("seam_clean.wav", None, []),
        ("seam_click_at_1s.wav", None, [1.0]),
    ],
)
def test_output(name: str, reason: str | None, clicks: list[float]) -> None:
    wave, rate = soundfile.read(CASES / "out" / name, dtype="float32")
    assert reason_of_wave(wave, rate) == reason
    assert health.clicks(wave, rate) == pytest.approx(clicks, abs=0.001)
    assert OUT[name].startswith("pass") is (reason is None and not clicks)


def test_two_files_in_one_stream_are_counted() -> None:
    folder = CASES / "out"
    assert health.wav_headers((folder / "two_wav_files_concatenated.bin").read_bytes()) == 2
    assert health.wav_headers((folder / "ok_speech.wav").read_bytes()) == 1
    assert health.wav_headers(b"RIFF is a word") == 0


def test_a_benchmark_at_the_limit_fails_in_every_row() -> None:
    case = json.loads((CASES / "out" / "bench_identical_durations.json").read_text())
    verdicts = health.check_durations(case["rows"], case["frame_seconds"])
    assert len(verdicts) == 11
    assert all(verdict and "150 frames" in verdict for verdict in verdicts)


def test_a_benchmark_of_speech_passes() -> None:
    rows = [{"text": "word " * n, "seconds": 0.4 * n} for n in range(2, 12)]
    assert health.check_durations(rows, 1 / RATE) == [None] * 10
    # Several of one text may last equally long.
    assert health.check_durations([{"text": "Hi", "seconds": 0.4}] * 4, 1 / RATE) == [None] * 4
    cut = health.check_durations(rows, 1 / RATE, max_frames=80)
    assert [v is None for v in cut] == [0.4 * n * RATE < 79.5 for n in range(2, 12)]
    rows[3]["finish_reason"] = "length"
    assert [v is None for v in health.check_durations(rows, 1 / RATE)].count(False) == 1


# ------------------------------------------------------------------ streams of broken loads


@pytest.mark.parametrize("name", sorted(tensors("trap")))
def test_broken_loads(name: str) -> None:
    reason = reason_of(tensors("trap")[name], sizes=[256] * 10)
    if name.startswith("uninitialised"):
        assert reason == ("codes-all-zero" if name.endswith("sampled") else "codes-repeat")
    else:
        # Tables of zeros give varied codes; only a look at the table tells.
        assert reason is None


@pytest.mark.parametrize("name", ["birch", "water", "museum"])
def test_golden_speech_is_healthy(name: str) -> None:
    cases = json.loads((FOLDER / "bundled" / "golden.json").read_text())
    case = next(c for c in cases if c["file"] == f"{name}.npz")
    with np.load(FOLDER / "bundled" / case["file"]) as golden:
        assert reason_of(golden["codes"], case["text"], [1024] * 10) is None


# ------------------------------------------------------------------ streams that go wrong


def test_a_short_stream_of_one_frame_is_seen_at_its_end(varied: Codes) -> None:
    assert reason_of(np.repeat(varied[:, :1], 6, axis=1)) == "codes-constant"
    assert reason_of(np.zeros((10, 6), np.int32)) == "residuals-all-zero"
    assert reason_of(varied[:, :6]) is None


@pytest.mark.parametrize("period", range(1, 9))
def test_a_cycle_is_seen(varied: Codes, period: int) -> None:
    cycle = np.tile(varied[:, 60 : 60 + period], (1, 40))
    monitor = health.FrameMonitor(PUBLISHED, None, RATE)
    with pytest.raises(SickError, match="codes-repeat"):
        feed(monitor, np.concatenate([varied[:, :60], cycle], axis=1))
    assert 60 < monitor.frames <= 60 + 4 * period + 17


@pytest.mark.parametrize("book", [0, 1, 9])
def test_one_dead_book_is_seen(varied: Codes, book: int) -> None:
    codes = varied.copy()
    codes[book, 50:] = 7
    assert reason_of(codes) == "codes-constant"
    codes[book, 50:] = np.arange(150) % 3
    assert reason_of(codes) == "codes-poor"


def test_few_frames_in_turns_are_seen(varied: Codes) -> None:
    order = np.random.default_rng(1).integers(0, 12, 150)
    assert reason_of(varied[:, order]) == "codes-poor"


def test_a_pause_is_no_loop(varied: Codes) -> None:
    pause = np.repeat(varied[:, 60:61], health.LONGEST_REPEAT - 1, axis=1)
    codes = np.concatenate([varied[:, :60], pause, varied[:, 80:]], axis=1)
    assert reason_of(codes) is None


@pytest.mark.parametrize("code", [-1, 4096])
def test_an_impossible_code(varied: Codes, code: int) -> None:
    codes = varied.copy()
    codes[3, 10] = code
    assert reason_of(codes) == "codes-out-of-range"


def test_an_end_that_never_comes(varied: Codes) -> None:
    monitor = health.FrameMonitor(PUBLISHED, SENTENCE, RATE)
    with pytest.raises(SickError, match="too-long") as raised:
        feed(monitor, np.tile(varied, (1, 5)))
    assert raised.value.exit_status == 4
    assert raised.value.reason == "too-long"
    assert "no end came" in raised.value.seen
    assert "missed its end" in raised.value.cause
    assert "another seed" in str(raised.value)
    assert 5 < monitor.frames / RATE < 10


def test_what_a_limit_has_cut_may_be_short(varied: Codes) -> None:
    monitor = health.FrameMonitor(PUBLISHED, SENTENCE, RATE)
    feed(monitor, varied[:, :10])
    monitor.finish("length")
    with pytest.raises(SickError, match="too-short"):
        monitor.finish("stop")


@pytest.mark.parametrize(
    ("text", "shortest", "longest"),
    [
        ("Hi", 0.15, 2.5),
        ("好", 0.1, 2.8),
        (SENTENCE, 1.1, 8),
        ("NATO", 0.15, 4),
        ("1234567890", 0.3, 15),
        ("今天天气很好我们去公园散步吧", 0.9, 13),
    ],
)
def test_expected_length(text: str, shortest: float, longest: float) -> None:
    expected = health.expected_seconds(text)
    assert shortest <= expected.least <= 1.4 * shortest
    assert 0.7 * longest <= expected.most <= longest


def test_memory_does_not_grow(varied: Codes) -> None:
    monitor = health.FrameMonitor(PUBLISHED, None, RATE)
    feed(monitor, np.tile(varied, (1, 10)))
    assert monitor.frames == 2000
    assert len(monitor._window) == health.WINDOW
    assert sum(map(len, monitor._counts)) <= 10 * health.WINDOW
    assert sum(monitor._frame_counts.values()) == health.WINDOW


# ------------------------------------------------------------------ samples


@pytest.fixture(scope="module")
def speech() -> npt.NDArray[np.float32]:
    wave, rate = soundfile.read(FOLDER / "speech_44k.wav", dtype="float32")
    assert rate == 44100
    return wave


def spoil(speech: npt.NDArray[np.float32]) -> Iterator[tuple[str | None, npt.NDArray[Any]]]:
    rng = np.random.default_rng(2)
    hum = np.sin(np.arange(3 * 44100) / 100).astype(np.float32)
    yield None, speech
    yield None, speech * 0.05
    yield None, np.concatenate([speech, np.zeros(44100)])
    yield "audio-empty", speech[:0]
    yield "audio-silent", speech * 1e-4
    yield "audio-silent", np.zeros(44100)
    yield "audio-clipped", np.clip(speech * 30, -1, 1)
    yield "audio-offset", speech + 0.1
    yield "silent-end", np.concatenate([speech, np.zeros(3 * 44100)])
    yield "noise-at-end", np.concatenate([speech, 0.2 * hum])
    yield "noise-at-end", np.concatenate([speech, 0.03 * rng.standard_normal(3 * 44100)])
    fading = 0.1 * np.exp(-np.arange(4 * 44100) / 44100) * rng.standard_normal(4 * 44100)
    yield "noise-at-end", np.concatenate([speech, fading])
    yield "noise-at-end", 0.1 * rng.standard_normal(5 * 44100)
    yield "audio-not-finite", np.append(speech, np.inf)
    yield "audio-not-finite", np.append(speech, -9)


def test_spoilt_speech(speech: npt.NDArray[np.float32]) -> None:
    for reason, wave in spoil(speech):
        assert reason_of_wave(wave) == reason


def test_length_of_samples(speech: npt.NDArray[np.float32]) -> None:
    assert reason_of_wave(speech, text=SENTENCE) is None
    assert reason_of_wave(speech[:4000], text=SENTENCE) == "too-short"
    assert reason_of_wave(np.tile(speech, 4), text="Hi") == "too-long"


def test_a_click_is_found_where_it_is(speech: npt.NDArray[np.float32]) -> None:
    assert health.clicks(speech, 44100) == []
    # In a vowel: what is joined there has gone on by half a period or so.
    kinks = np.abs(np.diff(speech, 2))[: 44100 * 3 // 2].reshape(-1, 2205).max(axis=1)
    loud = np.abs(speech)[: 44100 * 3 // 2].reshape(-1, 2205).max(axis=1)
    at = 2205 * int(np.argmax(loud / (kinks + 0.02))) + 1100
    seam = np.concatenate([speech[:at], -speech[at:]])
    seam[at:] += 0.3
    assert health.clicks(seam, 44100) == [pytest.approx(at / 44100, abs=0.001)]
