"""Stage 1: read the corpus aloud into shards of audio with phoneme and pitch tracks.

Sentences are joined to lines of up to LINE phonemes, since a GPU speaks long lines far faster
per second of audio, and a sentence has better prosody among others; the predicted durations tell
where each begins and ends. A shard is four files: `NNNNN.pcm.npy` int16 at 24 kHz, `.phone.npy`
and `.pitch.npy` uint8, one value per 300 samples, and, last, `.meta.npy` int32 rows of (corpus
line, speaker, samples), so that whoever sees the last file finds the others complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samples.bundled_voice import casting, kokoro
from samples.bundled_voice.audio import TRACK, pitch_bins, warped
from samples.bundled_voice.phonemes import numbers, sounding
from samples.bundled_voice.progress import log
from samples.bundled_voice.toy_engine import ToyEngine

LINE = 260  # phonemes
LINES_PER_SHARD = 24
_SHARD_SECONDS = 15.0  # a shard is also written when the last is so old
LINES_PER_PASSING = 2  # a passing speaker says so many lines, then goes
_LEAD, _TAIL = 0.06, 0.10  # seconds of quiet kept around a sentence
_BLOCK = TRACK // 2  # samples that loudness is taken over
_QUIET = 90  # root mean square, of 32767, up to which a block counts as silence
_PEAK = 0.75  # a line louder than this is turned down
LEVEL = 0.08  # root mean square that speech is brought to

Lines = list[tuple[str, str]]


@dataclass
class Sentence:
    """samples int16 [n], phone and pitch uint8 [n / TRACK]; n is a multiple of TRACK."""

    line: int
    speaker: int
    samples: npt.NDArray[np.int16]
    phone: npt.NDArray[np.uint8]
    pitch: npt.NDArray[np.uint8]


def synthesise(
    lines: Lines,
    tables: casting.Table,
    engine: kokoro.Kokoro | ToyEngine,
    out: Path,
    seconds: float,
    *,
    worker: int = 0,
    workers: int = 1,
    passing_share: float = 0.33,
    hours: float = 1e9,
) -> float:
    """Speak until the seconds are over or so many hours are there; returns hours spoken.

    Every one of `workers` has lines of its own, so that few are spoken twice.

    Shards that an earlier run left are kept: numbering goes on behind them.
    """
    out.mkdir(parents=True, exist_ok=True)
    number = len(list(out.glob(f"{worker}_*.meta.npy")))
    rng = np.random.default_rng([worker, number])
    started, spoken, told, written = time.monotonic(), 0.0, 0.0, 0.0
    pending: list[Sentence] = []
    jobs = casts(tables, rng, passing_share)
    order = endless(rng, range(worker, len(lines), workers))
    made = 0
    while time.monotonic() - started < seconds and spoken / 3600 < hours:
        part = next(jobs)
        chosen = gather(lines, order)
        for sentence in speak(engine, part, lines, chosen):
            spoken += len(sentence.samples) / kokoro.RATE
            pending.append(sentence)
        made += 1
        now = time.monotonic() - started
        if pending and (made % LINES_PER_SHARD == 0 or now - written > _SHARD_SECONDS):
            write(out, f"{worker}_{number:05d}", pending)
            number, pending, written = number + 1, [], now
        if now - told > 10:
            log(f"synthesis {worker}: {spoken / 3600:.2f} h, {spoken / now:.0f} x real time")
            told = now
    if pending:
        write(out, f"{worker}_{number:05d}", pending)
    log(f"synthesis {worker} done: {spoken / 3600:.2f} h in {time.monotonic() - started:.0f} s")
    return spoken / 3600


def speak_each(
    lines: Lines,
    tables: casting.Table,
    engine: kokoro.Kokoro | ToyEngine,
    out: Path,
    *,
    worker: int = 0,
    workers: int = 1,
) -> None:
    """Speak every line alone in each of the five voices, into one shard per worker; beside it
    `lines.json` has the texts that the shard's numbers mean."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "lines.json").write_text(json.dumps([text for text, _ in lines]))
    five = [casting.character(tables, number) for number in casting.CHARACTERS]
    jobs = [(part, index) for part in five for index in range(len(lines))][worker::workers]
    spoken = [own for part, index in jobs for own in speak(engine, part, lines, [index])]
    write(out, f"{worker}_00000", spoken)
    log(f"synthesis {worker}: {len(spoken)} of {len(jobs)} lines")


def casts(
    tables: casting.Table, rng: np.random.Generator, passing_share: float
) -> Iterator[casting.Part]:
    """Who speaks the next line."""
    five = {number: casting.character(tables, number) for number in casting.CHARACTERS}
    weights = np.array([casting.CHARACTERS[number].share for number in five])
    while True:
        if rng.random() < passing_share / LINES_PER_PASSING:
            part = casting.passing(tables, int(rng.integers(casting.FIRST_PASSING, 2**31)))
            for _ in range(LINES_PER_PASSING):
                yield part
        else:
            yield five[int(rng.choice(list(five), p=weights / weights.sum()))]


def endless(rng: np.random.Generator, own: range) -> Iterator[int]:
    """Corpus lines of one worker, over and over in another order."""
    while True:
        yield from rng.permutation(own).tolist()


