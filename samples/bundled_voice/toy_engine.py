"""A stand-in for Kokoro that hums: for tests and for trying the recipe without any download.

Every phoneme is a chord of its own for a few frames, at a pitch that the style gives. A model
trained on it learns nothing useful, but every stage runs on it as on speech.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samples.bundled_voice.casting import Table
from samples.bundled_voice.kokoro import FRAME, RATE, Spoken


class ToyEngine:
    """Speaks like `Kokoro`: same arguments, same result."""

    device = torch.device("cpu")

    def speak(self, tokens: list[int], style: Tensor, speed: float) -> Spoken:
        ids = torch.tensor([0, *tokens, 0])
        frames = ((2 + ids % 3) / speed).round().clamp(min=1).long()
        each = torch.repeat_interleave(ids, frames * FRAME).float()
        quiet = (each == 0) | (each == 16)  # silence around a line, and for spaces
        hertz = 110.0 * 2 ** float(style[:128].mean().clamp(-1, 1))
        phase = torch.cumsum(torch.full_like(each, 2 * math.pi * hertz / RATE), 0)
        sound = 0.3 * torch.sin(phase) + 0.1 * torch.sin(phase * (2 + each % 7))
        sound = torch.where(quiet, torch.zeros_like(sound), sound)
        pitch = torch.where(quiet[:: FRAME // 2], 0.0, hertz)
        return Spoken(sound, frames, pitch)


def toy_tables(names: list[str]) -> Table:
    """A style table for each name: constant, and another for each."""
    return {name: torch.full((4, 256), (i + 1) / len(names) - 0.5) for i, name in enumerate(names)}
