"""A text of any length, read part by part in one voice.

    Plan ──► for each part: silence, prompt, frames, samples ──► Chunks; a Piece when one is done

Frames come from outside: `Reading.turns` says what it wants generated, and is sent what became of
it. `Reading.chunks` lets the engine generate for one reading alone, `warble_mlx.ensemble` for
many side by side.

Every part is an utterance of its own: its prompt holds the voice (speaker token or reference) and
its own text, its seed follows from the plan's, its codec state starts anew. So memory does not
grow with the length, and a reading can go on from any finished piece (`Progress`) with the same
samples. A model that was given no voice would choose another one for every part; there the first
piece, text and codes, is the reference of all that follow.

Joints are silent and do not click: silence is exact in samples, and a piece that starts or ends
beside another with a sample above silence is faded there. A text of one part passes through
untouched.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.codec import CodecDecoder
from warble_mlx.config import ModelConfig
from warble_mlx.engine import Emission, Engine, FinishReason, Request, Sampling
from warble_mlx.errors import BudgetError, SickError, WarbleError
from warble_mlx.health import FrameMonitor, check_waveform
from warble_mlx.prompt import PromptBuilder, Reference
from warble_mlx.splitting import Part, joined, weight

Samples = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]

# Frames per decoded chunk: a small first one for an early sound, then larger ones. Few lengths,
# so that few shapes occur.
FIRST_CHUNK = 4
NEXT_CHUNK = 16
# Nobody speaks faster: a budget below this cannot hold the text.
MAX_CHARACTERS_PER_SECOND = 25.0
# No healthy voice speaks slower, so a part of this speed still ends inside its budget.
MIN_CHARACTERS_PER_SECOND = 8.0
RESERVE = 64  # positions of the context that a part leaves free
SHORTEST_LIMIT = 16  # characters; parts of less are no sentences
FADE_S = 0.005
SILENT = 10 ** (-70 / 20)  # an edge up to this cannot be heard


class Chunk(NamedTuple):
    """A piece of a stream: float32 samples [n] and the frames [begin, end) they come from.

    Silence between the pieces of a long text comes from no frame: there begin equals end.
    """

    samples: Samples
    begin: int
    end: int


@dataclass(frozen=True)
class Piece:
    """A part of the text as it was spoken. Ranges are [begin, end) of the whole speech."""

    text: str
    seed: int
    finish_reason: FinishReason
    samples: tuple[int, int]
    frames: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """What will be said and how. Everything in it has been checked, nothing is generated yet."""

    parts: tuple[Part, ...]
    speaker: str  # voice token, or ""
    reference: Reference | None
    voice: str | None  # name
    sampling: Sampling
    seed: int
    pause_s: float  # between sentences; paragraphs get twice that
    longest: int | None  # frames that the whole speech may last; None: no wish
    retry: int = 0  # further attempts for a piece that is no speech, each with another seed
    warnings: tuple[str, ...] = ()  # sentences on what may not be spoken well

    @property
    def text(self) -> str:
        """The cleaned text."""
        return joined(self.parts)

    @property
    def spoken(self) -> tuple[Part, ...]:
        """The parts that become pieces."""
        return tuple(part for part in self.parts if part.spoken)

    @property
    def slowest_s(self) -> float:
        """Seconds that the words last at most, pauses between pieces left out."""
        return weight(self.text) / MIN_CHARACTERS_PER_SECOND

    def burst_s(self, frame_rate_hz: float) -> float:
        """Seconds of the longest chunk: a piece where it may be tried again."""
        if self.retry:
            return max(weight(part.text) for part in self.spoken) / MIN_CHARACTERS_PER_SECOND
        return NEXT_CHUNK / frame_rate_hz


class Progress(NamedTuple):
    """How far a reading has come: finished pieces, their codes, and the seconds it took."""

    pieces: tuple[Piece, ...] = ()
    codes: tuple[Codes, ...] = ()  # [10, frames] of each piece
    total_s: float = 0.0
    codec_s: float = 0.0
    retries: int = 0


NOTHING_DONE = Progress()


def part_limit(
    config: ModelConfig, overhead: int, most_frames: int, trained: int | None, own_voice: bool
) -> int:
    """Characters that a part may have, so that prompt and frames stay inside the context.

    overhead: positions of a prompt with (almost) no text. most_frames: frames of one utterance.
    trained: characters that the model was trained on at most, if it says so. own_voice: the first
    piece will be the reference of the others, so text and frames are held twice.

    Raises BudgetError if the context has no room for a sentence.
    """
    frames = config.frame_rate_hz / MIN_CHARACTERS_PER_SECOND  # per character
    free = config.max_seq_len - overhead - RESERVE
    limit = int(free / ((1 + frames) * (2 if own_voice else 1)))
    if limit < SHORTEST_LIMIT:
        raise BudgetError(
            f"the voice takes {overhead} positions of a context of {config.max_seq_len}, which"
            " leaves no room for a sentence: use a shorter reference clip"
        )
    return min(limit, int(most_frames / frames) if trained is None else trained)


def utterance_frames(config: ModelConfig, most_frames: int, prompt: int, text: str) -> int:
    """Frames allowed to `text` behind a prompt of so many positions.

    Raises BudgetError if they cannot hold the text.
    """
    room = config.max_seq_len - prompt
    needed = math.ceil(len(text) / MAX_CHARACTERS_PER_SECOND * config.frame_rate_hz)
    if room < needed:
        raise BudgetError(
            f"the prompt has {prompt} positions and the text needs at least {needed} frames,"
            f" but the context holds {config.max_seq_len}: shorten the text or the"
            " reference clip"
        )
    return min(most_frames, room)


def piece_seed(seed: int, index: int) -> int:
    """Seed of piece `index`, 0 … 2**32 - 1. The first has the seed itself."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def next_seed(seed: int) -> int:
    """The seed of the attempt after the one with `seed`."""
    return (seed + 0x9E3779B9) % 2**32  # golden ratio: far from any seed a user counts up


