"""Playing speech on this machine's loudspeaker, through PortAudio, while it is still being made.

Generated chunks go into a queue; PortAudio's own thread takes from it. Nothing is heard until
the queue holds enough (`needed_s`), and then there are no gaps: while a chunk of `burst_s` seconds
is made, which takes RTF · `burst_s`, at least that much is left to play. Should the machine become
slower than it was measured and the queue run dry, playing waits until there is enough again.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warble_mlx.errors import AudioError, MissingExtraError

if TYPE_CHECKING:
    from warble_mlx.audio import Samples

_SAFETY = 1.5  # of the measured time for a chunk
_JITTER_S = 0.05
_POLL_S = 0.1  # Ctrl-C is noticed that soon on systems where waiting cannot be interrupted
_MOST_S = 60.0  # in the queue; then whoever makes the speech waits for the listener


def can_play() -> bool:
    """Whether the extra `play` is installed and there is an output device."""
    return why_mute() is None


def why_mute() -> str | None:
    """What playing lacks on this machine and how to get it; None if nothing."""
    try:
        if _sounddevice().query_devices(kind="output"):
            return None
    except (MissingExtraError, AudioError) as error:
        return str(error)
    except (ValueError, OSError):
        pass
    except Exception as error:
        if not _is_portaudio(error):
            raise
    return "this machine has no loudspeaker"


def needed_s(rtf: float, burst_s: float, left_s: float) -> float:
    """Seconds of audio to have before playing, so that it never has to stop.

    rtf: seconds it takes to make one second of audio; burst_s: the longest stretch that arrives
    at once; left_s: how much is still to be made, at most. Above an RTF of 1 the queue shrinks all
    the time, so the whole difference must be there at the start.
    """
    return _SAFETY * rtf * burst_s + _JITTER_S + max(0.0, rtf - 1) * left_s


class Player:
    """A loudspeaker to write samples to, as a context: leaving it waits until all was heard.

    After an exception, Ctrl-C included, it falls silent at once.

    burst_s: longest stretch that is written at once; expected_s: length of the whole, at most.
    Raises MissingExtraError without sounddevice, AudioError without a device.
    """

    def __init__(
        self,
        sample_rate: int,
        *,
        burst_s: float,
        expected_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from warble_mlx.live import Level

        self.gaps = 0  # how often the queue ran dry
        self._rate, self._burst_s, self._expected_s = sample_rate, burst_s, expected_s
        self._clock = clock
        self._level = Level(sample_rate)
        self._lock = threading.Lock()
        self._queue: deque[Samples] = deque()
        self._queued = 0  # samples in it
        self._first: float | None = None  # when the first chunk came
        self._made_s = 0.0  # audio since then
        self._enough = math.inf  # samples to wait for
        self._is_playing = False
        self._is_due = False
        self._is_complete = False
        self._is_heard = threading.Event()
        sounddevice = self._sounddevice = _sounddevice()
        try:
            self._device = sounddevice.OutputStream(
                samplerate=sample_rate,
                channels=1,
                dtype="float32",
                callback=self._fill,
                finished_callback=self._is_heard.set,
            )
            self._device.start()
        except Exception as error:
            raise _cannot_play(error) from error

    def write(self, samples: Samples) -> None:
        """Play `samples` [n] behind those written before; AudioError if they are no audio."""
        loud = self._level(samples)
        now = self._clock()
        if self._first is None:  # how long it took says nothing about the following ones
            self._first = now
        else:
            self._made_s += loud.size / self._rate
            left_s = max(0.0, self._expected_s - self._made_s)
            rtf = (now - self._first) / self._made_s
            self._enough = needed_s(rtf, self._burst_s, left_s) * self._rate
        with self._lock:
            self._is_due = False
            self._queue.append(loud)
            self._queued += loud.size
        while self._queued > max(_MOST_S * self._rate, self._enough):
            time.sleep(_POLL_S)
        self._first += self._clock() - now

    def flush(self) -> None:
        """Play what there is, however little: the next samples may be long in coming."""
        self._is_due = True

    def __enter__(self) -> Player:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._is_complete = True
                # A device that is unplugged ends without a word.
                while not self._is_heard.wait(_POLL_S) and self._device.active:
                    pass
            else:
                self._device.abort()
        except KeyboardInterrupt:
            self._device.abort()
            raise
        finally:
            self._device.close()

    def _fill(self, out: Any, frames: int, _time: object, _status: object) -> None:
        """Fill PortAudio's buffer float32 [frames, 1]; called from its thread."""
        out.fill(0)
        with self._lock:
            if not self._is_playing:
                wanted = 1 if self._is_due else max(self._enough, 1)
                if not self._is_complete and self._queued < wanted:
                    return
                self._is_playing = True
            at = 0
            while at < frames and self._queue:
                chunk = self._queue.popleft()
                taken = chunk[: frames - at]
                out[at : at + taken.size, 0] = taken
                at += taken.size
                if taken.size < chunk.size:
                    self._queue.appendleft(chunk[taken.size :])
            self._queued -= at
            if at == frames:
                return
            if self._is_complete:
                raise self._sounddevice.CallbackStop
            self._is_playing = False
            self.gaps += 1


def _cannot_play(error: Exception) -> Exception:
    if not _is_portaudio(error):
        return error
    return AudioError(
        f"the loudspeaker cannot be used ({error}): write a file instead, with -o speech.wav"
    )


def _sounddevice() -> Any:
    try:
        return importlib.import_module("sounddevice")
    except ModuleNotFoundError as error:
        raise MissingExtraError("Playing", "sounddevice", "play") from error
    except OSError as error:  # the package is there, the library it stands on is not
        raise AudioError(
            f"playing needs PortAudio ({error}): sudo apt install libportaudio2"
        ) from error


def _is_portaudio(error: Exception) -> bool:
    return type(error).__name__ == "PortAudioError"
