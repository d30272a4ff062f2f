"""A loudspeaker without sound: it stands in for the module sounddevice and keeps what it was given.

Time passes for it when a test says so (`play_for`), or by itself once `run` was called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 441  # frames that the device asks for at once: 10 ms


class PortAudioError(Exception):
    """Known by its name, like the library's own."""


class CallbackStop(Exception):
    """Raised by the callback behind the last samples."""


class Loudspeaker:
    """What of sounddevice is used."""

    PortAudioError = PortAudioError
    CallbackStop = CallbackStop

    def __init__(self, *, broken: bool = False, runs: bool = False) -> None:
        self.broken, self.runs = broken, runs
        self.active = False
        self.log: list[str] = []
        self.blocks: list[npt.NDArray[np.float32]] = []
        self.settings: dict[str, Any] = {}
        self._is_over = threading.Event()

    def query_devices(self, kind: str) -> dict[str, str]:
        assert kind == "output"
        if self.broken:
            raise PortAudioError("Error querying device -1")
        return {"name": "Speakers"}

    def OutputStream(
        self,
        *,
        callback: Callable[..., None],
        finished_callback: Callable[[], None],
        **settings: Any,
    ) -> Loudspeaker:
        if self.broken:
            raise PortAudioError("no device")
        self.settings, self._is_over = settings, threading.Event()
        self._callback, self._finished = callback, finished_callback
        return self

    def start(self) -> None:
        self.log.append("start")
        self.active = True
        if self.runs:
            self.run()

    def abort(self) -> None:
        self.log.append("abort")
        self._end()

    def close(self) -> None:
        self.log.append("close")
        self._end()

    def play_for(self, seconds: float) -> None:
        """Let so much time pass, to the next whole block."""
        for _ in range(round(seconds * 44_100 / BLOCK)):
            self._next()

    def run(self) -> None:
        """From now on play as fast as possible, in a thread of its own like PortAudio."""

        is_over = self._is_over

        def play() -> None:
            while not is_over.is_set():
                self._next()
                time.sleep(0.0005)

        threading.Thread(target=play, daemon=True).start()

    @property
    def heard(self) -> npt.NDArray[np.float32]:
        """Everything that was played, silence included."""
        return np.concatenate([np.zeros(0, np.float32), *self.blocks])

    def _next(self) -> None:
        if self._is_over.is_set():
            return
        block = np.full((BLOCK, 1), 9, np.float32)  # as dirty as PortAudio's buffer
        try:
            self._callback(block, BLOCK, None, None)
        except CallbackStop:
            self._end()
        self.blocks.append(block[:, 0])

    def _end(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self.active = False
            self._finished()
