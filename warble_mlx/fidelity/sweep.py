"""Many packings of one model, side by side: bytes per frame beside what they cost.

Nothing is written: the reference's own Linears are rounded in memory and put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import msgspec

from warble_mlx import __version__
from warble_mlx.bench.synthetic import linear_shapes, stored_path
from warble_mlx.dual_ar import DualAR
from warble_mlx.errors import WarbleError
from warble_mlx.fidelity.compare import (
    SEED,
    bytes_per_frame,
    open_float32,
    stored_packings,
    with_frames,
)
from warble_mlx.fidelity.divergence import Divergence, Reference
from warble_mlx.fidelity.streams import digest, generate, requests_for
from warble_mlx.quant.affine import Packed, unpacked
from warble_mlx.quant.calibration import calibration_streams, learn
from warble_mlx.quant.policy import Packing, plan

Component = Literal["both", "slow", "fast"]
Progress = Callable[[str], None]

Change = Callable[[Mapping[str, Packing]], AbstractContextManager[None]]
"""Changes the Linears named, for the length of a `with` block."""

BITS, GROUPS = (8, 4, 3), (32, 64, 128)
OTHERS = (
    Packing(6, 64, "affine"),
    Packing(8, 32, "mxfp8"),
    Packing(4, 32, "mxfp4"),
    Packing(4, 16, "nvfp4"),
)
LEARNED_BITS = (4, 3)


class Row(msgspec.Struct, frozen=True):
    """One packing of one component and what it gave."""

    packing: Packing
    component: Component
    learned: bool
    bytes_per_frame: int
    divergence: Divergence


class Sweep(msgspec.Struct, frozen=True):
    """All rows, and what they were measured on."""

    reference: str
    texts: int
    texts_sha256: str
    reference_bytes_per_frame: int
    rows: tuple[Row, ...]
    version: str = __version__


def grid() -> list[Packing]:
    """Every packing that the sweep tries."""
    affine = [Packing(bits, group, "affine") for bits in BITS for group in GROUPS]
    return [*affine, *OTHERS]


def sweep(
    reference: Path,
    texts: Sequence[str],
    *,
    packings: Iterable[Packing] | None = None,
    calibration: Sequence[str] = (),
    seed: int = SEED,
    progress: Progress | None = None,
) -> Sweep:
    """Measure packings of slow AR, fast AR and both, by rounding; with `calibration` texts also
    learned ones (affine, 4 and 3 bits).

    Group sizes that do not divide the model's widths are left out. Raises WarbleError for a
    reference that is quantised.
    """
    tell = progress or _silent
    if stored_packings(reference):
        raise WarbleError(f"{reference} is quantised already: give the bundle it was made from")
    warble = open_float32(reference)
    model = warble.engine.model
    tell(f"the reference speaks {len(texts)} texts")
    streams = with_frames(generate(warble.engine, requests_for(warble, texts, seed)))
    known = Reference(model, streams)
    shapes = linear_shapes(model)
    calibrating = calibration_streams(warble, calibration) if calibration else None
    rows: list[Row] = []
    for packing in list(grid() if packings is None else packings):
        try:
            layers = plan(shapes, packing)
        except WarbleError:  # the group size does not divide a width
            continue
        changes: dict[bool, Change] = {False: partial(rounded, model)}
        if calibrating is not None and packing.mode == "affine" and packing.bits in LEARNED_BITS:
            # w1 and w3 are packed apart: the plan knows them under one name here.
            both = layers | {p.replace(".w1", ".w3"): packing for p in layers if p.endswith(".w1")}
            changes[True] = partial(replaced, model, learn(model, both, calibrating))
        for learned, change in changes.items():
            for component, found in _components(known, model, layers, change):
                cost = bytes_per_frame(warble.config, _part(layers, component))
                rows.append(Row(packing, component, learned, cost, found))
                tell(_line(rows[-1]))
    if not rows:
        raise WarbleError("no packing of the sweep fits the model's widths")
    return Sweep(
        reference.name,
        len(texts),
        digest(texts),
        bytes_per_frame(warble.config, {}),
        tuple(rows),
    )


def _part(layers: Mapping[str, Packing], component: Component) -> dict[str, Packing]:
    slow, fast = component != "fast", component != "slow"
    return {
        path: own
        for path, own in layers.items()
        if (fast if path.startswith("fast_layers.") else slow)
    }


def _components(
    known: Reference, model: DualAR, layers: Mapping[str, Packing], change: Change
) -> Iterator[tuple[Component, Divergence]]:
    """Both transformers changed, the slow one alone, the fast one alone; each pass once."""
    with change(layers):
        slow = known.slow_passes(model)
        yield "both", known.compare(model, slow)
    yield "slow", known.compare(model, slow)
    with change(_part(layers, "fast")):
        yield "fast", known.compare(model, known.slow)


@contextmanager
def rounded(model: DualAR, layers: Mapping[str, Packing]) -> Iterator[None]:
    """Round a float32 model's Linears to nearest, as packing and unpacking them would."""

    def value(path: str, weight: mx.array) -> mx.array | None:
        packing = layers.get(path)
        if packing is None:
            return None
        parts = mx.quantize(weight.astype(mx.bfloat16), **packing._asdict())
        return unpacked(parts, packing)

    with _changed(model, value):
        yield


@contextmanager
def replaced(
    model: DualAR, learned: Mapping[str, Packed], layers: Mapping[str, Packing]
) -> Iterator[None]:
    """Give those Linears of a float32 model that are in `layers` the values of packed parameters;
    w3 has the packing of its w1."""

    def value(path: str, _: mx.array) -> mx.array | None:
        if path not in layers:
            return None
        parts = [path, path.replace(".w1", ".w3")] if path.endswith(".w1") else [path]
        return mx.concatenate([unpacked(learned[p], layers[path]) for p in parts])

    with _changed(model, value):
        yield


@contextmanager
def _changed(model: DualAR, value: Callable[[str, mx.array], mx.array | None]) -> Iterator[None]:
    before: list[tuple[nn.Module, mx.array]] = []
    try:
        for path, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            new = value(stored_path(path), module["weight"])
            if new is not None:
                before.append((module, module["weight"]))
                module["weight"] = new
        mx.eval(model.parameters())
        yield
    finally:
        for module, weight in before:
            module["weight"] = weight


def _line(row: Row) -> str:
    p, how = row.packing, " learned" if row.learned else ""
    return (
        f"{p.mode} {p.bits} bits, groups of {p.group_size}, {row.component}{how}:"
        f" {row.divergence.semantic_kl:.4f} / {row.divergence.fast_kl:.4f} nats"
    )


def _silent(_: str) -> None:
    return
