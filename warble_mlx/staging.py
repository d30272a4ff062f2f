"""Folders that appear whole or not at all.

A folder is written beside its final place under a temporary name and renamed at the end, so a
crash, a full disk or Ctrl-C never leaves something that looks like a finished bundle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warble_mlx.errors import CheckpointError


@contextmanager
def staged_folder(out: Path, *, source: Path, force: bool = False) -> Iterator[Path]:
    """Give a temporary folder that becomes `out` when the block ends without an exception.

    `source` is the folder being read: neither may lie inside the other. An existing `out` is
    refused, or with `force` replaced, provided that it is a model folder. Missing parents are
    made, and removed again if the block fails.

    Raises CheckpointError before the block runs if `out` cannot be used.
    """
    final = out.resolve()
    _check_target(out, final, source.resolve(), force)
    made = _make_parents(final.parent)
    stage = final.parent / f".{final.name}.partial-{os.getpid()}"
    try:
        if stage.exists():  # left by a killed process that had the same id
            shutil.rmtree(stage)
        stage.mkdir()
        yield stage
        replace_folder(stage, final)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        for folder in made:
            folder.rmdir()
        raise


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


def replace_folder(stage: Path, final: Path) -> None:
    """Rename `stage` to `final`; a folder that is there goes once the new one has its place."""
    if not final.exists():
        stage.rename(final)
        return
    old = final.parent / f".{final.name}.old-{os.getpid()}"
    final.rename(old)
    try:
        stage.rename(final)
    except BaseException:
        old.rename(final)
        raise
    shutil.rmtree(old)
