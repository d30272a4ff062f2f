"""A speech on its way to a client: bytes of audio or server-sent events, while it is made."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from warble_mlx.server.bodies import error_body, error_response
from warble_mlx.server.encoders import Encoder
from warble_mlx.server.worker import Audio, Begin, End, Job, Out, Outbox


class SpeechAnswer(Response):
    """Answers with a job's speech. Whatever happens to the client, the job does not outlive it.

    The status is decided by the first thing that is heard of the speech. Later failures cut the
    connection, so that no client takes a part for the whole; events say what went wrong.
    """

    def __init__(
        self,
        job: Job,
        outbox: Outbox,
        encoder: Encoder,
        *,
        events: bool,
        headers: dict[str, str],
        send_timeout_s: float,
    ) -> None:
        self._job, self._outbox, self._encoder = job, outbox, encoder
        self._events, self._extra = events, headers
        self._timeout_s = send_timeout_s
        self._is_whole = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_until_left(receive))
        speaking = asyncio.create_task(self._speak(scope, receive, send))
        try:
            await asyncio.wait({left, speaking}, return_when=asyncio.FIRST_COMPLETED)
            if speaking.done():
                speaking.result()
        except _StalledError:
            self._job.give_up("client-stalled")
        finally:
            self._job.give_up("client-left")  # of a job that has ended, nothing is left to give up
            for task in (left, speaking):
                task.cancel()
            await asyncio.gather(left, speaking, return_exceptions=True)

    async def _speak(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = Begin(None, 0, ())
        out = await self._outbox.get()
        while isinstance(out, Begin):
            begin, out = out, await self._outbox.get()
        if isinstance(out, End) and out.status != 200:
            headers = {"Retry-After": "5"} if out.status == 503 else None
            answer = error_response(out.message, out.status, code=out.reason, headers=headers)
            await answer(scope, receive, send)
            return
        media = "text/event-stream" if self._events else self._encoder.media_type
        headers = {
            "content-type": media,
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-warble-seed": str(begin.seed),
            "x-warble-voice": _header(begin.voice or ""),
            "x-warble-sample-rate": str(self._encoder.rate),
            **self._extra,
        }
        if begin.warnings:
            headers["x-warble-warnings"] = _header("; ".join(begin.warnings))
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for piece in self._pieces(out, begin):
            if piece:
                await self._send(send, piece)
        if self._is_whole or self._events:
            await self._send(send, b"", more=False)
        # Else the answer stays without its end, and the server cuts the connection.

    async def _pieces(self, out: Out, begin: Begin) -> AsyncIterator[bytes]:
        """Bytes to send, to the end or to what went wrong."""
        while isinstance(out, Audio):
            yield self._delta(await asyncio.to_thread(self._encoder.encode, out.samples))
            self._job.taken += out.samples.size
            out = await self._outbox.get()
        assert isinstance(out, End)
        data = await asyncio.to_thread(self._encoder.finish)
        if out.status == 200:
            self._is_whole = True
            yield self._delta(data)
        if not self._events:
            return
        if self._is_whole:
            usage = {"input_tokens": 0, "output_tokens": out.frames, "total_tokens": out.frames}
            yield _event(
                {
                    "type": "speech.audio.done",
                    "usage": usage,
                    "finish_reason": out.reason,
                    "seconds": round(out.seconds, 6),
                    "seed": begin.seed,
                }
            )
        else:
            error = json.loads(error_body(out.message, out.status, code=out.reason))
            yield _event({"type": "error", **error})

    def _delta(self, data: bytes) -> bytes:
        if not self._events or not data:
            return data
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        try:
            await asyncio.wait_for(send(message), self._timeout_s)
        except asyncio.TimeoutError:
            raise _StalledError from None


class _StalledError(Exception):
    """The client takes nothing any more."""


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _header(text: str) -> str:
    """Text as a header may hold it."""
    return text.encode("ascii", "backslashreplace").decode()
