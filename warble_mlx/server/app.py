"""The HTTP side: what is asked at which address, by whom, and how it is answered."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import python_multipart  # noqa: F401  # what starlette reads forms with
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warble_mlx import __version__
from warble_mlx.errors import VoiceError, WarbleError
from warble_mlx.registered import RegisteredVoice, is_name
from warble_mlx.server.answer import SpeechAnswer
from warble_mlx.server.bodies import (
    OPENAI_VOICES,
    RequestError,
    VoiceById,
    error_response,
    speech_request,
)
from warble_mlx.server.encoders import FORMATS, PCM_RATE, can_encode, encoder_for
from warble_mlx.server.metrics import Metrics
from warble_mlx.server.settings import Settings
from warble_mlx.server.worker import BusyError, End, Job, Outbox, Worker
from warble_mlx.speech import Warble
from warble_mlx.voice_folder import file_of, find_registered, keep, registered_voices
from warble_mlx.voices import VoiceList

log = logging.getLogger("warble.server")
_OPEN = ("/", "/health")  # without a token
_DRAINED = 32 << 20  # bytes beyond the limit that are read and dropped before a refusal
_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".webm", ".aiff")


class Server:
    """The endpoints of one worker. `app` is what an ASGI server runs."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker, self._settings = worker, settings
        self._warble: Warble = worker.ready()
        self._started = int(time.time())
        self._page = resources.files("warble_mlx.server").joinpath("page.html").read_text("utf-8")
        self.metrics = Metrics(lambda: worker.busy, lambda: worker.waiting, settings.rows)
        worker.on_end = self._count
        endpoints: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/audio/speech", self.speech),
            ("GET", "/models", self.models),
            ("GET", "/audio/voices", self.voices),
            ("POST", "/audio/voices", self.register),
        ]
        routes = [
            Route(prefix + path, endpoint, methods=[method])
            for prefix in ("/v1", "")  # some clients leave the version out
            for method, path, endpoint in endpoints
        ]
        routes += [
            Route("/", self.page, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics_text, methods=["GET"]),
        ]
        middleware = [Middleware(_Door, server=self)]
        if settings.cors_origins:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(settings.cors_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type"],
                    expose_headers=["x-warble-seed", "x-warble-voice", "x-warble-sample-rate"],
                ),
            )
        self.app = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={
                HTTPException: self._http_error,
                WarbleError: self._refusal,
                Exception: self._defect,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        self._worker.stop()

    @property
    def model_name(self) -> str:
        """What is served."""
        return self._warble.name

    # ------------------------------------------------------------------ speech

    async def speech(self, request: Request) -> Response:
        """`POST /v1/audio/speech`."""
        asked = speech_request(await self._body(request), self._settings.max_text)
        encoder = encoder_for(asked.response_format, self._warble.sample_rate, asked.sample_rate)
        headers = {}
        if asked.instructions:
            headers["x-warble-ignored"] = "instructions: the model takes none"
        voice = await asyncio.to_thread(self._voice, asked.voice)
        outbox = Outbox()
        job = Job(asked.input, {**asked.options, "voice": voice}, outbox.put)
        self._worker.submit(job)
        return SpeechAnswer(
            job,
            outbox,
            encoder,
            events=asked.stream_format == "sse",
            headers=headers,
            send_timeout_s=self._settings.send_timeout_s,
        )

    def _voice(self, wanted: str | int | VoiceById | None) -> str | int | RegisteredVoice | None:
        """What the model is given for the voice that a client names. A name is never a path, and
        all names that are not known get the same answer."""
        name = wanted.id if isinstance(wanted, VoiceById) else wanted
        if name is None:
            return None
        try:
            return VoiceList(self._warble.voices).find(name).name
        except VoiceError:
            pass
        found = find_registered(str(name))
        if found is not None:
            return found
        if str(name).strip().casefold() in OPENAI_VOICES:
            return None
        known = ", ".join(voice["id"] for voice in self._known_voices())
        raise RequestError(
            f"there is no such voice; there are: {known or 'none'}", param="voice", code="no-voice"
        )

    def _known_voices(self) -> list[dict[str, str]]:
        own = [
            {
                "id": voice.name,
                "name": voice.name,
                "language": voice.language,
                "description": voice.description,
                "kind": "model",
            }
            for voice in self._warble.voices
        ]
        registered = [
            {
                "id": voice.name,
                "name": voice.name,
                "language": voice.language,
                "description": voice.description,
                "kind": "registered",
            }
            for voice in registered_voices()
            if isinstance(voice, RegisteredVoice)
        ]
        return own + registered

    # ------------------------------------------------------------------ what there is

    async def models(self, _request: Request) -> Response:
        """`GET /v1/models`: the one that is loaded; any name is taken in a speech request."""
        model = {
            "id": self._warble.name,
            "object": "model",
            "created": self._started,
            "owned_by": "warble-mlx",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def voices(self, _request: Request) -> Response:
        """`GET /v1/audio/voices`."""
        default = self._warble.default_voice
        return JSONResponse(
            {
                "object": "list",
                "voices": await asyncio.to_thread(self._known_voices),
                "default": default.name if default else None,
                "formats": [kind for kind in FORMATS if can_encode(kind)],
                "sample_rate": self._warble.sample_rate,
                "pcm_sample_rate": PCM_RATE,
            }
        )

    async def register(self, request: Request) -> Response:
        """`POST /v1/audio/voices`: a form with name, transcript and audio_sample (a file)."""
        fields, clip, suffix = await self._form(request)
        name, words = fields.get("name", ""), fields.get("transcript") or fields.get("text", "")
        if not name or not words or clip is None:
            raise RequestError(
                "a voice needs the form fields name, transcript (what is said in the clip) and"
                " audio_sample (the clip)"
            )

        def make(warble: Warble) -> tuple[RegisteredVoice, list[str]]:
            with tempfile.TemporaryDirectory(prefix="warble-") as folder:
                path = Path(folder) / f"clip{suffix}"
                path.write_bytes(clip)
                try:
                    voice = warble.register(
                        path,
                        words,
                        name,
                        description=fields.get("description", ""),
                        language=fields.get("language", ""),
                    )
                except WarbleError as error:  # the client knows its clip by another name
                    raise RequestError(str(error).replace(str(path), "audio_sample")) from error
            return voice, [doubt.replace(str(path), "audio_sample") for doubt in voice.warnings]

        refusal = RequestError(f"there is a voice {name[:60]!r} already", 409, param="name")
        if is_name(name) and file_of(name).exists():
            raise refusal
        voice, doubts = await asyncio.wrap_future(self._worker.do(make))
        try:
            await asyncio.to_thread(keep, voice)
        except VoiceError as error:
            raise refusal if file_of(name).exists() else error from None
        log_line("registered", voice=voice.name, clip_seconds=round(voice.clip_seconds, 2))
        return JSONResponse(
            {
                "id": voice.name,
                "object": "audio.voice",
                "name": voice.name,
                "created_at": int(time.time()),
                "clip_seconds": voice.clip_seconds,
                "warnings": doubts,
            },
            201,
        )

    async def health(self, _request: Request) -> Response:
        """`GET /health`: whether it serves, and how busy it is."""
        closing = self._worker.is_closing
        state = "closing" if closing else "ok"
        return JSONResponse(
            {
                "status": state,
                "model": self._warble.name,
                "version": __version__,
                "rows": self._settings.rows,
                "busy": self._worker.busy,
                "waiting": self._worker.waiting,
            },
            503 if closing else 200,
        )

    async def metrics_text(self, _request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def page(self, _request: Request) -> Response:
        """`GET /`: a page that needs nothing from elsewhere."""
        policy = (
            "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline';"
            " connect-src 'self'; media-src blob:; img-src data:; base-uri 'none';"
            " form-action 'none'; frame-ancestors 'none'"
        )
        return HTMLResponse(self._page, headers={"content-security-policy": policy})

    # ------------------------------------------------------------------ bodies

    async def _body(self, request: Request) -> bytes:
        """The whole body, within its limits of size and time."""
        raw = bytearray()

        async def read() -> None:
            async for part in self._limited(request, self._settings.max_body).stream():
                raw.extend(part)

        await self._in_time(read())
        return bytes(raw)

    async def _form(self, request: Request) -> tuple[dict[str, str], bytes | None, str]:
        """Text fields, the uploaded clip, and its suffix (of a known few)."""
        fields: dict[str, str] = {}
        clips: list[tuple[bytes, str]] = []

        async def read() -> None:
            limited = self._limited(request, self._settings.max_upload)
            async with limited.form(max_files=1, max_fields=16) as form:
                for name, value in form.items():
                    if isinstance(value, UploadFile):
                        clips.append((await value.read(), value.filename or ""))
                    else:
                        fields[name] = value

        try:
            await self._in_time(read())
        except (HTTPException, MultiPartException) as error:
            reason = getattr(error, "detail", None) or getattr(error, "message", error)
            raise RequestError(f"the body is no form: {reason}") from error
        if not clips:
            return fields, None, ""
        ((clip, filename),) = clips
        suffix = Path(filename).suffix.lower()
        return fields, clip, suffix if suffix in _SUFFIXES else ""

    def _limited(self, request: Request, limit: int) -> Request:
        """The same request, which fails with 413 once its body is longer than that."""
        too_large = RequestError(f"the body is too large: {limit} bytes are possible", 413)
        received = 0

        async def receive() -> Message:
            nonlocal received
            message = await request.receive()
            received += len(message.get("body", b""))
            if received <= limit:
                return message
            # A client that is cut off while it sends does not read the answer: let it come to its
            # end, within reason.
            while message.get("more_body") and received <= limit + _DRAINED:
                message = await request.receive()
                received += len(message.get("body", b""))
            raise too_large

        return Request(request.scope, receive)

    async def _in_time(self, reading: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.wait_for(reading, self._settings.body_timeout_s)
        except asyncio.TimeoutError:
            raise RequestError("the body did not arrive in time", 408, code="timeout") from None

    # ------------------------------------------------------------------ errors and counting

    async def _refusal(self, _request: Request, error: Exception) -> Response:
        if isinstance(error, BusyError):
            headers = {"Retry-After": str(error.retry_after_s)}
            code = "busy" if error.status == 429 else "closing"
            return error_response(str(error), error.status, code=code, headers=headers)
        if isinstance(error, RequestError):
            return error_response(str(error), error.status, param=error.param, code=error.code)
        return error_response(str(error), 400)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            message = f"there is nothing at {request.url.path[:80]}"
        else:
            message = error.detail
        return error_response(message, error.status_code, headers=dict(error.headers or {}))

    async def _defect(self, _request: Request, error: Exception) -> Response:
        return error_response(f"unexpected error: {type(error).__name__}", 500, code="internal")

    def _count(self, job: Job, end: End) -> None:
        """Called by the worker at the end of every job."""
        metrics = self.metrics
        seconds = job.samples / self._warble.sample_rate
        took = time.monotonic() - job.began_at
        if end.status != 200:
            metrics.failures.labels(end.reason).inc()
        metrics.speech_seconds.inc(seconds)
        if not math.isnan(job.began_at):
            metrics.queue_wait.observe(job.began_at - job.asked_at)
        if not math.isnan(job.first_at):
            metrics.first_audio.observe(job.first_at - job.asked_at)
        if end.status == 200 and seconds:
            metrics.rtf.observe(took / seconds)
        log_line(
            "speech",
            reason=end.reason,
            characters=len(job.text),
            seconds=round(seconds, 3),
            waited_ms=_ms(job.began_at - job.asked_at),
            first_audio_ms=_ms(job.first_at - job.asked_at),
            took_ms=_ms(took),
            **({"text": job.text} if self._settings.log_text else {}),
            **({"error": end.message} if end.status >= 500 else {}),
        )


class _Door:
    """Who may come in: a token if one is set, no page of another site, no other name for us."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server
        self._settings = server._settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path = request.url.path
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.monotonic()
        refusal = self._refusal(request)
        try:
            if refusal is not None:
                await refusal(scope, receive, noted)
            else:
                await self._app(scope, receive, noted)
        except ClientDisconnect:
            status = 499
        finally:
            known = path.removeprefix("/v1")
            known = known if known in _COUNTED else "other"
            self._server.metrics.requests.labels(known, status).inc()
            log_line(
                "request",
                method=request.method,
                path=known,
                status=status,
                ms=_ms(time.monotonic() - started),
            )

    def _refusal(self, request: Request) -> Response | None:
        settings = self._settings
        host = request.headers.get("host", "").rsplit("]", 1)
        name = host[0].lstrip("[") if len(host) == 2 else host[0].partition(":")[0]
        if "*" not in settings.hosts and name.lower() not in settings.hosts:
            return error_response("this server is known by another name", 421, code="host")
        origin = request.headers.get("origin")
        if origin is not None and not self._is_welcome(origin, request):
            return error_response(
                "pages of other sites may not use this server; --cors-origin lets one in",
                403,
                code="origin",
            )
        if settings.token is not None and request.url.path not in _OPEN:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), settings.token.encode()):
                return error_response(
                    "a token is needed: Authorization: Bearer …",
                    401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return None

    def _is_welcome(self, origin: str, request: Request) -> bool:
        if "*" in self._settings.cors_origins or origin in self._settings.cors_origins:
            return True
        return origin.partition("://")[2] == request.headers.get("host")


_COUNTED = ("/", "/health", "/metrics", "/audio/speech", "/audio/voices", "/models")


def _ms(seconds: float) -> int | None:
    return None if math.isnan(seconds) else round(seconds * 1000)


def log_line(event: str, **fields: Any) -> None:
    """One JSON object on a line of the log. What is spoken is not in it, unless that was asked."""
    known = {name: value for name, value in fields.items() if value is not None}
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **known}
    log.info(json.dumps(line, ensure_ascii=False))
