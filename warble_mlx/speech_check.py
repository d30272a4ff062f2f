"""Does a finished model speak? Asked before a bundle is handed over."""

from __future__ import annotations

from pathlib import Path

import warble_mlx
from warble_mlx.errors import CheckpointError
from warble_mlx.speech import Speech

TEXT = "This model can speak."


def check_speaks(folder: Path, name: str) -> Speech:
    """Load the bundle in `folder` and let it speak a sentence; `name` is how errors call it.

    Raises CheckpointError if no whole utterance comes of it, SickError for one that is no speech.
    """
    speech = warble_mlx.load(str(folder), offline=True).say(TEXT, greedy=True)
    if speech.finish_reason != "stop" or not speech.seconds:
        raise CheckpointError(
            f"{name} does not speak: {speech.seconds:.2f} s, finish reason {speech.finish_reason}."
            " --no-check leaves this test out, for models that were never trained to"
        )
    return speech
