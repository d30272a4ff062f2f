"""`warble wyoming` as Home Assistant sees it, through the protocol's own client library."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("wyoming")

from speaking import quick_warble
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event, Eventable
from wyoming.info import Describe, Info
from wyoming.server import AsyncTcpServer
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from warble_mlx.live import Pcm
from warble_mlx.server.home_assistant import Handler
from warble_mlx.server.settings import Settings
from warble_mlx.server.worker import Worker


@pytest.fixture(scope="module")
def worker(quick_rows: None) -> Iterator[Worker]:
    running = Worker(lambda: quick_warble()[0], Settings(rows=2))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    running.ready()
    yield running
    running.stop()
    thread.join()


@asynccontextmanager
async def client_of(worker: Worker) -> AsyncIterator[AsyncTcpClient]:
    server = AsyncTcpServer("127.0.0.1", free_port())
    await server.start(lambda reader, writer: Handler(reader, writer, worker, 500))
    async with AsyncTcpClient("127.0.0.1", server.port) as client:
        yield client
    await server.stop()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def talk(worker: Worker, act: Callable[[AsyncTcpClient], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        async with client_of(worker) as client:
            return await asyncio.wait_for(act(client), 60)

    return asyncio.run(run())


async def ask(client: AsyncTcpClient, *wanted: Eventable, until: type[Eventable]) -> list[Event]:
    for one in wanted:
        await client.write_event(one.event())
    events: list[Event] = []
    while not events or not until.is_type(events[-1].type):  # type: ignore[attr-defined]
        event = await client.read_event()
        assert event is not None
        events.append(event)
    return events


def sound(events: list[Event]) -> bytes:
    return b"".join(e.payload or b"" for e in events if AudioChunk.is_type(e.type))


def test_describe(worker: Worker) -> None:
    (event,) = talk(worker, lambda client: ask(client, Describe(), until=Info))
    (program,) = Info.from_event(event).tts
    assert program.supports_synthesize_streaming
    voices = {voice.name: voice.languages for voice in program.voices}
    assert set(voices) == {"Corvin", "Vera", "Marlow", "Finch", "Robin"}
    assert voices["Finch"] == ["en"]


def test_synthesize(worker: Worker) -> None:
    asked = Synthesize("Good morning.", voice=SynthesizeVoice(name="Finch"))
    events = talk(worker, lambda client: ask(client, asked, until=AudioStop))
    start = AudioStart.from_event(events[0])
    assert (start.rate, start.width, start.channels) == (44_100, 2, 1)
    assert len(sound(events)) > 20_000
    assert np.frombuffer(sound(events), "<i2").max() > 0
    chunk = AudioChunk.from_event(events[1])
    assert (chunk.rate, chunk.width, chunk.channels) == (44_100, 2, 1)


def test_the_sound_is_what_is_said(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    warble = worker.ready()
    plan = warble.plan
    monkeypatch.setattr(
        warble, "plan", lambda text, **options: plan(text, **{**options, "seed": 5})
    )
    asked = Synthesize("Good morning.", voice=SynthesizeVoice(language="en_GB"))
    events = talk(worker, lambda client: ask(client, asked, until=AudioStop))
    assert sound(events) == Pcm(44_100).encode(
        quick_warble()[0].say("Good morning.", voice="Corvin", seed=5).samples
    )


def test_text_that_arrives_is_one_stream(worker: Worker) -> None:
    async def act(client: AsyncTcpClient) -> tuple[list[Event], list[Event]]:
        await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name="Vera")).event())
        # The first sentence is heard before the last is written.
        begun = await ask(
            client, SynthesizeChunk("Good mor"), SynthesizeChunk("ning. And"), until=AudioChunk
        )
        rest = await ask(
            client,
            SynthesizeChunk(" good night."),
            Synthesize("Good morning. And good night."),  # for older servers
            SynthesizeStop(),
            until=SynthesizeStopped,
        )
        return begun, rest

    begun, rest = talk(worker, act)
    kinds = [e.type for e in begun + rest if not AudioChunk.is_type(e.type)]
    assert kinds == [AudioStart(1, 1, 1).event().type, AudioStop().event().type, rest[-1].type]
    silence = bytes(2 * 11_025)
    assert silence in sound(begun + rest)


def test_errors_are_told_and_survived(worker: Worker) -> None:
    async def act(client: AsyncTcpClient) -> list[list[Event]]:
        return [
            await ask(client, Synthesize("Hi", voice=SynthesizeVoice(name="nobody")), until=Error),
            await ask(client, Synthesize("Hi", voice=SynthesizeVoice(language="fi")), until=Error),
            await ask(client, Synthesize("a" * 501), until=Error),
            await ask(client, Synthesize("…"), until=Error),
            await ask(client, Synthesize("Hi"), until=AudioStop),
        ]

    *refused, good = talk(worker, act)
    texts = [Error.from_event(events[-1]).text for events in refused]
    for text, part in zip(texts, ["no voice 'nobody'", "fi", "501", "nothing to say"], strict=True):
        assert part in text
    assert sound(good)


def test_one_that_leaves_frees_its_row(worker: Worker) -> None:
    long = "The old lighthouse keeper counted every passing ship. " * 9
    events = talk(worker, lambda client: ask(client, Synthesize(long), until=AudioChunk))
    assert sound(events)

    async def idle() -> None:
        while worker.busy:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(idle(), 30))


def test_the_command_serves_and_ends_by_a_signal() -> None:
    port = free_port()
    command = [sys.executable, "-m", "warble_mlx", "wyoming", "--port", str(port)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        assert f"tcp://127.0.0.1:{port}" in running.stderr.readline()

        async def describe() -> None:
            async with AsyncTcpClient("127.0.0.1", port) as client:
                await ask(client, Describe(), until=Info)

        asyncio.run(describe())
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.communicate()
