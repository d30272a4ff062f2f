"""What clients send, checked, and errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from warble_mlx.errors import TextError, WarbleError
from warble_mlx.options import MAX_RETRIES, MAX_SEED
from warble_mlx.server.encoders import DEFAULT_FORMAT, FORMATS
from warble_mlx.splitting import LONGEST_BREAK_S
from warble_mlx.text import speakable

# Clients that cannot be told otherwise ask for one of these; the default voice answers.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage",
    "shimmer", "verse",
)  # fmt: skip
_REFERENCES = ("ref_audio", "ref_text", "reference_audio", "reference_text", "audio_prompt")


class RequestError(WarbleError):
    """A request that is refused, with what OpenAI's error object holds."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        self.status, self.param, self.code = status, param, code
        super().__init__(message)


class VoiceById(msgspec.Struct, forbid_unknown_fields=True):
    """A voice as newer clients name it."""

    id: str


class SpeechRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/audio/speech`: OpenAI's fields, and below `stream` our own."""

    input: str
    model: str | None = None
    voice: str | int | VoiceById | None = None
    response_format: str = DEFAULT_FORMAT
    speed: float = 1.0
    instructions: str | None = None
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool | None = None  # every answer is streamed
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    max_seconds: Annotated[float, Meta(gt=0)] | None = None
    pause: Annotated[float, Meta(ge=0, le=LONGEST_BREAK_S)] | None = None
    retry: Annotated[int, Meta(ge=0, le=MAX_RETRIES)] = 0
    normalise: bool = False
    sample_rate: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Warble.plan`, without the voice."""
        given = {
            "seed": self.seed,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_seconds": self.max_seconds,
            "pause_s": self.pause,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return {**given, "retry": self.retry, "normalise": self.normalise}


def speech_request(raw: bytes, max_text: int) -> SpeechRequest:
    """The request in `raw`; RequestError for what cannot be one."""
    try:
        asked = msgspec.json.decode(raw, type=SpeechRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_references(raw)
        raise RequestError(f"the body is no speech request: {error}") from error
    if len(asked.input) > max_text:
        raise RequestError(
            f"input has {len(asked.input)} characters, at most {max_text} are possible: send it in"
            " parts",
            param="input",
            code="string_above_max_length",
        )
    try:
        speakable(asked.input)
    except TextError as error:
        raise RequestError(str(error), param="input") from error
    if asked.response_format not in FORMATS:
        raise RequestError(
            f"response_format {asked.response_format[:20]!r} is not one of {', '.join(FORMATS)}",
            param="response_format",
        )
    if asked.speed != 1:
        raise RequestError(
            "speed must be 1: the model has no speed control; play the speech faster instead",
            param="speed",
        )
    return asked


def _refuse_references(raw: bytes) -> None:
    """A clip in a speech request gets its own answer: nothing named by a client is ever opened."""
    try:
        fields = json.loads(raw)
    except ValueError:
        return
    given = [name for name in _REFERENCES if isinstance(fields, dict) and name in fields]
    if given:
        raise RequestError(
            f"{given[0]} is not taken: this server opens no files and addresses for clients;"
            " register a voice by uploading its clip to POST /v1/audio/voices",
            param=given[0],
        )


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": fields}, ensure_ascii=False).encode()


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The same as an answer."""
    body = error_body(message, status, param=param, code=code)
    if status in (408, 413):  # the rest of the request is not read
        headers = {**(headers or {}), "Connection": "close"}
    return Response(body, status, headers, "application/json")
