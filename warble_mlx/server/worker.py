"""What owns the model, in one thread: takes jobs, speaks them side by side, hands out samples.

A job waits in a bounded line for a row, is spoken beside others, and may be given up at any time;
that is noticed before the next frame. All a job's client gets are `Audio`s and one `End`, through
a callback that this thread calls.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.ensemble import Ensemble, Event
from warble_mlx.errors import SickError, WarbleError
from warble_mlx.reading import Reading
from warble_mlx.server.settings import Settings
from warble_mlx.speech import Warble

_Result = TypeVar("_Result")
_TIDY_EVERY = 32  # ended jobs, after which unused buffers are given back


class Audio(NamedTuple):
    """Samples float32 [n] of a job."""

    samples: npt.NDArray[np.float32]


@dataclass(frozen=True)
class End:
    """How a job ended. reason: `stop`, `length`, or a short name for what went wrong; then
    `message` is the sentence and `status` the HTTP status it deserves."""

    reason: str
    message: str = ""
    status: int = 200
    seconds: float = 0.0  # of speech
    frames: int = 0


class Begin(NamedTuple):
    """A job has been checked and has its row."""

    voice: str | None
    seed: int
    warnings: tuple[str, ...]


Out = Begin | Audio | End


class Outbox:
    """Takes what the worker's thread says about a job into the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Out] = asyncio.Queue()

    def put(self, out: Out) -> None:
        """Called by the worker."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, out)
        except RuntimeError:
            return  # the loop has been closed: nobody listens

    async def get(self) -> Out:
        """The next of them."""
        return await self._queue.get()


class BusyError(WarbleError):
    """The line is full, or the server is closing; `retry_after_s` says when to come again."""

    def __init__(self, message: str, status: int, retry_after_s: int) -> None:
        self.status, self.retry_after_s = status, retry_after_s
        super().__init__(message)


@dataclass(eq=False)
class Job:
    """One text to speak. `options` are those of `Warble.plan`."""

    text: str
    options: dict[str, Any]
    tell: Callable[[Out], None]
    asked_at: float = field(default_factory=time.monotonic)
    began_at: float = math.nan
    first_at: float = math.nan
    given_up: str = ""  # why, once nobody wants it any more
    samples: int = 0  # made
    taken: int = 0  # of them, by the client

    def give_up(self, reason: str) -> None:
        """Nobody wants it any more; its row is free before the next frame."""
        self.given_up = self.given_up or reason


class Worker:
    """Loads the model by `load` and serves until `stop`: in the thread that calls `run`.

    A process does best to call it in its main thread. MLX keeps something for every thread that
    used it, and aborts a process that ends in the moment after such a thread has ended.
    """

    def __init__(self, load: Callable[[], Warble], settings: Settings) -> None:
        self._load, self._settings = load, settings
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._tasks: deque[tuple[Callable[[Warble], Any], Future[Any]]] = deque()
        self._speaking: dict[Reading, Job] = {}
        self._loaded: Future[Warble] = Future()
        self._closing = self._stopping = False
        self._row_s = 5.0  # how long a job holds its row, on the average
        self._ended = 0
        self.on_end: Callable[[Job, End], None] = lambda job, end: None

    # ------------------------------------------------------------------ from other threads

    def ready(self) -> Warble:
        """Wait for the model and return it; raises what loading raised."""
        return self._loaded.result()

    @property
    def is_closing(self) -> bool:
        """Whether nothing new is taken."""
        return self._closing

    @property
    def busy(self) -> int:
        """Rows in use."""
        return len(self._speaking)

    @property
    def waiting(self) -> int:
        """Jobs without a row."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Put a job in line. Raises BusyError when there is no place."""
        settings = self._settings
        with self._change:
            if self._closing:
                raise BusyError("the server is closing", 503, 5)
            free = settings.rows - self.busy  # some that wait are about to get a row
            if len(self._waiting) >= settings.queue + free:
                wait = math.ceil(len(self._waiting) / settings.rows * self._row_s)
                raise BusyError(
                    f"{settings.queue} requests are waiting already: come again later",
                    429,
                    min(max(wait, 1), 120),
                )
            self._waiting.append(job)
            self._change.notify()

    def do(self, task: Callable[[Warble], _Result]) -> Future[_Result]:
        """Let this thread do something else with the model, between two frames."""
        future: Future[_Result] = Future()
        with self._change:
            if self._closing:
                raise BusyError("the server is closing", 503, 5)
            self._tasks.append((task, future))
            self._change.notify()
        return future

    def shut_door(self) -> None:
        """Take nothing new; what waits is sent away, what is being spoken goes on."""
        # Called by a signal handler: it must not wait for a lock that its own thread may hold.
        self._closing = True

    def stop(self) -> None:
        """Give up everything and let `run` return."""
        self._closing = self._stopping = True

    # ------------------------------------------------------------------ in the model's thread

    def run(self) -> None:
        """Load, then serve until stopped. Raises what loading raises, which `ready` does, too."""
        try:
            warble = self._load()
            with warble.stream("A.", seed=0) as stream:  # or the first client would wait longer
                next(stream)
        except BaseException as error:
            self._loaded.set_exception(error)
            raise
        self._loaded.set_result(warble)
        ahead = round(self._settings.ahead_s * warble.sample_rate)

        def may_go_on(reading: Reading) -> bool:
            """Whether the job's client keeps up."""
            job = self._speaking[reading]
            return job.samples - job.taken < ahead

        def empty() -> Ensemble:
            return Ensemble(warble.engine, self._settings.rows, may_go_on)

        ensemble = empty()
        while not self._stopping:
            with self._change:
                if not (self._waiting or self._tasks) and ensemble.is_resting:
                    self._change.wait(timeout=0.05)
            try:
                self._turn(warble, ensemble)
            except Exception as error:  # a defect, or the machine's: this one serving must go on
                message = f"unexpected error: {type(error).__name__}: {error}"
                for job in self._speaking.values():
                    self._end(job, End("internal", message, 500))
                self._speaking.clear()
                ensemble = empty()
        for job in [*self._speaking.values(), *self._waiting]:
            self._end(job, End("closing", "the server is closing", 503))
        self._speaking.clear()
        self._waiting.clear()
        for _, future in self._tasks:
            future.set_exception(BusyError("the server is closing", 503, 5))

    def _turn(self, warble: Warble, ensemble: Ensemble) -> None:
        """One frame for everybody, after those who come and go."""
        if self._tasks:
            task, future = self._tasks.popleft()
            try:
                future.set_result(task(warble))
            except Exception as error:
                future.set_exception(error)
        self._send_away()
        for reading, job in list(self._speaking.items()):
            if time.monotonic() - job.began_at > self._settings.speech_timeout_s:
                job.give_up("speech-timeout")
            if job.given_up:
                ensemble.stop(reading)
                self._over(reading, self._given_up(job))
        while ensemble.room:
            with self._change:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            self._begin(warble, ensemble, job)
        for event in ensemble.step():
            self._pass_on(event)

    def _send_away(self) -> None:
        """End those in line whom nobody waits for, or who have waited too long."""
        now = time.monotonic()
        with self._change:
            waiting = list(self._waiting)
            for job in waiting:
                if self._closing:
                    job.give_up("closing")
                elif now - job.asked_at > self._settings.queue_timeout_s:
                    job.give_up("queue-timeout")
                if job.given_up:
                    self._waiting.remove(job)
        for job in waiting:
            if job.given_up:
                self._end(job, self._given_up(job))

    def _given_up(self, job: Job) -> End:
        message, status = {
            "queue-timeout": ("no row became free in time: come again later", 503),
            "speech-timeout": ("the speech took too long and was stopped", 504),
            "closing": ("the server is closing", 503),
        }.get(job.given_up, (job.given_up, 499))
        return End(job.given_up, message, status)

    def _begin(self, warble: Warble, ensemble: Ensemble, job: Job) -> None:
        try:
            plan = warble.plan(job.text, **job.options)
        except WarbleError as error:
            self._end(job, End("bad-request", str(error), 400))
            return
        reading = warble.reading(plan)
        job.began_at = time.monotonic()
        self._speaking[reading] = job
        job.tell(Begin(plan.voice, plan.seed, plan.warnings))
        for event in ensemble.start(reading):
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        job, reading = self._speaking[event.reading], event.reading
        if event.chunk is not None:
            job.samples += event.chunk.samples.size
            if math.isnan(job.first_at):
                job.first_at = time.monotonic()
            job.tell(Audio(event.chunk.samples))
        elif event.error is None:
            rate = reading.position / self.ready().sample_rate
            self._over(reading, End(reading.finish_reason, "", 200, rate, reading.frames))
        else:
            error = event.error
            reason = error.reason if isinstance(error, SickError) else "speech-failed"
            self._over(reading, End(reason, str(error), 500))

    def _over(self, reading: Reading, end: End) -> None:
        job = self._speaking.pop(reading)
        self._row_s += 0.1 * (time.monotonic() - job.began_at - self._row_s)
        self._end(job, end)
        self._ended += 1
        if self._ended % _TIDY_EVERY == 0 or not self._speaking:
            mx.clear_cache()

    def _end(self, job: Job, end: End) -> None:
        self.on_end(job, end)
        job.tell(end)
