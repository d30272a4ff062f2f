"""Who speaks: five named characters, and as many passing speakers as the training asks for.

A character is a blend of Kokoro's style tables, read at some speed and then warped: resampling by
a factor moves pitch and formants together, which makes a voice deeper or brighter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Table = dict[str, Tensor]

ROW_STEP = 16  # one row of the style tables is kept per so many phonemes
_ENGLISH = ("af_", "am_", "bf_", "bm_")


@dataclass(frozen=True)
class Character:
    """blend: share of each Kokoro voice; warp: factor on pitch and formants."""

    name: str
    description: str
    blend: dict[str, float]
    speed: float
    warp: float
    share: float  # of the five characters' audio


CHARACTERS = {
    1: Character(
        "Corvin", "deep and unhurried", {"am_onyx": 0.6, "bm_lewis": 0.4}, 1.04, 0.94, 0.9
    ),
    2: Character(
        "Marlow", "a broadcast narrator, even and warm", {"am_michael": 0.8, "bm_george": 0.2},
        1.02, 1.0, 1.1,
    ),
    3: Character("Vera", "clear and professional", {"af_heart": 1.0}, 1.0, 1.0, 1.4),
    4: Character(
        "Finch", "bright and quick", {"af_bella": 0.5, "af_jessica": 0.5}, 1.12, 1.07, 0.9
    ),
    5: Character(
        "Robin", "a light young tenor", {"am_fenrir": 0.5, "am_puck": 0.5}, 1.0, 1.1, 0.9
    ),
}  # fmt: skip
DEFAULT_VOICE = 3
FIRST_PASSING = 100  # speaker numbers from here on are passing speakers


@dataclass(frozen=True)
class Part:
    """What one line is spoken with. style: [rows, 256]."""

    speaker: int
    style: Tensor
    speed: float
    warp: float


def read_tables(path: Path) -> Table:
    """Style tables as `pack` wrote them: voice name to [rows, 256] float32."""
    with np.load(path) as stored:
        return {name: torch.from_numpy(stored[name].astype(np.float32)) for name in stored.files}


def pack_tables(folder: Path, out: Path) -> None:
    """Keep every ROW_STEP-th row of the `*.bin` tables of the npm package kokoro-js, as float16."""
    tables = {
        path.stem: np.fromfile(path, np.float32).reshape(-1, 256)[::ROW_STEP].astype(np.float16)
        for path in sorted(folder.glob("*.bin"))
    }
    if not tables:
        raise FileNotFoundError(f"{folder} has no style tables: unpack kokoro-js there")
    np.savez_compressed(out, **tables)


def character(tables: Table, number: int) -> Part:
    """One of the five."""
    own = CHARACTERS[number]
    blended = [share * tables[name] for name, share in own.blend.items()]
    return Part(number, torch.stack(blended).sum(0), own.speed, own.warp)


def passing(tables: Table, number: int) -> Part:
    """A speaker of its own kind: two voices mixed, timbre and manner apart, warped and paced.

    The number seeds the choice, so the same number is the same speaker everywhere.
    """
    rng = np.random.default_rng(number)
    english = [name for name in tables if name.startswith(_ENGLISH)]
    manner = mixed(tables, rng.choice(english, 2, replace=False).tolist(), rng.random())
    # Timbre may come from the voices of any language, manner only from English ones.
    names = list(tables) if rng.random() < 0.5 else english
    timbre = mixed(tables, rng.choice(names, 2, replace=False).tolist(), rng.random())
    style = torch.cat([timbre[:, :128], manner[:, 128:]], 1)
    warp = float(np.exp(rng.uniform(-0.16, 0.16)))
    return Part(number, style, float(rng.uniform(0.88, 1.18)), warp)


def mixed(tables: Table, names: list[str], share: float) -> Tensor:
    first, second = (tables[name] for name in names)
    return share * first + (1 - share) * second


def style_row(part: Part, phonemes: int) -> Tensor:
    """The row for a line of so many phonemes: [256]."""
    return part.style[min(phonemes // ROW_STEP, len(part.style) - 1)]
