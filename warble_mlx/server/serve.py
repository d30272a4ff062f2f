"""A worker and its HTTP server, from the start until a signal ends them."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from warble_mlx.errors import WarbleError
from warble_mlx.server.app import Server
from warble_mlx.server.beside import beside
from warble_mlx.server.settings import Settings
from warble_mlx.server.worker import Worker
from warble_mlx.speech import Warble

_CUT = "ASGI callable returned without completing response."


class HttpServer(uvicorn.Server):
    """Uvicorn for one worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self.server = Server(worker, settings)
        config = uvicorn.Config(
            self.server.app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)

    def end(self, at_once: bool = False) -> None:
        """Let `run` return once what is being spoken has ended, or at once. Any thread may call
        it. What waits in line is sent away."""
        self._worker.shut_door()
        self.force_exit = at_once
        self.should_exit = True


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens; WarbleError if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise WarbleError(
            f"{host}:{port} cannot be listened on ({error.strerror or error}): choose another with"
            " --port or --host"
        ) from error


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Write the server's log, JSON lines, to stderr."""
    log, web = logging.getLogger("warble.server"), logging.getLogger("uvicorn.error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False

    def wanted(record: logging.LogRecord) -> bool:
        return record.getMessage() != _CUT  # a speech that fails half-way is left so on purpose

    web.addFilter(wanted)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
        web.removeFilter(wanted)


def serve(
    load: Callable[[], Warble],
    settings: Settings,
    host: str,
    port: int,
    tell: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; what is being spoken then is finished first, within
    `settings.shutdown_s`.

    load: loads the model, in the worker's thread. tell: gets a sentence once it serves. The log,
    JSON lines, goes to stderr. Raises WarbleError for an address that cannot be had.
    """
    worker = Worker(load, settings)
    running: list[HttpServer] = []
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        for http in running:
            http.end(at_once=signals > 1)
        if not running:
            worker.stop()

    with listener(host, port) as listening, log_on_stderr():

        def talk() -> None:
            worker.ready()
            http = HttpServer(worker, settings)
            running.append(http)
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            tell(f"{http.server.model_name} serves at {address} (Ctrl-C ends it)")
            if not worker.is_closing:
                http.run(sockets=[listening])

        beside(worker, talk, on_signal)
