"""Rows of a batch: one JSON object a line, checked before any work is done.

A line that is not a good row becomes a `Failure` and stops none of the others. Blank lines, a
byte order mark and CRLF are taken as they come.
"""

from __future__ import annotations

import math
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

import msgspec

from warble_mlx.errors import TextError, WarbleError
from warble_mlx.text import speakable

MAX_ID_BYTES = 200  # with its suffix it must be a file's name everywhere
_ID = re.compile(r"\w(?:[\w .,+@=-]*[\w+@=-])?")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. What is left out is as the command line says, or as the model has it."""

    text: str
    id: str | int | float | None = None
    voice: str | int | None = None
    reference_audio: str | None = None  # path, relative to the JSONL file
    reference_text: str | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    greedy: bool | None = None
    max_seconds: float | None = None
    retry: int | None = None
    normalise: bool | None = None
    pause: float | None = None


class Numbered(NamedTuple):
    """A row, the line it stands on, and the id that names its file."""

    line: int
    id: str
    row: Row


class Failure(NamedTuple):
    """A line of which nothing came: what was wrong, in one word and in a sentence."""

    line: int
    id: str | None
    reason: str
    error: str


def read_rows(path: Path) -> tuple[list[Numbered], list[Failure]]:
    """The good rows of a JSONL file, and what is wrong with the other lines.

    Raises WarbleError if the file cannot be read, or no line of it is a row at all.
    """
    rows: list[Numbered] = []
    failures: list[Failure] = []
    taken: dict[str, tuple[int, str]] = {}  # line and spelling of each id, by its casefold
    decoder = msgspec.json.Decoder(Row)
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                if not raw.strip():
                    continue
                name: str | None = None
                try:
                    row = decoder.decode(raw)
                    name = row_id(row, line)
                    speakable(row.text)
                    _check_reference(row)
                    earlier, spelt = taken.setdefault(name.casefold(), (line, name))
                    if earlier != line:
                        raise WarbleError(
                            f"line {earlier} has the id {spelt!r} already"
                            f"{'' if spelt == name else ', and case does not count'}"
                        )
                    rows.append(Numbered(line, name, row))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    failures.append(Failure(line, None, "not-a-row", f"not a row: {error}"))
                except TextError as error:
                    failures.append(Failure(line, name, "text", str(error)))
                except WarbleError as error:
                    failures.append(Failure(line, name, "row", str(error)))
    except OSError as error:
        raise WarbleError(f"{path} cannot be read: {error.strerror or error}") from error
    if not rows and all(failure.reason == "not-a-row" for failure in failures):
        found = f" (line {failures[0].line} is {failures[0].error})" if failures else ""
        raise WarbleError(
            f'{path} has no rows{found}; a row is a JSON object on a line, {{"text": "Hello."}}'
        )
    return rows, failures


def row_id(row: Row, line: int) -> str:
    """The row's id as text, from its line number if it has none; WarbleError for one that cannot
    name a file."""
    given = row.id
    if given is None:
        return f"line-{line}"
    if isinstance(given, float) and not math.isfinite(given):
        raise WarbleError("the id is no finite number")
    name = unicodedata.normalize("NFC", str(given))
    if not _ID.fullmatch(name) or len(name.encode()) > MAX_ID_BYTES:
        raise WarbleError(
            f"the id {name[:60]!r} cannot name a file: use letters, digits, spaces and . , + @ = -"
            f" _, a letter or digit first, {MAX_ID_BYTES} bytes at most"
        )
    return name


def _check_reference(row: Row) -> None:
    if (row.reference_audio is None) != (row.reference_text is None):
        missing = "audio" if row.reference_audio is None else "text"
        raise WarbleError(
            "reference_audio and reference_text go together: the clip, and what is said in it"
            f" (reference-{missing}-required)"
        )
    if row.reference_audio is not None and row.voice is not None:
        raise WarbleError("give either voice or reference_audio, not both")
