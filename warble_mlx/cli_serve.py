"""`warble serve` and `warble wyoming`: speech servers on this machine."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from warble_mlx.cli_base import (
    Number,
    debug_option,
    model_option,
    offline_option,
    option,
    say_so,
)
from warble_mlx.errors import MissingExtraError

if TYPE_CHECKING:
    from warble_mlx.speech import Warble

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

host_option = option(
    "--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Where to listen."
)


def port_option(default: int) -> Decorator:
    """--port."""
    return option(
        "--port",
        metavar="N",
        type=Number(1, 65535, kind=int),
        default=default,
        show_default=True,
        help="Port to listen on.",
    )


def rows_option(default: int) -> Decorator:
    """--rows."""
    return option(
        "--rows",
        metavar="N",
        type=Number(1, 1024, kind=int),
        default=default,
        show_default=True,
        help="Requests spoken at once.",
    )


@click.command()
@model_option
@host_option
@port_option(8000)
@option("--token", metavar="TOKEN", help="What clients must send as Authorization: Bearer TOKEN.")
@option(
    "--allow-host",
    metavar="NAME",
    multiple=True,
    help="A further name that this server is called by (repeatable); * is any.",
)
@option(
    "--cors-origin",
    metavar="ORIGIN",
    multiple=True,
    help="A web page's origin that may use this server (repeatable); * is any. Default: none.",
)
@rows_option(8)
@option(
    "--queue",
    metavar="N",
    type=Number(0, 100_000, kind=int),
    default=64,
    show_default=True,
    help="Requests that may wait; further ones get 429.",
)
@option(
    "--max-text",
    metavar="N",
    type=Number(1, 10_000_000, kind=int),
    default=10_000,
    show_default=True,
    help="Characters of one request.",
)
@option(
    "--timeout",
    metavar="S",
    type=Number(0, above=True),
    default=1800.0,
    show_default=True,
    help="Seconds that one request may be spoken for.",
)
@option(
    "--grace",
    metavar="S",
    type=Number(0),
    default=30.0,
    show_default=True,
    help="Seconds for running requests after Ctrl-C or SIGTERM.",
)
@option("--log-text", is_flag=True, help="Write the texts into the log, too.")
@offline_option
@debug_option
@click.pass_context
def serve(
    ctx: click.Context,
    model: str | None,
    host: str,
    port: int,
    token: str | None,
    allow_host: tuple[str, ...],
    cors_origin: tuple[str, ...],
    rows: int,
    queue: int,
    max_text: int,
    timeout: float,
    grace: float,
    log_text: bool,
    offline: bool,
) -> None:
    """Serve speech by HTTP, as OpenAI's clients ask for it, and a page to try it.

    \b
      warble serve
      curl localhost:8000/v1/audio/speech -o hello.mp3 \\
        -H "Content-Type: application/json" -d '{"input": "Hello.", "voice": "Vera"}'
    """
    local = is_local(host)
    if not local and not token:
        raise click.UsageError(
            f"{host} can be reached by others: set --token, which clients then must send", ctx
        )
    # Where a token is needed, a page that reaches this server by another name gains nothing.
    names = (host, "localhost", "127.0.0.1", "::1", *allow_host) if local else ("*",)
    from warble_mlx.backend import prepare

    prepare()
    try:
        from warble_mlx.server.serve import serve as run
        from warble_mlx.server.settings import Settings
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client", "python_multipart"):
            raise
        raise MissingExtraError("Serving", error.name, "server") from error
    logging.captureWarnings(True)
    settings = Settings(
        rows=rows,
        queue=queue,
        max_text=max_text,
        max_body=max(1 << 20, 8 * max_text),
        speech_timeout_s=timeout,
        shutdown_s=grace,
        token=token,
        cors_origins=cors_origin,
        hosts=tuple(name.lower() for name in names),
        log_text=log_text,
    )
    run(loader(model, offline), settings, host, port, say_so)


@click.command()
@model_option
@host_option
@port_option(10200)
@rows_option(4)
@offline_option
@debug_option
def wyoming(model: str | None, host: str, port: int, rows: int, offline: bool) -> None:
    """Serve Home Assistant: speech over the Wyoming protocol.

    In Home Assistant, add the integration "Wyoming Protocol" with this machine's address and
    port. The protocol knows no password: with --host 0.0.0.0, whoever reaches this machine can
    let it speak.
    """
    from warble_mlx.backend import prepare

    prepare()
    try:
        from warble_mlx.server.home_assistant import run_wyoming
        from warble_mlx.server.settings import Settings
    except ModuleNotFoundError as error:
        if error.name != "wyoming":
            raise
        raise MissingExtraError("Serving Home Assistant", "wyoming", "wyoming") from error
    run_wyoming(loader(model, offline), Settings(rows=rows), host, port, say_so)


def loader(model: str | None, offline: bool) -> Callable[[], Warble]:
    """What loads the model in the thread that calls it, which then owns it."""

    def load() -> Warble:
        import warble_mlx

        return warble_mlx.load(model, offline=offline)

    return load


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
