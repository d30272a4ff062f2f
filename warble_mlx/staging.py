"""Folders and files that appear whole or not at all.

A folder is written beside its final place under a temporary name and renamed at the end, so a
crash, a full disk or Ctrl-C never leaves something that looks like a finished bundle. What a
killed process leaves under such a name goes when the same folder is written again; a process that
is alive holds a lock on its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warble_mlx.errors import CheckpointError

_PARTIAL, _OLD = "partial", "old"


@contextmanager
def staged_folder(out: Path, *, source: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `out` when the block ends without an exception.

    `source` is the folder being read: neither may lie inside the other. An existing `out` is
    refused, or with `force` replaced, provided that it is a model folder. Missing parents are
    made, and removed again if the block fails.

    Raises CheckpointError before the block runs if `out` cannot be used.
    """
    final = out.resolve()
    clear_leftovers(final)
    _check_target(out, final, source.resolve(), force)
    with temporary_folder(final) as stage:
        yield stage
        replace_folder(stage, final)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` when the block ends without an exception."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):  # on a read-only file system even of what is not there
            part.unlink(missing_ok=True)


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Give a folder beside `final` that is gone after the block, unless it was renamed.

    Missing parents of `final` are made, and removed again if the block fails. Raises
    CheckpointError if they cannot be.
    """
    made = _make_parents(final.parent)
    folder = _beside(final, _PARTIAL)
    try:
        folder.mkdir()
        with _held(folder):
            yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            parent.rmdir()
        raise
    shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(final: Path) -> None:
    """Undo what a killed process has left half done beside `final`.

    Unfinished folders go. A folder that was about to be replaced returns to its place, or goes if
    its successor is there.
    """
    for left in _beside_it(final, _OLD):
        if not final.exists():
            left.rename(final)
        else:
            _remove(left, final)
    for left in _beside_it(final, _PARTIAL):
        shutil.rmtree(left, ignore_errors=True)


def replace_folder(stage: Path, final: Path) -> None:
    """Rename `stage` to `final`; a folder that is there goes once the new one has its place."""
    if not final.exists():
        stage.rename(final)
        return
    old = _beside(final, _OLD)
    with _held(final):
        final.rename(old)
        try:
            stage.rename(final)
        except BaseException:
            old.rename(final)
            raise
        _remove(old, final)


def _beside(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}-{secrets.token_hex(4)}"


def _beside_it(final: Path, kind: str) -> list[Path]:
    """What lies beside `final` under a temporary name and belongs to no living process."""
    name = re.compile(rf"\.{re.escape(final.name)}\.{kind}-[0-9a-f]+")
    try:
        found = [path for path in final.parent.iterdir() if name.fullmatch(path.name)]
    except OSError:  # not made yet, or not ours to look into
        return []
    return [path for path in found if _is_free(path)]


def _remove(old: Path, final: Path) -> None:
    """Remove a folder so that a kill on the way leaves nothing that could return to its place."""
    doomed = _beside(final, _PARTIAL)
    old.rename(doomed)
    shutil.rmtree(doomed)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder, also while it is renamed. The lock ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # A file system without locks: there nothing counts as left over, either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_free(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _check_target(out: Path, final: Path, source: Path, force: bool) -> None:
    if final == source:
        raise CheckpointError(f"{out} is the source itself. Give another output folder")
    if final.is_relative_to(source) or source.is_relative_to(final):
        raise CheckpointError(f"{out} and {source} lie inside each other. Give a folder elsewhere")
    if not final.exists():
        return
    if not force:
        raise CheckpointError(f"{out} exists already. Give another folder, or --force")
    if not final.is_dir() or (any(final.iterdir()) and not (final / "config.json").is_file()):
        raise CheckpointError(
            f"{out} is not a model folder (it has no config.json), so it is not replaced even with"
            " --force. Remove it yourself or give another folder"
        )


def _make_parents(parent: Path) -> list[Path]:
    """Make `parent` and return the folders that were made, innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be made: {error.strerror}") from error
    return missing
