"""What a batch has done, on disk: which files are complete, and what became of the other rows.

While a batch runs, each process appends a line to `progress-RANK.jsonl` in the output folder once
a row's file stands under its name. At the end, `manifest.jsonl` (rows with a file) and
`failures.jsonl` (rows without) are written in the order of the input, and the progress files go.
A later run believes a line only if its file is still there, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warble_mlx.batch.rows import Failure
from warble_mlx.errors import AudioError, WarbleError
from warble_mlx.staging import staged_file

MANIFEST, FAILURES = "manifest.jsonl", "failures.jsonl"
_PROGRESS = "progress-*.jsonl"
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # as audio files and the ledger's own are

Entry = dict[str, Any]


class Ledger:
    """The ledger of one process of a batch into `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._path = folder / _PROGRESS.replace("*", str(rank))

    def open(self, *, resume: bool) -> None:
        """Make the folder. Raises WarbleError if it holds anything, unless resumed; then half
        written files of a killed run go, and a torn line of its progress is ended."""
        if self._folder.exists() and not self._folder.is_dir():
            raise WarbleError(f"{self._folder} is a file: name the folder that the files go to")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not resume and any(self._folder.iterdir()):
                raise WarbleError(
                    f"{self._folder} is not empty: name another folder, or go on with an earlier"
                    " batch by --resume"
                )
            for path in self._folder.iterdir():
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)  # by another process of this batch, perhaps
            if self._path.is_file() and not self._path.read_bytes().endswith(b"\n"):
                with self._path.open("ab") as file:
                    file.write(b"\n")
        except OSError as error:
            raise WarbleError(f"{self._folder}: {error.strerror or error}") from error

    def earlier(self) -> dict[str, Entry]:
        """By id, what earlier runs have put down as done; nothing is believed yet."""
        found: dict[str, Entry] = {}
        for path in [self._folder / MANIFEST, *sorted(self._folder.glob(_PROGRESS))]:
            for raw in path.read_bytes().split(b"\n") if path.is_file() else ():
                try:
                    entry = json.loads(raw)
                    found[entry["id"]] = entry
                except (ValueError, KeyError, TypeError):
                    continue  # torn by a kill: that row is done again
        return found

    def holds(self, entry: Entry, digest: str, name: str) -> bool:
        """Whether an earlier entry still stands: made of the same inputs, its file complete."""
        path = self._folder / name
        try:
            return (
                entry.get("digest") == digest
                and entry.get("file") == name
                and path.stat().st_size == entry.get("bytes")
                and file_digest(path) == entry.get("sha256")
            )
        except (OSError, AudioError):
            return False

    def add(self, entry: Entry) -> None:
        """Put a row down as done. Raises AudioError if the disk does not take it."""
        try:
            with self._path.open("ab") as file:
                file.write(_line(entry))
        except OSError as error:
            raise AudioError(
                f"{self._path} cannot be written: {error.strerror or error}"
            ) from error

    def close(self, done: Iterable[Entry], failures: Iterable[Failure]) -> None:
        """Write manifest and failures of all processes, and remove this one's progress."""
        ordered = sorted(done, key=lambda entry: int(entry["line"]))
        self._write(MANIFEST, map(_line, ordered))
        self._write(FAILURES, (_line(f._asdict()) for f in sorted(failures)))
        for path in self._folder.glob(_PROGRESS):
            path.unlink()

    def drop_progress(self) -> None:
        """Remove this process's progress, if a manifest that has been merged lies beside it."""
        if (self._folder / MANIFEST).is_file():
            self._path.unlink(missing_ok=True)

    def _write(self, name: str, lines: Iterable[bytes]) -> None:
        path = self._folder / name
        try:
            with staged_file(path) as part, part.open("wb") as file:
                file.writelines(lines)
        except OSError as error:
            raise AudioError(f"{path} cannot be written: {error.strerror or error}") from error


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def file_digest(path: Path) -> str:
    """SHA-256 of a file; AudioError if it cannot be read."""
    state = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError as error:
        raise AudioError(f"{path} cannot be read: {error.strerror or error}") from error
    return state.hexdigest()
