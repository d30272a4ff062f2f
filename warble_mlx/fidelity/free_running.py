"""What becomes of an utterance when each model goes its own way: where does it end?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from warble_mlx.fidelity.streams import TokenStream


class FreeRunning(msgspec.Struct, frozen=True):
    """Two models, the same texts, voices and seeds. Shifts count frames, over the utterances
    that both ended."""

    utterances: int
    ended: int
    reference_ended: int
    mean_shift: float | None  # of EOS; positive: later than the reference
    mean_absolute_shift: float | None
    length_ratio: float  # frames of all utterances over the reference's


def compare_lengths(reference: Sequence[TokenStream], own: Sequence[TokenStream]) -> FreeRunning:
    """Lengths and ends of the same requests, spoken by two models."""
    shifts = [
        b.frames - a.frames for a, b in zip(reference, own, strict=True) if a.ended and b.ended
    ]
    spoken = sum(stream.frames for stream in reference)
    return FreeRunning(
        utterances=len(own),
        ended=sum(stream.ended for stream in own),
        reference_ended=sum(stream.ended for stream in reference),
        mean_shift=float(np.mean(shifts)) if shifts else None,
        mean_absolute_shift=float(np.mean(np.abs(shifts))) if shifts else None,
        length_ratio=sum(stream.frames for stream in own) / max(spoken, 1),
    )
