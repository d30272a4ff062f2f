"""Packing learned from token streams: the source speaks texts, its Linears are rounded to suit.

Block by block, and Linear by Linear within a block, each is packed with the inputs that it gets
from what is packed already, so that later Linears make up for the errors of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from warble_mlx.dual_ar import DualAR
from warble_mlx.errors import WarbleError
from warble_mlx.fidelity.forced import Forced, fast_scores, forced, slow_hidden
from warble_mlx.fidelity.streams import digest, generate, requests_for
from warble_mlx.fidelity.texts import CALIBRATION
from warble_mlx.quant.affine import Packed, unpacked
from warble_mlx.quant.compensation import compensate, damped, inverse_factor
from warble_mlx.quant.policy import Packing
from warble_mlx.speech import Warble

METHOD = "GPTQ on generated token streams"
SEED = 1
MOST_TEXTS = 128  # all of them go through a block at once
FAST_FRAMES = 2048  # of all that were generated, evenly spaced: each has ten positions
SCALES_DTYPE = mx.bfloat16  # that of the weights, as `mx.quantize` leaves it

Progress = Callable[[str], None]
"""Called with a line on what is being done."""


def check_modes(layers: Mapping[str, Packing]) -> None:
    """Raise WarbleError if a mode cannot be calibrated: only affine scales are free to choose."""
    others = {packing.mode for packing in layers.values()} - {"affine"}
    if others:
        raise WarbleError(
            f"calibration works in mode affine, not in {', '.join(sorted(others))}: leave out"
            " --calibrate, or --mode"
        )


def calibrated(
    bundle: Path,
    layers: Mapping[str, Packing],
    texts: Sequence[str],
    progress: Progress | None = None,
) -> tuple[dict[str, Packed], dict[str, Any]]:
    """Packed parameters by module path for all of `layers`, and what to record about them.

    The bundle speaks `texts` with its voices in turn, at its own sampling settings and fixed
    seeds, in float32.
    """
    check_modes(layers)
    tell = progress or _silent
    warble = Warble(bundle, str(bundle), dtype="float32", dequantize=True)
    tell(f"speaking {len(texts)} calibration texts")
    given = calibration_streams(warble, texts)
    facts = {
        "method": METHOD,
        "texts": len(texts),
        "texts_sha256": digest(texts),
        "frames": len(given.codes),
        "seed": SEED,
    }
    return learn(warble.engine.model, layers, given, tell), facts


def calibration_streams(warble: Warble, texts: Sequence[str]) -> Forced:
    """What `warble` makes of texts, ready to be read back.

    Raises WarbleError for more than MOST_TEXTS, and if nothing comes of them.
    """
    if len(texts) > MOST_TEXTS:
        raise WarbleError(
            f"{len(texts)} calibration texts are more than fit into memory together: give at most"
            f" {MOST_TEXTS}; {len(CALIBRATION)} are enough"
        )
    made = generate(warble.engine, requests_for(warble, texts, SEED))
    streams = [stream for stream in made if stream.frames]
    if not streams:
        raise WarbleError(
            "the model made no frame of any calibration text: give other texts, or leave out"
            " --calibrate"
        )
    return forced(streams, warble.config.semantic_begin_id, warble.config.codebook_size)


def learn(
    model: DualAR,
    layers: Mapping[str, Packing],
    given: Forced,
    progress: Progress | None = None,
) -> dict[str, Packed]:
    """Packed parameters of the Linears in `layers`, by the file's paths. The model is float32 and
    comes out as it went in."""
    tell = progress or _silent
    found: dict[str, Packed] = {}
    before: list[tuple[nn.Module, mx.array]] = []

    def visit(path: str, linear: nn.Module, inputs: mx.array) -> None:
        shares = _shares(path, linear["weight"])
        wanted = [own for own, _ in shares if own in layers]
        if not wanted:
            return
        flat = inputs.reshape(-1, inputs.shape[-1])
        if path.startswith("layers."):
            flat = flat * given.real.reshape(-1, 1).astype(flat.dtype)
        products = damped(np.array(flat.T @ flat).astype(np.float64))
        factor = inverse_factor(products)
        weights = []
        for own, weight in shares:
            if own in layers:
                p = layers[own]
                found[own] = compensate(
                    np.array(weight), factor, np.diag(products), p.bits, p.group_size, SCALES_DTYPE
                )
                weight = unpacked(found[own], p)
            weights.append(weight)
        before.append((linear, linear["weight"]))
        linear["weight"] = mx.concatenate(weights)
        tell(f"packed {len(found)} of {len(layers)}: {', '.join(wanted)}")

    frames = len(given.codes)
    chosen = mx.array(np.linspace(0, frames - 1, min(frames, FAST_FRAMES)).astype(np.int32))
    try:
        hidden = slow_hidden(model, given, visit)[given.framed]
        mx.eval(fast_scores(model, hidden[chosen], given.codes[chosen], visit))
    finally:
        for linear, weight in before:
            linear["weight"] = weight
    return found


def _shares(path: str, weight: mx.array) -> list[tuple[str, mx.array]]:
    """The Linears of the file that a Linear in memory is made of, w13 of w1 and w3."""
    if not path.endswith(".w13"):
        return [(path, weight)]
    stem = path.removesuffix("w13")
    gate, value = mx.split(weight, 2)
    return [(f"{stem}w1", gate), (f"{stem}w3", value)]


def _silent(_: str) -> None:
    return
