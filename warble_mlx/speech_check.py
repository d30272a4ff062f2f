"""Does a finished model speak? Asked before a bundle is handed over."""

from __future__ import annotations

from pathlib import Path

import warble_mlx
from warble_mlx.errors import CheckpointError, SickError
from warble_mlx.speech import Speech

TEXT = "This model can speak."
_FAILED = (
    "{name} does not speak: {found}. --no-check leaves this test out, for models that were never"
    " trained to"
)


def check_speaks(folder: Path, name: str) -> Speech:
    """Load the bundle in `folder` and let it speak a sentence; `name` is how errors call it.

    Raises CheckpointError if no whole utterance comes of it, or one that is no speech.
    """
    try:
        speech = warble_mlx.load(str(folder), offline=True).say(TEXT, greedy=True)
    except SickError as error:
        found = f"{error.seen}; probably {error.cause} ({error.reason})"
        raise CheckpointError(_FAILED.format(name=name, found=found)) from error
    if speech.finish_reason != "stop" or not speech.seconds:
        found = f"{speech.seconds:.2f} s, finish reason {speech.finish_reason}"
        raise CheckpointError(_FAILED.format(name=name, found=found))
    return speech
