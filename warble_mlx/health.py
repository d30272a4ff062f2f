"""Whether what the model makes is speech: judged frame by frame, and on the finished samples.

A sick model rarely raises. Scores that are not numbers become code 0 in every book; damaged
tables give one frame over and over; an end that never comes gives noise up to the limit.
`FrameMonitor` sees each frame when it is made and raises `SickError` as soon as no healthy stream
looks like that; `check_waveform` judges the samples; `check_durations` judges the rows of a
benchmark. What no statistic of the codes can tell is a position table that is finite and wrong
(the codes stay varied): the table itself is checked when a model is loaded, by `check_rope_table`.

The thresholds are measured, not felt. `samples/measure_health.py` makes the streams again and
prints the figures of docs/health.md, where each statistic stands with its healthy range and its
false alarms.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warble_mlx.errors import SickError

Codes = npt.NDArray[np.integer]

WINDOW = 64  # frames, 3 s: what the monitor remembers
SETTLED = 32  # frames seen before the window is judged
LEAST_DISTINCT = 8  # codes of a book in the window; fewer is no speech
LEAST_DISTINCT_FRAMES = 24  # whole frames in the window
LONGEST_CONSTANT = 24  # frames that one book may keep its code
LONGEST_REPEAT = 16  # frames that equal the frame one period earlier
LONGEST_PERIOD = 8  # frames
SHORTEST_JUDGED = 4  # frames; a whole stream from here on must not consist of one frame

SHORTEST_SPEECH = 0.15  # seconds; "Hi" takes 0.3
SHORTEST_SYLLABLE = 0.1  # seconds; one ideograph
FASTEST = 28.0  # units of text per second, see `spoken_units`
SLOWEST = 8.0
PATIENCE = 2.0  # seconds allowed on top, for pauses before and after

SPOILT_PEAK = 8.0  # times full scale: no codec output
SILENT_PEAK = 10 ** (-50 / 20)
FULL_SCALE = 0.999
MOST_CLIPPED = 0.01  # share of the samples
MOST_OFFSET = 0.02  # mean, of full scale
WINDOW_S = 0.05  # seconds per level
LONGEST_STEADY = 2.5  # seconds at the end without the ups and downs of speech
STEADY_DB = 2.0  # change of the level from window to window
SILENCE_BELOW_PEAK_DB = 50.0
LONGEST_SILENT_END = 2.5  # seconds

_SEED = "try another seed"
_DOCTOR = "run `warble doctor` and `warble verify`"


class Expected(NamedTuple):
    """Seconds that a text can take to say, with generous margins on both sides."""

    least: float
    most: float


def spoken_units(text: str) -> tuple[float, float]:
    """How much there is to say in `text`: a low and a high estimate, in letters of English.

    One written character is not one sound: an ideograph is a syllable or two, a digit may be a
    word, capitals side by side may be spelled out.
    """
    low = high = 0.0
    for before, c in pairwise(f" {text}"):
        kind = unicodedata.category(c)
        wide = unicodedata.east_asian_width(c) in "WF"
        if kind[0] == "N":
            low, high = low + 1, high + 10
        elif kind[0] == "L":
            spelled = c.isupper() and before.isupper()
            low, high = low + (2 if wide else 1), high + (6 if wide else 4 if spelled else 1)
        elif kind[0] == "S":
            high += 8
        elif kind[0] in "PZ":
            high += 2
        elif kind[0] == "M":
            high += 1
    return low, high


def expected_seconds(text: str) -> Expected:
    """The shortest and the longest time that saying `text` can take."""
    low, high = spoken_units(text)
    shortest = SHORTEST_SYLLABLE if sum(map(str.isalnum, text)) <= 1 else SHORTEST_SPEECH
    return Expected(max(shortest, low / FASTEST), PATIENCE + high / SLOWEST)


class FrameMonitor:
    """Judges one stream of frames while it is made, in constant time and memory per frame.

    sizes: codes that each book has. text: what is being said; None leaves its length unjudged.
    frame_rate: frames per second.
    """

    def __init__(self, sizes: Sequence[int], text: str | None, frame_rate: float) -> None:
        self._sizes = sizes
        self._rate = frame_rate
        self._expected = None if text is None else expected_seconds(text)
        self._window: deque[tuple[int, ...]] = deque(maxlen=WINDOW)
        self._counts: list[Counter[int]] = [Counter() for _ in sizes]
        self._frame_counts: Counter[tuple[int, ...]] = Counter()
        self._constant = [0] * len(sizes)
        self._repeats = [0] * (LONGEST_PERIOD + 1)
        self._varied = [False] * len(sizes)  # whether a book ever changed
        self.frames = 0

    def see(self, codes: Codes) -> None:
        """Take the next frame, int [books]; raises SickError when the stream is sick."""
        frame = tuple(int(code) for code in codes)
        if len(frame) != len(self._sizes):
            raise ValueError(f"a frame has {len(self._sizes)} codes, not {len(frame)}")
        for book, (code, size) in enumerate(zip(frame, self._sizes, strict=True)):
            if not 0 <= code < size:
                self._sick(
                    "codes-out-of-range",
                    f"book {book} gave the code {code}, but it has {size}",
                    "the model's files do not belong together",
                    _DOCTOR,
                )
        self._remember(frame)
        self._check_repeats(frame)
        self._check_books()
        self._check_variety()
        if self._expected is not None and self.frames > self._expected.most * self._rate:
            self._sick(
                "too-long",
                f"no end came, and the text takes at most {self._expected.most:.1f} s",
                "the model missed its end",
                _SEED + " or a shorter text",
            )

    def finish(self, reason: str = "stop") -> None:
        """Judge the whole stream after its last frame; raises SickError.

        One that a limit has cut (`reason` is "length") may be short.
        """
        if self._expected is not None and reason == "stop":
            seconds = self.frames / self._rate
            if seconds < self._expected.least:
                self._sick(
                    "too-short",
                    f"the end came, but the text takes at least {self._expected.least:.2f} s",
                    "the model ended too early",
                    _SEED,
                )
        if self.frames < SHORTEST_JUDGED:
            return
        if len(self._sizes) > 1 and not any(self._varied[1:]):
            self._constant_books(self.frames)

    def _remember(self, frame: tuple[int, ...]) -> None:
        for period in range(1, min(LONGEST_PERIOD, len(self._window)) + 1):
            same = self._window[-period] == frame
            self._repeats[period] = self._repeats[period] + 1 if same else 0
        for book, code in enumerate(frame):
            before = self._window[-1][book] if self._window else None
            self._constant[book] = self._constant[book] + 1 if code == before else 1
            self._varied[book] |= before is not None and code != before
        if len(self._window) == WINDOW:
            gone = self._window[0]
            _forget(self._frame_counts, gone)
            for count, code in zip(self._counts, gone, strict=True):
                _forget(count, code)
        self._window.append(frame)
        self._frame_counts[frame] += 1
        for count, code in zip(self._counts, frame, strict=True):
            count[code] += 1
        self.frames += 1

    def _check_repeats(self, frame: tuple[int, ...]) -> None:
        for period, repeats in enumerate(self._repeats):
            # A longer cycle must come round more than once before it is one.
            if repeats < max(LONGEST_REPEAT, 3 * period):
                continue
            if not any(frame) and period == 1:
                self._sick(
                    "codes-all-zero",
                    f"the last {repeats + 1} frames hold nothing but zeros",
                    "the model's scores are not numbers, which reads as code 0",
                    _DOCTOR,
                )
            what = "one frame" if period == 1 else f"a cycle of {period} frames"
            self._sick(
                "codes-repeat",
                f"{what} was repeated over the last {repeats + period} frames",
                "the model is caught in a loop, or its weights are damaged",
                f"{_SEED} or a higher temperature; if it stays, {_DOCTOR}",
            )

    def _check_books(self) -> None:
        stuck = [b for b, run in enumerate(self._constant) if run > LONGEST_CONSTANT]
        if stuck:
            self._constant_books(LONGEST_CONSTANT + 1, stuck)

    def _constant_books(self, frames: int, books: Sequence[int] | None = None) -> None:
        books = range(1, len(self._sizes)) if books is None else books
        zero = all(self._window[-1][book] == 0 for book in books)
        names = ", ".join(map(str, books))
        self._sick(
            "residuals-all-zero" if zero else "codes-constant",
            f"codebook {names} kept {'the code 0' if zero else 'one code'} for {frames} frames",
            "the fast transformer is dead: its weights or tables are damaged",
            _DOCTOR,
        )

    def _check_variety(self) -> None:
        seen = len(self._window)
        if seen < SETTLED:
            return
        # Limits hold for a full window; a part of one must show its share.
        least = LEAST_DISTINCT * seen / WINDOW
        for book, count in enumerate(self._counts):
            if len(count) < least:
                self._sick(
                    "codes-poor",
                    f"codebook {book} used {len(count)} different codes in {seen} frames",
                    "the model is caught in a loop, or its weights are damaged",
                    f"{_SEED}; if it stays, {_DOCTOR}",
                )
        if len(self._frame_counts) < LEAST_DISTINCT_FRAMES * seen / WINDOW:
            self._sick(
                "codes-poor",
                f"only {len(self._frame_counts)} of the last {seen} frames differ",
                "the model is caught in a loop, or its weights are damaged",
                f"{_SEED}; if it stays, {_DOCTOR}",
            )

    def _sick(self, reason: str, seen: str, cause: str, remedy: str) -> None:
        when = f"after {self.frames / self._rate:.2f} s" if self.frames else "at once"
        raise SickError(reason, f"{when}: {seen}", cause, remedy)


def _forget(counter: Counter[Any], key: Any) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def check_codes(
    codes: Codes, sizes: Sequence[int], text: str | None = None, frame_rate: float = 21.533203125
) -> None:
    """Judge a finished stream [books, frames] as `FrameMonitor` does; raises SickError."""
    monitor = FrameMonitor(sizes, text, frame_rate)
    for frame in np.asarray(codes).T:
        monitor.see(frame)
    monitor.finish()


def check_waveform(samples: npt.ArrayLike, sample_rate: int, text: str | None = None) -> None:
    """Judge finished mono samples [n] in ±1; raises SickError for what is not speech.

    text: what is said; None leaves the length unjudged.
    """
    wave = np.asarray(samples, dtype=np.float32)
    if not wave.size:
        _sick_wave("audio-empty", "there are no samples", "the model ended at once", _SEED)
    seconds = wave.size / sample_rate
    bad = wave.size - int(np.count_nonzero(np.isfinite(wave)))
    if bad:
        _sick_wave(
            "audio-not-finite",
            f"{bad} of {wave.size} samples are not finite numbers",
            "the codec's weights or this MLX build are broken",
            _DOCTOR,
        )
    peak = float(np.abs(wave).max())
    if peak > SPOILT_PEAK:
        _sick_wave(
            "audio-not-finite",
            f"the samples reach {peak:.3g} times full scale",
            "the codec's weights or this MLX build are broken",
            _DOCTOR,
        )
    if peak < SILENT_PEAK:
        _sick_wave(
            "audio-silent",
            f"{seconds:.2f} s of silence (peak {20 * math.log10(max(peak, 1e-9)):.0f} dBFS)",
            "the codec's weights are damaged, or the model said nothing",
            f"{_SEED}; if it stays, {_DOCTOR}",
        )
    clipped = float(np.mean(np.abs(wave) >= FULL_SCALE))
    if clipped > MOST_CLIPPED:
        _sick_wave(
            "audio-clipped",
            f"{clipped:.1%} of the samples are at full scale",
            "the codec's weights are damaged, or the reference clip is clipped",
            f"use a clean clip; without one, {_DOCTOR}",
        )
    offset = float(wave.mean(dtype=np.float64))
    if abs(offset) > MOST_OFFSET:
        _sick_wave(
            "audio-offset",
            f"the samples' mean is {offset:+.3f} of full scale instead of 0",
            "the codec's weights are damaged",
            _DOCTOR,
        )
    if text is not None and seconds < expected_seconds(text).least:
        _sick_wave(
            "too-short",
            f"only {seconds:.2f} s were spoken, but the text takes at least"
            f" {expected_seconds(text).least:.2f} s",
            "the model ended too early",
            _SEED,
        )
    _check_end(wave, sample_rate)
    if text is not None and seconds > expected_seconds(text).most:
        _sick_wave(
            "too-long",
            f"{seconds:.1f} s were spoken, but the text takes at most"
            f" {expected_seconds(text).most:.1f} s",
            "the model missed its end",
            _SEED,
        )


def _check_end(wave: npt.NDArray[np.float32], sample_rate: int) -> None:
    """Noise, a tone or silence where the speech should have ended."""
    steady = steady_end(wave, sample_rate)
    silent = silent_end(wave, sample_rate)
    # Silence is steady, too, but has its own name.
    if silent > LONGEST_SILENT_END:
        _sick_wave(
            "silent-end",
            f"the last {silent:.1f} s are silent",
            "the model missed its end",
            _SEED,
        )
    if steady > LONGEST_STEADY:
        _sick_wave(
            "noise-at-end",
            f"the last {steady:.1f} s are steady noise or a tone",
            "the model missed its end",
            _SEED,
        )


def levels(wave: npt.NDArray[np.float32], sample_rate: int) -> npt.NDArray[np.float64]:
    """Level of every whole window of WINDOW_S, in dB of full scale, without its mean."""
    size = round(WINDOW_S * sample_rate)
    windows = wave[: len(wave) // size * size].reshape(-1, size).astype(np.float64)
    found: npt.NDArray[np.float64] = 10 * np.log10(windows.var(axis=1) + 1e-12)
    return found


def silent_end(wave: npt.NDArray[np.float32], sample_rate: int) -> float:
    """Seconds at the end that lie SILENCE_BELOW_PEAK_DB below the loudest window."""
    level = levels(wave, sample_rate)
    loud = np.flatnonzero(level > np.max(level, initial=-120.0) - SILENCE_BELOW_PEAK_DB)
    return (len(level) - 1 - int(loud[-1])) * WINDOW_S if loud.size else 0.0


def steady_end(wave: npt.NDArray[np.float32], sample_rate: int) -> float:
    """Seconds at the end, as many as possible, whose levels stay or drift slowly: from one window
    to the next they change by less than STEADY_DB (root mean square)."""
    level = levels(wave, sample_rate)[::-1]
    if len(level) < 2:
        return 0.0
    change = np.cumsum(np.diff(level) ** 2) / np.arange(1, len(level))
    steady = np.flatnonzero(change < STEADY_DB**2)
    return int(steady[-1] + 2) * WINDOW_S if steady.size else 0.0


def _sick_wave(reason: str, seen: str, cause: str, remedy: str) -> None:
    raise SickError(reason, seen, cause, remedy)


CLICK_JUMP = 0.05  # of full scale
CLICK_RATIO = 8.0  # times anything within CLICK_AROUND_S
CLICK_AROUND_S = 0.012
CLICK_ITSELF_S = 0.0004


def clicks(samples: npt.ArrayLike, sample_rate: int) -> list[float]:
    """Seconds at which mono samples [n] jump as no voice does: the click of a bad joint.

    A click is one kink (second difference) that stands far above every other within
    CLICK_AROUND_S; the pulses of a voice come again within that time.
    """
    wave = np.asarray(samples, dtype=np.float64)
    kink = np.abs(np.diff(wave, 2))
    around, itself = round(CLICK_AROUND_S * sample_rate), round(CLICK_ITSELF_S * sample_rate)
    found: list[float] = []
    for at in np.flatnonzero(kink > CLICK_JUMP):
        near = kink[max(at - itself, 0) : at + itself + 1]
        if kink[at] < near.max():
            continue
        beside = np.concatenate(
            [kink[max(at - around, 0) : max(at - itself, 0)], kink[at + itself + 1 : at + around]]
        )
        if kink[at] > CLICK_RATIO * beside.max(initial=0.0):
            when = (int(at) + 1) / sample_rate
            if not found or when - found[-1] > CLICK_AROUND_S:
                found.append(when)
    return found


def wav_headers(data: bytes) -> int:
    """How many WAV files `data` holds, one after the other: more than one is a broken stream."""
    count = at = 0
    while (at := data.find(b"RIFF", at)) >= 0:
        count += data[at + 8 : at + 16] == b"WAVEfmt "
        at += 4
    return count


def check_durations(
    rows: Sequence[Mapping[str, Any]], frame_seconds: float, max_frames: int | None = None
) -> list[str | None]:
    """Judge the rows of a benchmark: for each, why it failed, or None.

    A row holds `text` and `seconds`, and `finish_reason` where it is known. Speech that was cut
    by a limit has not ended, whatever the row's status says: rows that end by `length`, that
    fill `max_frames`, or that share one duration although their texts differ in length.
    """
    frames = [round(float(row["seconds"]) / frame_seconds) for row in rows]
    sharing: dict[int, list[int]] = {}
    for i, count in enumerate(frames):
        sharing.setdefault(count, []).append(i)
    verdicts: list[str | None] = []
    for row, count in zip(rows, frames, strict=True):
        same = sharing[count]
        units = [spoken_units(str(rows[i]["text"]))[0] for i in same]
        if row.get("finish_reason", "stop") != "stop":
            verdicts.append(f"cut after {count} frames: it ended by {row['finish_reason']}")
        elif max_frames is not None and count >= max_frames:
            verdicts.append(f"cut: it fills the limit of {max_frames} frames")
        # At the longest duration only: below it, chance makes equals.
        elif len(same) >= 3 and count == max(frames) and max(units) > 1.5 * min(units):
            verdicts.append(
                f"cut: {len(same)} texts of different length all last {count} frames, so that"
                " must be the limit"
            )
        else:
            verdicts.append(None)
    return verdicts
