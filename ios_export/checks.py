"""Comparisons that decide whether an export may be called done."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from warble_mlx.errors import WarbleError
from warble_mlx.ios_export.manifest import Check

HERE = "exporting machine"
DEVICE = "device"

Floats = npt.NDArray[np.floating]


class ExportError(WarbleError):
    """An exported part did not pass its own checks, so it was not kept."""

    exit_status = 1


def at_least(name: str, value: float, limit: float, unit: str = "", **more: str) -> Check:
    """Passes if value >= limit; what is not a number fails."""
    return _judged(name, value >= limit, value, limit, unit, **more)


def at_most(name: str, value: float, limit: float, unit: str = "", **more: str) -> Check:
    """Passes if value <= limit; what is not a number fails."""
    return _judged(name, value <= limit, value, limit, unit, **more)


def equal(name: str, value: float, wanted: float, unit: str = "", **more: str) -> Check:
    """Passes if value == wanted."""
    return _judged(name, value == wanted, value, wanted, unit, **more)


def unverified(name: str, note: str) -> Check:
    """Something that only a device can tell."""
    return Check(name=name, result="unverified", where=DEVICE, note=note)


def _judged(
    name: str,
    good: bool,
    value: float,
    limit: float,
    unit: str,
    *,
    where: str = HERE,
    note: str = "",
) -> Check:
    return Check(
        name=name,
        result="pass" if good else "fail",
        where=where,
        value=_finite(value),
        limit=_finite(limit),
        unit=unit,
        note=note,
    )


def _finite(value: float) -> float:
    """JSON has no infinities: agreement without any difference is written as 999."""
    return float(value) if math.isfinite(value) else math.copysign(999.0, value or 1.0)


def decibels(found: Floats, wanted: Floats, *, least: float = 0.0) -> float:
    """Signal over difference of two arrays of one shape, in dB; infinite if they are equal and
    not a number if anything in them is not finite. A signal of a root mean square below `least`
    counts as one of `least`.

    Raises ValueError for other shapes: equal lengths are part of being equal.
    """
    if found.shape != wanted.shape:
        raise ValueError(f"{found.shape} and {wanted.shape} cannot be compared")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    difference = float(np.linalg.norm(a - b))
    signal = max(float(np.linalg.norm(b)), least * math.sqrt(b.size))
    if difference == 0:
        return math.inf
    return 20 * math.log10(signal / difference) if signal else -math.inf


def require(part: str, checks: Iterable[Check]) -> None:
    """Raise ExportError that names every failed check."""
    failed = [c for c in checks if c.result == "fail"]
    if failed:
        seen = "; ".join(
            f"{c.name} is {c.value:.6g} {c.unit}".rstrip()
            + f", limit {c.limit:.6g}"
            + (f" ({c.note})" if c.note else "")
            for c in failed
            if c.value is not None and c.limit is not None
        )
        raise ExportError(
            f"{part} was exported but failed {len(failed)} of its checks, so it was dropped:"
            f" {seen}."
            " Run `warble verify` on the bundle first; if that passes, this is a defect of the"
            " exporter or of the installed MLX or coremltools version"
        )