def fade_in(samples: Samples, sample_rate: int) -> Samples:
    """`samples` [n], raised from zero by half a cosine if they start above silence."""
    if not samples.size or abs(samples[0]) <= SILENT:
        return samples
    length = min(round(FADE_S * sample_rate), samples.size)
    ramp: Samples = (0.5 - 0.5 * np.cos(np.pi * np.arange(length) / length)).astype(np.float32)
    faded: Samples = samples.copy()
    faded[:length] *= ramp
    return faded


def fade_out(samples: Samples, sample_rate: int) -> Samples:
    """`samples` [n], lowered to zero likewise if they end above silence."""
    backwards: Samples = fade_in(samples[::-1], sample_rate)[::-1]
    return backwards


Turn = Chunk | Request | None
"""What a reading brings or wants: samples, a request to generate, or that request's next emission.
The last one is answered by `send`."""


class Reading:
    """One plan being read. Iterate over `chunks`; what is known so far stands in the attributes.

    chunk_frames: frames of the first decoded chunk of a piece, and of each after it.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        prompts: PromptBuilder,
        decoder: CodecDecoder,
        most_frames: int,
        done: Progress = NOTHING_DONE,
        chunk_frames: tuple[int, int] = (FIRST_CHUNK, NEXT_CHUNK),
    ) -> None:
        self.plan = plan
        self.pieces = list(done.pieces)
        self.codes = list(done.codes)
        self.position = done.pieces[-1].samples[1] if done.pieces else 0  # samples
        self.frames = done.pieces[-1].frames[1] if done.pieces else 0
        self.codec_s, self.retries = done.codec_s, done.retries
        self.first_audio_s = math.nan
        self.finish_reason: FinishReason = "stop"
        self._engine, self._prompts, self._decoder = engine, prompts, decoder
        self._config = engine.model.config
        self._most_frames = most_frames
        self._chunk_frames = chunk_frames
        self._started = time.perf_counter() - done.total_s
        self._own_voice = not plan.speaker and plan.reference is None
        self._reference = plan.reference
        self._is_stopped = False
        for piece, codes in zip(done.pieces, done.codes, strict=True):
            self._learn(piece, codes)

    def stop(self) -> None:
        """End `chunks` within a frame, the piece unfinished. Any thread may say so."""
        self._is_stopped = True

    @property
    def total_s(self) -> float:
        """Seconds since the reading began, those of earlier runs included."""
        return time.perf_counter() - self._started

    @property
    def all_codes(self) -> Codes:
        """Codes of all pieces so far, int32 [10, frames]."""
        empty = np.zeros((self._config.num_codebooks, 0), np.int32)
        return np.concatenate([empty, *self.codes], axis=1)

    @property
    def progress(self) -> Progress:
        """What another reading of the same plan needs to go on from here."""
        return Progress(
            tuple(self.pieces), tuple(self.codes), self.total_s, self.codec_s, self.retries
        )

    def chunks(self) -> Generator[Chunk, None, None]:
        """Samples as they come. A piece is in `pieces` before the next chunk is."""
        turns = self.turns()
        emissions: Iterator[Emission] = iter(())
        go_on: Callable[[], Turn] = partial(turns.send, None)
        while not self._is_stopped:
            try:
                turn = go_on()
            except StopIteration:
                return
            go_on = partial(turns.send, None)
            if isinstance(turn, Chunk):
                yield turn
            elif turn is not None:
                emissions = self._engine.generate([turn])
            else:
                try:
                    go_on = partial(turns.send, next(emissions))
                except WarbleError as error:
                    go_on = partial(turns.throw, error)

    def turns(self) -> Generator[Turn, Emission | None, None]:
        """The same, with frames from whoever drives it: see `Turn`.

        A new request means that the one before it is over, whether or not its end was read. What
        goes wrong while one is generated is thrown in here.
        """
        rate, plan = self._config.codec_sample_rate, self.plan
        left = len(self.pieces)  # spoken before
        cut = False
        for number, part in enumerate(plan.parts):
            if left:
                left -= part.spoken
                continue
            silence = round(part.pause(plan.pause_s) * rate)
            if self._room(silence) < part.spoken:
                cut = True
                break
            for begin in range(0, silence, rate):
                samples = np.zeros(min(rate, silence - begin), np.float32)
                self.position += samples.size
                yield Chunk(samples, self.frames, self.frames)
            if part.spoken:
                yield from self._speak(part.text, is_last=number + 1 == len(plan.parts))
        if cut or any(piece.finish_reason == "length" for piece in self.pieces):
            self.finish_reason = "length"

    def _room(self, silence: int) -> float:
        """Frames left of the longest speech allowed, after so many samples of silence."""
        if self.plan.longest is None:
            return math.inf
        size = self._config.codec_frame_size
        return (self.plan.longest * size - self.position - silence) // size

    def _speak(self, text: str, is_last: bool) -> Generator[Turn, Emission | None, None]:
        """Turns of one piece, and its entry in `pieces` at the end.

        Where it may be tried again it is finished before its first chunk leaves.
        """
        seed = piece_seed(self.plan.seed, len(self.pieces))
        held: list[Chunk] | None = None
        for attempt in range(self.plan.retry + 1):
            held = [] if self.plan.retry else None
            try:
                piece, codes = yield from self._attempt(text, seed, is_last, held)
                break
            except SickError:
                if attempt == self.plan.retry:
                    raise
                seed = next_seed(seed)
                self.retries += 1
        for chunk in held or ():
            yield self._leaving(chunk)
        self.pieces.append(piece)
        self.codes.append(codes)
        self._learn(piece, codes)

    def _leaving(self, chunk: Chunk) -> Chunk:
        if math.isnan(self.first_audio_s) and not self.pieces:
            self.first_audio_s = self.total_s
        self.position += chunk.samples.size
        self.frames = chunk.end
        return chunk

    def _attempt(
        self, text: str, seed: int, is_last: bool, held: list[Chunk] | None
    ) -> Generator[Turn, Emission | None, tuple[Piece, Codes]]:
        """Turns of one attempt at a piece; its chunks go into `held` instead, if that is given."""
        plan, config = self.plan, self._config
        rate, start, begin = config.codec_sample_rate, self.position, self.frames
        alone = len(plan.parts) == 1
        prompt = self._prompts.build(text, speaker=plan.speaker, reference=self._reference)
        if alone and plan.longest is not None:
            budget = plan.longest
        else:
            length = prompt.columns.shape[1]
            budget = utterance_frames(config, self._most_frames, length, text)
            budget = int(min(budget, self._room(0)))
        sizes = [config.codebook_size] * config.num_codebooks
        monitor = FrameMonitor(sizes, text, config.frame_rate_hz)
        frames: list[Codes] = []
        heard: list[Samples] = []
        decoded = 0
        state = self._decoder.initial_state(1)
        reason: FinishReason | None = None
        yield Request(prompt, budget, plan.sampling, seed)
        while reason is None:
            emission = yield None
            assert emission is not None
            reason = emission.finish_reason
            if emission.codes is not None:
                monitor.see(emission.codes)
                frames.append(emission.codes)
            if reason is not None:
                monitor.finish(reason)
            # Where something follows, a frame is held back until it is known whether it is the
            # last one: that one is faded.
            ready = len(frames) - decoded - (reason is None and not alone)
            if ready < self._chunk_frames[decoded > 0] and (reason is None or not ready):
                continue
            before = time.perf_counter()
            codes = mx.array(np.stack(frames[decoded : decoded + ready], axis=1))[None]
            raw, state = self._decoder.step(codes, state)
            samples = np.array(raw[0])
            self.codec_s += time.perf_counter() - before
            if start and not decoded:
                samples = fade_in(samples, rate)
            if reason is not None and not is_last:
                samples = fade_out(samples, rate)
            heard.append(samples)
            decoded += ready
            chunk = Chunk(samples, begin + decoded - ready, begin + decoded)
            if held is None:
                yield self._leaving(chunk)
            else:
                held.append(chunk)
        whole = np.concatenate(heard) if heard else np.zeros(0, np.float32)
        check_waveform(whole, rate)  # its length was judged in frames
        spoken = (
            np.stack(frames, axis=1) if frames else np.zeros((config.num_codebooks, 0), np.int32)
        )
        end = start + whole.size
        return Piece(text, seed, reason, (start, end), (begin, begin + decoded)), spoken

    def _learn(self, piece: Piece, codes: Codes) -> None:
        """Take the first good piece as the voice, if none was given."""
        if self._own_voice and self._reference is None and piece.finish_reason == "stop":
            self._reference = Reference(piece.text, codes) if codes.shape[1] else None
