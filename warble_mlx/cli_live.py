"""Speech that leaves the command while it is made: to stdout or to the loudspeaker."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from warble_mlx.cli_base import emit

if TYPE_CHECKING:
    from warble_mlx.audio import Samples
    from warble_mlx.speech import Speech, Warble
    from warble_mlx.streaming import Stream


class Outlet(AbstractContextManager["Outlet"], Protocol):
    """Where chunks go. Leaving its context ends the output, so that it is valid."""

    def write(self, samples: Samples) -> None:
        """Let samples [n] follow those before them."""

    def flush(self) -> None:
        """Hold nothing back: the next samples may be long in coming."""


def speak_live(warble: Warble, text: str, output: str | None, raw: bool, **options: Any) -> Speech:
    """Speak to stdout ("-"), as WAV or `raw` PCM, or to the loudspeaker (None).

    Ctrl-C, or a reader that has gone, ends the generation within a frame.
    """
    with warble.stream(text, **options) as stream, _outlet(warble, stream, output, raw) as outlet:
        for chunk in stream:
            outlet.write(chunk.samples)
    return stream.speech


def _outlet(warble: Warble, stream: Stream, output: str | None, raw: bool) -> Outlet:
    if output is not None:
        return Stdout(warble.sample_rate, raw)
    from warble_mlx.player import Player

    plan = stream.plan
    return Player(
        warble.sample_rate,
        burst_s=plan.burst_s(warble.config.frame_rate_hz),
        expected_s=plan.slowest_s,
    )


class Stdout(AbstractContextManager["Stdout"]):
    """16-bit PCM on stdout, `raw` or behind a WAV header.

    A pipe gets a header of unknown length, which players read to the end of the stream; in a
    file it is corrected at the end.
    """

    def __init__(self, sample_rate: int, raw: bool) -> None:
        from warble_mlx.live import Pcm

        self._pcm, self._raw = Pcm(sample_rate), raw
        self._begin: int | None = None  # of the header in a file

    def write(self, samples: Samples) -> None:
        """Let samples [n] follow those before them."""
        following = self._pcm.encode(samples)
        if not self._raw and self._pcm.samples == samples.size:
            self._begin = _position()
            emit(self._pcm.endless_header())
        emit(following)

    def flush(self) -> None:
        """Nothing is ever held back."""

    def __exit__(self, *_: object) -> None:
        if self._begin is not None:
            os.pwrite(sys.stdout.fileno(), self._pcm.header(), self._begin)


def _position() -> int | None:
    """Where stdout writes next, if it is a file in which that can be changed later."""
    try:
        sys.stdout.flush()
        number = sys.stdout.fileno()
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return None
        import fcntl

        appends = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND
        return None if appends else os.lseek(number, 0, os.SEEK_CUR)
    except (OSError, ImportError):
        return None
