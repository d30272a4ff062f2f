"""`warble -`: text from a pipe, spoken while it arrives."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from warble_mlx.arriving import ArrivingText
from warble_mlx.cli_base import TRUNCATED_STATUS, say_so
from warble_mlx.cli_live import Outlet, Stdout
from warble_mlx.errors import SickError, TextError

if TYPE_CHECKING:
    from warble_mlx.options import Options
    from warble_mlx.results import Speech
    from warble_mlx.speech import Warble

_BLOCK = 1 << 16  # bytes that are read at once, at most


class Arrivals(Iterator[str]):
    """Sentences and lines from stdin as they come. `waited_s`: how long it was waited for them."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._text = ArrivingText()
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._ready: list[str] = []
        self._ended = False

    def __next__(self) -> str:
        while not self._ready:
            if self._ended:
                raise StopIteration
            self._read()
        return self._ready.pop(0)

    def _read(self) -> None:
        started = time.perf_counter()
        raw = sys.stdin.buffer.read1(_BLOCK)  # type: ignore[union-attr]
        self.waited_s += time.perf_counter() - started
        self._ended = not raw
        try:
            self._ready += self._text.add(self._decoder.decode(raw, self._ended))
        except UnicodeDecodeError as error:
            raise TextError(
                "the text on stdin is not UTF-8: convert it, for example with iconv -f ISO-8859-1"
                " -t UTF-8"
            ) from error
        if self._ended:
            self._ready += self._text.finish()


def speak_arriving(
    warble: Warble, output: str | None, raw: bool, **options: Any
) -> tuple[list[Speech], int]:
    """Speak stdin, piece by piece, to stdout ("-") or the loudspeaker (None).

    options: those of `Warble.say`. Returns what was said, without samples, and the exit status: a
    piece that fails or is cut is told of, and the others are spoken. Raises TextError if there was
    nothing to say.
    """
    from warble_mlx.options import pause_of
    from warble_mlx.prompt import Reference
    from warble_mlx.reading import piece_seed

    arrivals = Arrivals()
    first = next(arrivals, None)
    if first is None:
        raise TextError("there is nothing to say: the text is empty")
    speeches: list[Speech] = []
    own_voice: Reference | None = None
    status = 0
    silence = np.zeros(round(pause_of(cast("Options", options)) * warble.sample_rate), np.float32)
    plan = warble.plan(first, **options)
    with _outlet(warble, output, raw, arrivals) as outlet:
        number = 0
        while True:
            if own_voice and not plan.speaker and plan.reference is None:
                plan = replace(plan, reference=own_voice)
            try:
                with warble.perform(plan) as stream:
                    if number and silence.size:
                        outlet.write(silence)
                    for chunk in stream:
                        outlet.write(chunk.samples)
                speech = stream.speech
                speeches.append(speech)
                if speech.finish_reason == "length":
                    status = status or TRUNCATED_STATUS
                elif own_voice is None:
                    # A model that is given no voice would take another one for every piece.
                    own_voice = Reference(speech.text, speech.codes)
            except SickError as error:
                say_so(str(error))
                status = error.exit_status
            outlet.flush()
            following = next(arrivals, None)
            if following is None:
                return speeches, status
            number += 1
            seed = options.get("seed")
            base = speeches[0].seed if seed is None and speeches else seed
            plan = warble.plan(
                following, **{**options, "seed": None if base is None else piece_seed(base, number)}
            )


def _outlet(warble: Warble, output: str | None, raw: bool, arrivals: Arrivals) -> Outlet:
    if output is not None:
        return Stdout(warble.sample_rate, raw)
    from warble_mlx.player import Player
    from warble_mlx.reading import NEXT_CHUNK

    return Player(
        warble.sample_rate,
        burst_s=NEXT_CHUNK / warble.config.frame_rate_hz,
        expected_s=0,  # nobody knows
        # Waiting for text does not make the machine a slow one.
        clock=lambda: time.perf_counter() - arrivals.waited_s,
    )


def summary(speeches: list[Speech]) -> str:
    """What was said, on one line."""
    seconds = sum(speech.seconds for speech in speeches)
    took_s = sum(speech.timings.total_s for speech in speeches)
    if not seconds:
        return "nothing was said"
    first_ms = speeches[0].timings.first_audio_s * 1000
    return (
        f"{seconds:.2f} s of speech in {took_s:.2f} s (RTF {took_s / seconds:.2f}),"
        f" {len(speeches)} pieces, first audio {first_ms:.0f} ms, seed {speeches[0].seed}"
    )
