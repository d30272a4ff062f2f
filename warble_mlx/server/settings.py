"""What a server is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Limits and doors of a server. Times in seconds, sizes in bytes."""

    rows: int = 8  # requests spoken at once
    queue: int = 64  # requests that may wait for a row
    max_text: int = 10_000  # characters of one request
    max_body: int = 1 << 20
    max_upload: int = 20 << 20
    body_timeout_s: float = 20.0  # for a request to arrive whole
    queue_timeout_s: float = 120.0  # for a row
    speech_timeout_s: float = 1800.0  # from its row to its end
    ahead_s: float = 30.0  # of speech that a client has not taken yet; then the next piece waits
    send_timeout_s: float = 30.0  # a client that takes nothing for so long has gone
    shutdown_s: float = 30.0  # for running requests, once told to stop
    token: str | None = None
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")  # names it answers to; "*" is any
    log_text: bool = False
