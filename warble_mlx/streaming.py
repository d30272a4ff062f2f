"""Speech while it is made: chunk by chunk, for a loop or for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.errors import SickError, WarbleError
from warble_mlx.reading import Chunk, Piece, Plan, Progress, Reading
from warble_mlx.results import Speech, Timings

_Result = TypeVar("_Result")


class Stream(Iterator[Chunk]):
    """Chunks of a speech while it is generated. `speech` is there after the last one.

    Closing it, or leaving its `with` block, stops the generation within a frame.
    """

    def __init__(self, reading: Reading, model: str, sample_rate: int, keep_samples: bool) -> None:
        self._reading = reading
        self._model, self._sample_rate = model, sample_rate
        self._kept: list[npt.NDArray[np.float32]] | None = [] if keep_samples else None
        self._chunks = reading.chunks()
        self._is_closed = False
        self._speech: Speech | None = None

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            if isinstance(error, SickError):
                error.warnings = self._reading.plan.warnings
            self._is_closed = True  # a generator that has raised looks like one at its end
            raise
        if chunk is None:
            if self._speech is None and not self._is_closed:
                self._speech = self._whole()
            raise StopIteration
        if self._kept is not None:
            self._kept.append(chunk.samples)
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Let the iteration end within a frame, wherever it runs: for another thread.

        `speech` stays unavailable unless the stream had ended.
        """
        self._is_closed = True
        self._reading.stop()

    def close(self) -> None:
        """Stop generating. `speech` stays unavailable unless the stream had ended."""
        self.stop()
        self._chunks.close()

    @property
    def plan(self) -> Plan:
        """What is said, and how."""
        return self._reading.plan

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of the text that are finished. One is here before the chunk after it is."""
        return tuple(self._reading.pieces)

    @property
    def progress(self) -> Progress:
        """What `Warble.perform` needs to go on behind the last of `pieces`."""
        return self._reading.progress

    @property
    def speech(self) -> Speech:
        """The whole speech; raises WarbleError before the stream has ended.

        Its `samples` are empty unless the stream was made with keep_samples.
        """
        if self._speech is None:
            raise WarbleError("the stream has not ended: iterate over it first")
        return self._speech

    def _whole(self) -> Speech:
        reading, plan = self._reading, self._reading.plan
        total_s, codec_s = reading.total_s, reading.codec_s
        kept = self._kept
        return Speech(
            samples=np.concatenate(kept) if kept else np.zeros(0, np.float32),
            sample_rate=self._sample_rate,
            codes=reading.all_codes,
            finish_reason=reading.finish_reason,
            seed=reading.pieces[0].seed if len(reading.pieces) == 1 else plan.seed,
            text=plan.text,
            voice=plan.voice,
            model=self._model,
            timings=Timings(reading.first_audio_s, total_s - codec_s, codec_s, total_s),
            warnings=plan.warnings,
            retries=reading.retries,
            pieces=tuple(reading.pieces),
            streamed=None if kept is not None else reading.position,
        )


def computing_thread() -> ThreadPoolExecutor:
    """An executor of one thread that may use MLX and may end at any time."""
    return ThreadPoolExecutor(1, thread_name_prefix="warble", initializer=_Ending.watch)


class _Ending:
    """Lives as long as its thread. Recent versions of MLX give a thread streams of its own, and a
    process that ends right after such a thread is aborted unless they were closed in it."""

    _of_this_thread = threading.local()

    @classmethod
    def watch(cls) -> None:
        cls._of_this_thread.ending = cls()

    def __del__(self) -> None:
        clear = getattr(mx, "clear_streams", None)
        if clear is not None:
            clear()


class AsyncStream(AsyncIterator[Chunk]):
    """A `Stream` for an event loop, which stays free while the model works.

    Everything is computed in `worker`, one thread: MLX arrays belong to the thread that made
    them. A chunk is made when it is asked for, so a slow reader slows the generation down.
    Cancelling a task that waits here, `aclose`, or leaving the `async with` block stops the
    generation within a frame; after that the stream is at its end.
    """

    def __init__(self, start: Callable[[], Stream], worker: Executor) -> None:
        self._start, self._worker = start, worker
        self._stream: Stream | None = None
        self._is_closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._in_worker(self._next)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> AsyncStream:
        await self._in_worker(self._started)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop generating, and wait until that is done."""
        self._stop()
        if self._stream is not None:
            await self._in_worker(self._stream.close)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """As `Stream.pieces`."""
        return self._stream.pieces if self._stream else ()

    @property
    def speech(self) -> Speech:
        """As `Stream.speech`."""
        if self._stream is None:
            raise WarbleError("the stream has not begun: iterate over it first")
        return self._stream.speech

    async def _in_worker(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except asyncio.CancelledError:
            self._stop()  # the thread cannot be cancelled, only asked
            raise

    def _stop(self) -> None:
        self._is_closed = True
        if self._stream is not None:
            self._stream.stop()

    def _started(self) -> Stream:
        if self._stream is None:
            self._stream = self._start()
            if self._is_closed:  # in the meantime
                self._stream.stop()
        return self._stream

    def _next(self) -> Chunk | None:
        return None if self._is_closed else next(self._started(), None)
