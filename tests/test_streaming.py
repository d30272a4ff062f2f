"""Streams in a loop and in an event loop: what they yield, and that they stop within a frame."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from speaking import quick_warble

import warble_mlx
from warble_mlx import Speech, Warble
from warble_mlx.engine import Request
from warble_mlx.errors import SickError, TextError, WarbleError
from warble_mlx.reading import FIRST_CHUNK

TEXT = "Alpha one, the first of them.\n\nBravo two, which is the second.\n\nCedar three."
SEED = 4


class Watch:
    """Counts frames, and does something at one of them."""

    def __init__(self) -> None:
        self.frames = 0
        self.threads: set[str] = set()
        self.at: dict[int, Callable[[], object]] = {}

    def __call__(self, _number: int, _frame: int, _request: Request) -> None:
        self.frames += 1
        self.threads.add(threading.current_thread().name)
        self.at.get(self.frames, int)()


WATCH = Watch()


@pytest.fixture(scope="module")
def loaded() -> Warble:
    return quick_warble(WATCH)[0]


@pytest.fixture
def warble(loaded: Warble) -> Warble:
    vars(WATCH).update(vars(Watch()))
    return loaded


@pytest.fixture
def whole(warble: Warble) -> Speech:
    speech = warble.say(TEXT, seed=SEED)
    vars(WATCH).update(vars(Watch()))
    return speech


# ---------------------------------------------------------------------- in a loop


@pytest.mark.parametrize("frame", [2, 9, 40])
def test_a_stop_from_another_thread_ends_within_a_frame(warble: Warble, frame: int) -> None:
    stream = warble.stream(TEXT, seed=SEED)
    WATCH.at[frame] = stream.stop
    list(stream)
    assert WATCH.frames == frame
    with pytest.raises(WarbleError, match="has not ended"):
        _ = stream.speech


def test_a_stop_counts_where_a_piece_is_held_back_for_another_attempt(warble: Warble) -> None:
    stream = warble.stream(TEXT, seed=SEED, retry=1)
    WATCH.at[5] = stream.stop
    assert not list(stream)
    assert WATCH.frames == 5


def test_closing_asks_for_no_further_frame(warble: Warble) -> None:
    with warble.stream(TEXT, seed=SEED) as stream:
        next(stream)
        asked = WATCH.frames
    assert not list(stream)
    assert WATCH.frames == asked <= FIRST_CHUNK + 1


def test_with_retry_a_piece_is_whole_before_it_is_heard(warble: Warble, whole: Speech) -> None:
    stream = warble.stream(TEXT, seed=SEED, retry=1, keep_samples=True)
    next(stream)
    first = whole.pieces[0]
    assert WATCH.frames == first.frames[1]
    list(stream)
    assert np.array_equal(stream.speech.samples, whole.samples)


# ---------------------------------------------------------------------- in an event loop


def run(work: Callable[[], Awaitable[object]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(bounded())


def test_an_event_loop_gets_the_same_speech(warble: Warble, whole: Speech) -> None:
    async def work() -> None:
        async with warble.astream(TEXT, seed=SEED, keep_samples=True) as stream:
            chunks = [chunk async for chunk in stream]
            assert [chunk async for chunk in stream] == []  # the end stays the end
        assert np.array_equal(np.concatenate([c.samples for c in chunks]), whole.samples)
        assert np.array_equal(stream.speech.samples, whole.samples)
        assert np.array_equal(stream.speech.codes, whole.codes)
        assert stream.pieces == whole.pieces

    run(work)


def test_no_context_is_needed(warble: Warble, whole: Speech) -> None:
    async def work() -> None:
        total = 0
        async for chunk in warble.astream(TEXT, seed=SEED):
            total += chunk.samples.size
        assert total == whole.samples.size

    run(work)


def test_the_event_loop_is_free_meanwhile(warble: Warble) -> None:
    """A frame waits for the loop to turn: were the loop blocked, it would wait for ever."""
    turned = threading.Event()
    turns = []

    def wait() -> None:
        turned.clear()
        turns.append(turned.wait(30))

    WATCH.at.update(dict.fromkeys((1, 3, 20), wait))

    async def work() -> None:
        async def turn() -> None:
            while True:
                turned.set()
                await asyncio.sleep(0.001)

        turning = asyncio.ensure_future(turn())
        async for _ in warble.astream(TEXT, seed=SEED):
            pass
        turning.cancel()

    run(work)
    assert turns == [True] * 3
    assert len(WATCH.threads) == 1
    assert WATCH.threads != {threading.current_thread().name}


def test_leaving_the_block_stops(warble: Warble) -> None:
    async def work() -> None:
        async with warble.astream(TEXT, seed=SEED) as stream:
            async for _ in stream:
                break
            asked = WATCH.frames
        assert [chunk async for chunk in stream] == []
        assert WATCH.frames == asked
        with pytest.raises(WarbleError, match="has not ended"):
            _ = stream.speech

    run(work)


@pytest.mark.parametrize("in_block", [True, False])
def test_cancelling_stops_within_a_frame(warble: Warble, in_block: bool) -> None:
    reached, cancelled = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert cancelled.wait(30)

    WATCH.at[9] = hold  # in the middle of a chunk

    async def work() -> None:
        stream = warble.astream(TEXT, seed=SEED)

        async def listen() -> None:
            if in_block:
                async with stream:
                    async for _ in stream:
                        pass
            else:
                async for _ in stream:
                    pass

        task = asyncio.ensure_future(listen())
        while not reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()  # and waits for the frame that was under way
        assert WATCH.frames == 9
        assert [chunk async for chunk in stream] == []

    run(work)


def test_closing_from_another_task_ends_the_loop(warble: Warble) -> None:
    async def work() -> None:
        stream = warble.astream(TEXT, seed=SEED)
        WATCH.at[9] = stream._stop
        async for _ in stream:
            pass
        assert WATCH.frames == 9

    run(work)


def test_inputs_are_checked_at_the_first_wait(warble: Warble) -> None:
    with pytest.raises(TypeError, match="speed"):
        warble.astream("Hello.", speed=2)  # type: ignore[call-arg]

    async def work() -> None:
        stream = warble.astream("")
        with pytest.raises(WarbleError, match="has not begun"):
            _ = stream.speech
        assert stream.pieces == ()
        with pytest.raises(TextError):
            async with stream:
                raise AssertionError("it was entered")
        with pytest.raises(TextError):
            await warble.astream("…").__anext__()
        await stream.aclose()

    run(work)


def test_a_sick_stream_raises_where_it_is_waited_for(warble: Warble) -> None:
    def sick() -> None:
        raise SickError("codes-repeat", "seen", "cause", "remedy")

    WATCH.at[30] = sick

    async def work() -> None:
        with pytest.raises(SickError, match="codes-repeat"):
            async for _ in warble.astream(TEXT, seed=SEED):
                pass

    run(work)


def test_two_streams_take_turns(warble: Warble, whole: Speech) -> None:
    async def work() -> None:
        first, second = (warble.astream(TEXT, seed=s, keep_samples=True) for s in (SEED, SEED + 1))

        async def listen(stream: warble_mlx.AsyncStream) -> int:
            return len([chunk async for chunk in stream])

        await asyncio.gather(listen(first), listen(second))
        assert np.array_equal(first.speech.samples, whole.samples)
        assert not np.array_equal(second.speech.codes, whole.codes)

    run(work)


def test_the_real_model_speaks_in_its_own_thread() -> None:
    before = set(threading.enumerate())

    async def work() -> None:
        warble = warble_mlx.load()
        expected = warble.say("One two.", seed=SEED)
        async with warble.astream("One two.", seed=SEED, keep_samples=True) as stream:
            async for _ in stream:
                pass
        assert np.array_equal(stream.speech.codes, expected.codes)
        assert np.array_equal(stream.speech.samples, expected.samples)

    run(work)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), "the thread outlives its model"


ENDS_AT_ONCE = """
import mlx.core as mx
from warble_mlx.streaming import computing_thread

computing_thread().submit(lambda: mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))).result()
"""


def test_a_process_may_end_right_after_its_computing_thread() -> None:
    """MLX aborted about every second of them; five runs would miss that once in thirty."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