def gather(lines: Lines, order: Iterator[int]) -> list[int]:
    """Corpus lines that fit into one spoken line."""
    chosen: list[int] = []
    length = 0
    for index in order:
        own = len(lines[index][1]) + 2
        chosen.append(index)
        length += own
        if length + 60 > LINE:
            return chosen
    raise AssertionError("the order of lines is endless")


def speak(
    engine: kokoro.Kokoro | ToyEngine, part: casting.Part, lines: Lines, chosen: list[int]
) -> list[Sentence]:
    """The sentences of one spoken line, cut apart."""
    tokens: list[int] = []
    stops: list[int] = []
    for index in chosen:
        own = numbers(lines[index][1])
        if not lines[index][1].endswith((".", "?", "!")):
            own += numbers(".")
        tokens += [*own, *numbers(" ")]
        stops.append(len(tokens) - 2)
    result = engine.speak(tokens, casting.style_row(part, len(tokens)), part.speed)
    phone = torch.repeat_interleave(
        torch.tensor([0, *sounding(tokens), 0], device=result.frames.device), 2 * result.frames
    )
    samples, tracks = warped(
        result.samples, torch.stack([phone.float(), result.pitch[: len(phone)]]), part.warp
    )
    samples = levelled(samples)
    pitch = pitch_bins(tracks[1] * part.warp)
    sound = (samples * 32767).round().to(torch.int16).cpu().numpy()
    phones = tracks[0].to(torch.uint8).cpu().numpy()
    pitches = pitch.to(torch.uint8).cpu().numpy()
    ends = np.concatenate([[0], np.cumsum(result.frames.cpu().numpy())])  # frames of 600 samples
    moments = (ends * kokoro.FRAME / part.warp).astype(int).tolist()
    # The engine's own start stands in front, so token i lasts from moments[i + 1] on.
    loud = loudness(sound)
    borders = [0, *(parting(loud, moments[at + 1], moments[at + 3]) for at in stops)]
    found = []
    for index, (begin, finish) in zip(chosen, pairwise(borders), strict=True):
        cut = trimmed(sound, begin, finish)
        if cut is None:
            continue
        start, stop = cut
        found.append(
            Sentence(
                index,
                part.speaker,
                sound[start:stop],
                phones[start // TRACK : stop // TRACK],
                pitches[start // TRACK : stop // TRACK],
            )
        )
    return [sentence for sentence in found if len(sentence.phone) == len(sentence.samples) // TRACK]


def levelled(samples: Tensor) -> Tensor:
    """Speech at the same loudness whoever speaks, without clipping."""
    loud = samples.square().mean().sqrt().clamp_min(1e-4)
    gain = torch.minimum(LEVEL / loud, _PEAK / samples.abs().max().clamp_min(1e-4))
    return samples * gain


def parting(loud: npt.NDArray[np.float32], begin: int, finish: int) -> int:
    """Sample at which two sentences part: the middle of the longest quiet that touches a stretch.

    loud: the loudness of the whole line; begin, finish: full stop and space, in samples. Sounds
    come 50 ms and more before the phonemes that the durations name, so the middle of the phonemes
    lies close to the next onset, or in it.
    """
    begin, finish = begin // _BLOCK, max(finish // _BLOCK, begin // _BLOCK + 1)
    edges = np.flatnonzero(np.diff(np.concatenate([[True], loud > _QUIET, [True]])))
    quiet = edges.reshape(-1, 2)
    quiet = quiet[(quiet[:, 0] < finish) & (quiet[:, 1] > begin)]
    if not len(quiet):
        return (begin + int(loud[begin:finish].argmin())) * _BLOCK
    return int(quiet[np.diff(quiet).argmax()].sum()) * _BLOCK // 2


def loudness(sound: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    """Root mean square of every whole block."""
    blocks = sound[: len(sound) // _BLOCK * _BLOCK].astype(np.float32).reshape(-1, _BLOCK)
    return np.sqrt(np.square(blocks).mean(1))


def trimmed(sound: npt.NDArray[np.int16], begin: int, finish: int) -> tuple[int, int] | None:
    """First and last sample of the speech in a stretch, on the grid of the tracks."""
    usable = len(sound) // TRACK * TRACK
    begin, finish = max(0, begin // TRACK * TRACK), min(usable, finish // TRACK * TRACK)
    loud = np.flatnonzero(loudness(sound[begin:finish]) > _QUIET)
    if len(loud) < 6:
        return None
    start = begin + loud[0] * _BLOCK - int(_LEAD * kokoro.RATE)
    stop = begin + (loud[-1] + 1) * _BLOCK + int(_TAIL * kokoro.RATE)
    start, stop = max(begin, start) // TRACK * TRACK, min(finish, stop) // TRACK * TRACK
    return (start, stop) if stop - start >= 8 * TRACK else None


def write(out: Path, name: str, sentences: list[Sentence]) -> None:
    meta = np.array([[s.line, s.speaker, len(s.samples)] for s in sentences], np.int64)
    for ending, values in (
        ("pcm", [s.samples for s in sentences]),
        ("phone", [s.phone for s in sentences]),
        ("pitch", [s.pitch for s in sentences]),
    ):
        np.save(out / f"{name}.{ending}.npy", np.concatenate(values))
    temporary = out / f"{name}.meta.tmp.npy"
    np.save(temporary, meta)
    temporary.rename(out / f"{name}.meta.npy")
