"""What all commands share: options with their environment variables, talk, and output."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from warble_mlx.errors import WarbleError

EPIPE_STATUS = 141  # 128 + SIGPIPE, as a shell reports a reader that has gone
TRUNCATED_STATUS = 3

_Function = TypeVar("_Function", bound=Callable[..., Any])


def option(*names: str, **settings: Any) -> Callable[[_Function], _Function]:
    """A click option that can also be set by WARBLE_ and its long name in capitals, unless
    `envvar` is another name."""
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    variable = "WARBLE_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, **{"envvar": variable, **settings})


model_option = option(
    "-m",
    "--model",
    metavar="MODEL",
    help="Folder, or hub id (org/name or org/name@revision). Default: the bundled voice pack.",
)
offline_option = option("--offline", is_flag=True, help="Never connect: use what is on disk.")
dequantize_option = option(
    "--dequantize",
    is_flag=True,
    help="Unpack quantised weights when loading: more memory, but no packed kernels.",
)
json_option = option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
report_option = option(
    "--json",
    "json_out",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=str),
    metavar="OUT",
    help="Write everything as JSON; - is stdout, instead of the text.",
)
# Read by `main`, which needs it for errors that come before a command runs.
debug_option = option(
    "--debug", is_flag=True, expose_value=False, help="Show where an error came from."
)


class Number(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """A finite number within limits; `above` excludes the lower one."""

    name = "number"

    def __init__(
        self,
        low: float,
        high: float = math.inf,
        *,
        above: bool = False,
        kind: type[int] | type[float] = float,
    ) -> None:
        self.low, self.high, self.above, self.kind = low, high, above, kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        what = "a whole number" if self.kind is int else "a number"
        try:
            number = self.kind(value)
        except ValueError:
            self.fail(f"{value!r} is not {what}", param, ctx)
        low_enough = number > self.low if self.above else number >= self.low
        if not (math.isfinite(number) and low_enough and number <= self.high):
            self.fail(f"it must be {self.range()}, not {value}", param, ctx)
        return number

    def range(self) -> str:
        """The allowed values in words."""
        if math.isfinite(self.high):
            return f"from {self.low} to {self.high}"
        return f"more than {self.low}" if self.above else f"{self.low} or more"


class Seconds(click.ParamType):  # type: ignore[type-arg]  # generic only in recent clicks
    """A part of a clip, A:B in seconds."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        try:
            begin, end = (float(part) for part in value.split(":"))
        except ValueError:
            self.fail(f"{value!r} is not A:B in seconds, such as 2.5:12", param, ctx)
        if not 0 <= begin < end < math.inf:
            self.fail(f"it must run from 0 or later to a later end, not {value}", param, ctx)
        return begin, end


class TextFirst(click.Group):
    """A group in which anything but a command is text to say: `warble "Hello"`.

    So is a line that begins with the name of a sub-group and goes on with none of its commands:
    `warble voice of reason`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"] if is_terminal(sys.stdin) else ["say"]
        elif args[0] == "help" and (len(args) == 1 or args[1] in self.commands):
            args = [*args[1:2], "--help"]
        elif not self._is_command(args) and args[0] not in [*ctx.help_option_names, "--version"]:
            ctx.meta["warble.implicit"] = True
            args = ["say", *args]
        return super().parse_args(ctx, args)

    def _is_command(self, args: list[str]) -> bool:
        command = self.commands.get(args[0])
        if not isinstance(command, click.Group):
            return command is not None
        following = args[1:2]
        return not following or following[0] in command.commands or following[0].startswith("-")


def is_terminal(stream: Any) -> bool:
    """Whether a person sits at `stream`; a stream that is missing or closed has nobody."""
    return stream is None or stream.closed or bool(stream.isatty())


def mistaken_command(words: Sequence[str], commands: Sequence[str]) -> str | None:
    """The command that `words`, given without one, were probably meant as, else None.

    A single word close to a command's name is, and so is a longer line whose first word is close
    and which names a path: `warble convrt ./a ./b`. `warble voice of reason` is text.
    """
    from difflib import get_close_matches

    if not words or (len(words) > 1 and not any("/" in word for word in words[1:])):
        return None
    close = get_close_matches(words[0], commands, n=1, cutoff=0.8)
    return close[0] if close else None


def say_so(line: str) -> None:
    """A line for the person at the terminal, on stderr; stdout is data."""
    click.echo(f"warble: {line}", err=True)


def emit(data: bytes | str) -> None:
    """Write the command's data to stdout. If the reader has gone, end quietly."""
    if sys.stdout is None:
        raise WarbleError("stdout is closed")
    left = memoryview(data.encode() if isinstance(data, str) else data)
    try:
        while left:  # with PYTHONUNBUFFERED a pipe takes what it has room for
            left = left[sys.stdout.buffer.write(left) :]
        sys.stdout.buffer.flush()
    except OSError as error:  # the reader has gone, or the disk is full
        # Or the interpreter would try to flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(EPIPE_STATUS) from None
        error.filename = "stdout"
        raise


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "".join(line + "\n" for line in lines)
