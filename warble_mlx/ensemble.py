"""Several readings spoken side by side: each has a row of one batch while it speaks.

    readings ──requests──► Batch ──emissions──► readings ──► chunks, in the order they are ready

A reading may join between any two frames and be stopped at any time; the others do not notice.
What a reading says does not depend on its neighbours, up to the summation order of the matrix
products (see `warble_mlx.engine`). Everything happens in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from warble_mlx.engine import Batch, Emission, Engine, Request
from warble_mlx.errors import WarbleError
from warble_mlx.reading import Chunk, Reading, Turn


class Event(NamedTuple):
    """What became of a reading: a chunk; or its end, if that is None; or why it failed."""

    reading: Reading
    chunk: Chunk | None = None
    error: WarbleError | None = None

    @property
    def is_end(self) -> bool:
        """Whether nothing more will come of the reading."""
        return self.chunk is None


@dataclass(eq=False)
class _Speaker:
    reading: Reading
    turns: Generator[Turn, Emission | None, None]
    number: int = -1  # of its request in the batch
    parked: Request | None = None  # not yet in the batch


class Ensemble:
    """Speaks up to `rows` readings at once. Only the thread that loaded the model may use it.

    may_go_on: asked before each piece of a reading; one that may not is asked for again at every
    step, and costs nothing meanwhile.
    """

    def __init__(
        self, engine: Engine, rows: int, may_go_on: Callable[[Reading], bool] = lambda _: True
    ) -> None:
        if rows < 1:
            raise WarbleError(f"at least one row is needed, not {rows}")
        self.rows = rows
        self._engine = engine
        self._batch = Batch(engine, rows, elastic=True)
        self._speakers: dict[Reading, _Speaker] = {}
        self._by_number: dict[int, _Speaker] = {}
        self._requests = 0
        self._may_go_on = may_go_on

    @property
    def busy(self) -> int:
        """How many readings are being spoken."""
        return len(self._speakers)

    @property
    def room(self) -> int:
        """How many more may start."""
        return self.rows - self.busy

    @property
    def is_resting(self) -> bool:
        """Whether no frame is being made: every reading waits until it may go on."""
        return not self._by_number

    def start(self, reading: Reading) -> Iterator[Event]:
        """Let a reading join; yields what it brings at once. Raises WarbleError without room."""
        if not self.room:
            raise WarbleError(f"all {self.rows} rows are busy: stop a reading or wait for an end")
        speaker = self._speakers[reading] = _Speaker(reading, reading.turns())
        yield from self._drive(speaker, None)

    def stop(self, reading: Reading) -> None:
        """Give a reading up; nothing more comes of it. One that has ended is left as it is."""
        speaker = self._speakers.pop(reading, None)
        if speaker is not None:
            self._release(speaker)
            speaker.turns.close()

    def step(self) -> Iterator[Event]:
        """One frame for every reading, and the chunks, ends and failures that come of it."""
        for speaker in list(self._speakers.values()):
            if speaker.parked is not None and self._may_go_on(speaker.reading):
                yield from self._drive(speaker, None)
        for emission in self._batch.step():
            wanting = self._by_number.get(emission.request)
            if wanting is not None:
                yield from self._drive(wanting, emission)
        if not self._speakers:
            # Rows and caches of the busiest time need not be carried on with.
            self._batch = Batch(self._engine, self.rows, elastic=True)

    def _drive(self, speaker: _Speaker, answer: Emission | None) -> Iterator[Event]:
        """Let a reading go on until it waits for the next frame, or is over."""
        reading = speaker.reading
        go_on: Callable[[], Turn] = partial(speaker.turns.send, answer)
        while reading in self._speakers:
            turn: Turn = speaker.parked
            if turn is not None:
                speaker.parked = None
            else:
                try:
                    turn = go_on()
                except StopIteration:
                    self.stop(reading)
                    yield Event(reading)
                    return
                except WarbleError as error:
                    self.stop(reading)
                    yield Event(reading, error=error)
                    return
                go_on = partial(speaker.turns.send, None)
            if turn is None:
                return
            if isinstance(turn, Chunk):
                yield Event(reading, turn)
                continue
            self._release(speaker)  # it may want another one before the last has ended
            if not self._may_go_on(reading):
                speaker.parked = turn
                return
            try:
                self._requests += 1
                self._batch.join(self._requests, turn)
                speaker.number = self._requests
                self._by_number[speaker.number] = speaker
            except WarbleError as error:
                go_on = partial(speaker.turns.throw, error)

    def _release(self, speaker: _Speaker) -> None:
        if self._by_number.pop(speaker.number, None) is not None:
            self._batch.leave(speaker.number)
