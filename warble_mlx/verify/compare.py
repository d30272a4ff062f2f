"""How near two engines must come, and what is said when they do not.

Limits come in three strengths. Float32 on both sides is held to what independent float32
implementations reach. In bfloat16, or where one side's weights were quantised, values are compared
by relative error and choices by how often they agree; both are reported.

A choice that differs is a tie if the other engine's own scores put both candidates closer together
than `tie`. Ties are counted and reported, never passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

MIN_TEMPERATURE = 1e-5  # of the sampling rule
# How far a filter's border may be moved: by what float32 sums and scores differ between engines.
BORDER_MASS, BORDER_SCORE = 1e-5, 1e-4

Array = npt.NDArray[Any]
State = Literal["passed", "failed", "skipped"]
Strength = Literal["float32", "bfloat16", "quantised"]


@dataclass(frozen=True)
class Limits:
    """The largest errors allowed, see `difference` for what `relative` means."""

    strength: Strength
    relative: bool
    embedding: float
    layer: float
    hidden: float
    logits: float
    tie: float  # scores: a smaller margin makes a differing choice a tie
    agreement: float  # share of choices that must agree, given the same history


# Seen between PyTorch and MLX, float32, CPU: layer 1e-6, hidden 1e-6 (tiny) to 5e-6 (published
# geometry), logits 1.5e-6 to 3.4e-6.
EXACT = Limits("float32", False, 1e-6, 1e-5, 4e-5, 2e-5, 1e-4, 1.0)
# Seen with random weights: layer 0.012, hidden 0.018, logits 0.011, agreement 97 %.
BFLOAT16 = Limits("bfloat16", True, 0.01, 0.03, 0.15, 0.1, 0.0, 0.8)
# Seen at 4 bits on a trained model: layer 0.06, hidden 0.15, logits 0.11, agreement 65 %. The parts
# of a layer in the wrong place give errors around 1.
QUANTISED = Limits("quantised", True, 0.01, 0.3, 0.6, 0.6, 0.0, 0.25)


@dataclass(frozen=True)
class CodecLimits:
    """The codec always runs in float32; what differs is how its weights were stored."""

    relative: bool
    stage: float
    wave: float
    tie: float  # margin between the two best entries of a book


# Seen: stages 1.5e-6, waveform 3e-7 to 1.7e-6.
EXACT_CODEC = CodecLimits(False, 1e-5, 1e-5, 1e-4)
ROUNDED_CODEC = CodecLimits(True, 0.02, 0.02, 1e-2)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one rung.

    `worst` is the largest difference found and `limit` the one allowed; `compared` counts values
    or choices, `ties` choices that differ by less than the tie margin, `agreement` is the share of
    equal choices where that is what counts.
    """

    rung: str
    state: State
    worst: float | None = None
    limit: float | None = None
    compared: int = 0
    ties: int = 0
    agreement: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two arrays, as the limits measure it, and where it is."""

    worst: float
    where: tuple[int, ...]
    got: float
    wanted: float


def difference(got: Array, wanted: Array, *, relative: bool) -> Difference:
    """The error of `got` against `wanted`, of one shape. NaN and infinity are infinitely wrong.

    The error is the largest difference, over the largest value of `wanted` if that exceeds 1. With
    `relative` it is the root mean square of the difference over that of `wanted`.
    """
    if not wanted.size:
        return Difference(0.0, (), 0.0, 0.0)
    one, other = got.astype(np.float64), wanted.astype(np.float64)
    gap = np.abs(one - other)
    gap[~np.isfinite(gap)] = np.inf
    at = np.unravel_index(int(np.argmax(gap)), gap.shape)
    if relative and np.isfinite(gap[at]):
        size = float(np.sqrt(np.mean(np.square(other))))
        worst = float(np.sqrt(np.mean(np.square(gap)))) / max(size, 1e-12)
    else:
        worst = float(gap[at] / max(1.0, np.abs(other).max()))
    return Difference(worst, tuple(map(int, at)), float(got[at]), float(wanted[at]))


def values(
    rung: str, got: Array, wanted: Array, limit: float, *, relative: bool, axes: str
) -> Outcome:
    """The outcome of a rung that compares numbers. `axes` names the indices in the message."""
    if got.shape != wanted.shape:
        return Outcome(
            rung=rung,
            state="failed",
            message=f"shape {list(got.shape)}, the dump has {list(wanted.shape)}",
        )
    found = difference(got, wanted, relative=relative)
    message = ""
    if not np.isfinite(found.got):
        message = (
            f"{found.got} at ({axes}) {list(found.where)}: the weights are damaged, or this MLX"
            " computes wrong values (warble doctor)"
        )
    elif not found.worst <= limit:
        message = (
            f"error {found.worst:.2e}, limit {limit:.0e}; worst at ({axes}) {list(found.where)}:"
            f" {found.got:.6g}, the dump has {found.wanted:.6g}"
        )
    return Outcome(
        rung=rung,
        state="failed" if message else "passed",
        worst=found.worst,
        limit=limit,
        compared=got.size,
        message=message,
    )


def merged(rung: str, parts: list[Outcome]) -> Outcome:
    """One outcome for several of the same rung: the first failure, or the worst that passed."""
    failed = next((p for p in parts if p.state == "failed"), None)
    counted = [p for p in parts if p.worst is not None]
    worst = max((p.worst for p in counted if p.worst is not None), default=None)
    return Outcome(
        rung=rung,
        state="failed" if failed else "passed",
        worst=failed.worst if failed else worst,
        limit=parts[0].limit if parts else None,
        compared=sum(p.compared for p in parts),
        ties=sum(p.ties for p in parts),
        agreement=min((p.agreement for p in parts if p.agreement is not None), default=None),
        message=failed.message if failed else "",
    )


def race_margins(
    logits: Array, uniforms: Array, top_k: int, top_p: float, temperature: float
) -> Array:
    """How clearly each candidate lost a race that another engine decided; 0 for the winner.

    logits and uniforms [V] as that engine had them. The margin [V] is relative: 1 - p / (-ln u) of
    the candidate over the winner's, 1 for what the filter removed. The filter is drawn a little
    wider and a little narrower, too, so that a candidate at its border counts both ways.
    """
    scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    weights = np.exp(ordered - ordered[0])
    mass = np.cumsum(weights / weights.sum())
    tempered = np.exp((ordered - ordered[0]) / max(temperature, MIN_TEMPERATURE))
    with np.errstate(divide="ignore"):
        finish = tempered / -np.log(uniforms[order].astype(np.float64))
    place = np.arange(len(scores))
    inside = place < top_k
    ranks = [inside]
    if top_k < len(scores):
        leaving = inside & (ordered - ordered[top_k] < BORDER_SCORE)
        entering = ~inside & (ordered[top_k - 1] - ordered < BORDER_SCORE)
        ranks += [inside | entering, inside & ~leaving | entering]
    margins = np.ones(len(scores))
    for allowed in ranks:
        for slack in (-BORDER_MASS, 0.0, BORDER_MASS):
            kept = allowed & (mass <= top_p + slack)
            kept[0] = True
            own = np.where(kept, 1 - finish / finish[kept].max(), 1.0)
            margins[order] = np.minimum(margins[order], own)
    return margins
