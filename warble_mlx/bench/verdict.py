"""Three floors under a frame's time, and what the highest of them means."""

from __future__ import annotations

from typing import Literal

import msgspec

from warble_mlx.bench.hardware import Hardware

Bound = Literal["launch", "bandwidth", "compute"]

EXPLAINED = 0.5  # a floor lower than this share of the time leaves most of it unexplained
CLOSE = 0.8  # from here on there is little left to gain without moving the floor itself


class Floors(msgspec.Struct, frozen=True):
    """Milliseconds that a step cannot do without, one reason at a time.

    `launch_ms` is the time to dispatch a step's primitives or, if that takes longer, to build
    their graph on the host, which goes on while the device computes the step before.
    """

    launch_ms: float
    bandwidth_ms: float
    compute_ms: float

    @property
    def highest(self) -> tuple[Bound, float]:
        """The floor that decides, and its milliseconds."""
        return max(self.by_name.items(), key=lambda item: item[1])

    @property
    def by_name(self) -> dict[Bound, float]:
        """Milliseconds by the name of the bound."""
        return {
            "launch": self.launch_ms,
            "bandwidth": self.bandwidth_ms,
            "compute": self.compute_ms,
        }


class Verdict(msgspec.Struct, frozen=True):
    """What bounds the step, which share of its time that floor is, why, and what to try."""

    bound: Bound
    share: float
    sentence: str
    advice: list[str]


class Counts(msgspec.Struct, frozen=True):
    """What one step takes: primitives, host milliseconds to build them, bytes, multiply-adds."""

    dispatches: int
    host_ms: float
    nbytes: int
    macs: int


def floors(counts: Counts, hardware: Hardware) -> Floors:
    """Counts of one step over the rates of this device."""
    return Floors(
        launch_ms=max(counts.dispatches * hardware.launch_us / 1e3, counts.host_ms),
        bandwidth_ms=counts.nbytes / hardware.bandwidth_gbs / 1e6,
        compute_ms=counts.macs / hardware.gmacs / 1e6,
    )


def judge(
    measured_ms: float,
    counts: Counts,
    hardware: Hardware,
    *,
    rows: int,
    compiled: bool,
    packed: bool,
    gpu: bool,
) -> Verdict:
    """Name the bottleneck of a step that took `measured_ms`."""
    named = floors(counts, hardware)
    bound, floor = named.highest
    share = floor / measured_ms
    launch = f"{counts.dispatches:,} dispatches at {hardware.launch_us:.1f} µs each"
    if floor == counts.host_ms:
        launch = f"building the graph of {counts.dispatches:,} dispatches on the host"
    reason = {
        "launch": launch,
        "bandwidth": f"{counts.nbytes / 1e6:,.0f} MB at {hardware.bandwidth_gbs:,.1f} GB/s",
        "compute": f"{counts.macs / 1e6:,.0f} M multiply-adds at {hardware.gmacs:,.0f} G/s",
    }[bound]
    others = ", ".join(f"{name} {ms:.2f} ms" for name, ms in named.by_name.items() if name != bound)
    sentence = (
        f"{bound}-bound: {reason}: {floor:.2f} ms of the {measured_ms:.2f} ms per step"
        f" ({share:.0%}). The other floors are lower: {others}."
    )
    return Verdict(bound, share, sentence, _advice(bound, share, rows, compiled, packed, gpu))


def _advice(
    bound: Bound, share: float, rows: int, compiled: bool, packed: bool, gpu: bool
) -> list[str]:
    advice = []
    if share > 1:
        advice.append(
            "Faster than its floor: parts of the step run at the same time, or a cache serves"
            " weights that are read again."
        )
    elif share < EXPLAINED:
        advice.append(
            f"No floor explains the other {1 - share:.0%}: kernels too small to fill the device,"
            " or the host between them. Look at the parts, and at a profiler."
        )
    if share < CLOSE:
        advice.append(f"Up to {1 / share:.1f}x is left before the step itself has to change.")
    if bound == "launch":
        if gpu and not compiled:
            advice.append("Compile the step: fused primitives are dispatched once.")
        if rows == 1:
            advice.append("Step several streams together: they share the dispatches (--rows 8).")
        advice.append("A faster memory or fewer bits will not help; fewer, larger kernels will.")
    elif bound == "bandwidth":
        if not gpu:
            advice.append("Fewer bits change nothing on a CPU: weights are unpacked when loaded.")
        elif not packed:
            advice.append("Quantise the blocks (4 bits: 3.6 times fewer bytes than 16).")
        if rows == 1:
            advice.append("Step several streams together: they share the weights (--rows 8).")
        advice.append("A device with more GB/s is faster in proportion; fusing more is not.")
    else:
        if rows > 1:
            advice.append("More rows at once gain nothing more: arithmetic is full.")
        advice.append(
            "Lower precision arithmetic or a faster BLAS helps (on a CPU: OpenBLAS, more cores);"
            " fewer bytes or dispatches do not."
        )
    return advice
