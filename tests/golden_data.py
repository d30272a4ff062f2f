"""Numbers made by the published reference code, and the checkpoints they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from warble_mlx.safetensors_file import read_header

FOLDER = Path(__file__).parent / "golden"


def tensors(name: str) -> dict[str, np.ndarray]:
    """All tensors of golden/<name>.safetensors as numpy arrays."""
    header = read_header(FOLDER / f"{name}.safetensors")
    return {k: header.read(k) for k in header.entries}


def manifest() -> dict[str, Any]:
    return json.loads((FOLDER / "manifest.json").read_text())


def assert_close(got: Any, wanted: Any, limit: float, what: str) -> None:
    """Largest absolute difference below `limit`; the message says where it is."""
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, wanted {wanted.shape}"
    difference = np.abs(got - wanted)
    worst = np.unravel_index(np.argmax(difference), difference.shape)
    assert np.isfinite(got).all(), f"{what}: not finite"
    assert difference[worst] < limit, (
        f"{what}: differs by {difference[worst]:.2e} at {tuple(map(int, worst))}, limit {limit:.0e}"
    )


def assert_same_codes(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Codes [10, frames] are equal; the message shows the first frame that is not."""
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, wanted {wanted.shape}"
    wrong = np.flatnonzero((got != wanted).any(axis=0))
    assert wrong.size == 0, (
        f"{what}: first differing frame {wrong[0]} of {wanted.shape[1]}:"
        f" got {got[:, wrong[0]].tolist()}, wanted {wanted[:, wrong[0]].tolist()}"
    )
