"""Reports and charts as files: checked before anything is measured, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from warble_mlx.errors import MissingExtraError, WarbleError
from warble_mlx.staging import staged_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_report(path: Path) -> None:
    """Raise WarbleError if `path` cannot become a file."""
    if path.is_dir():
        raise WarbleError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise WarbleError(
            f"there is no folder {path.parent}: make it first, with mkdir -p {path.parent}"
        )
    if not os.access(path.parent, os.W_OK):
        raise WarbleError(f"{path} cannot be written: its folder is read-only")


def check_chart(path: Path) -> None:
    """Raise MissingExtraError without matplotlib, WarbleError if `path` cannot become a chart."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Drawing a chart", "matplotlib", "bench") from error
    check_report(path)
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in Figure().canvas.get_supported_filetypes():
        raise WarbleError(f"{path} cannot be drawn: name a file that ends in .png, .svg or .pdf")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path that becomes `path` when the block ends.

    Raises WarbleError if it cannot be written; then `path` is as it was.
    """
    try:
        with staged_file(path) as part:
            yield part
    except OSError as error:
        raise WarbleError(f"{path} cannot be written: {error.strerror or error}") from error


def write_report_file(data: bytes, path: Path) -> None:
    """Write `data`. Raises WarbleError if it cannot be written."""
    with whole_file(path) as part:
        part.write_bytes(data)


def save_chart(figure: Figure, path: Path) -> None:
    """Write a figure in the format of `path`'s suffix. Raises WarbleError if it cannot be."""
    with whole_file(path) as part:
        figure.savefig(part, format=path.suffix.lstrip(".").lower())
