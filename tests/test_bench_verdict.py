"""Floors and verdicts from made-up counts and rates."""

from __future__ import annotations

import pytest

from warble_mlx.bench.hardware import Hardware
from warble_mlx.bench.verdict import Bound, Counts, Floors, Verdict, floors, judge

# 1 ms for 1,000 dispatches, for 1 GB and for 10**9 multiply-adds.
HARDWARE = Hardware(copy_gbs=1000.0, read_gbs=800.0, gmacs=1000.0, launch_us=1.0)


def counts(
    dispatches: int = 1000, host_ms: float = 0.1, nbytes: int = 10**9, macs: int = 10**9
) -> Counts:
    return Counts(dispatches, host_ms, nbytes, macs)


def verdict(measured_ms: float, of: Counts, **changes: object) -> Verdict:
    conditions = {"rows": 1, "compiled": True, "packed": True, "gpu": True} | changes
    return judge(measured_ms, of, HARDWARE, **conditions)  # type: ignore[arg-type]


def test_floors_are_counts_over_rates() -> None:
    assert floors(counts(2000, 0.1, 3 * 10**9, 4 * 10**9), HARDWARE) == Floors(2.0, 3.0, 4.0)


def test_the_faster_way_to_move_bytes_makes_the_floor() -> None:
    reading = Hardware(copy_gbs=500.0, read_gbs=2000.0, gmacs=1.0, launch_us=1.0)
    assert floors(counts(nbytes=10**9), reading).bandwidth_ms == pytest.approx(0.5)


def test_a_slow_host_raises_the_launch_floor() -> None:
    slow = counts(host_ms=7.0)
    assert floors(slow, HARDWARE).launch_ms == 7.0
    assert "building the graph" in verdict(10.0, slow).sentence


@pytest.mark.parametrize(
    ("of", "bound", "words"),
    [
        (counts(dispatches=5000), "launch", "5,000 dispatches at 1.0 µs each"),
        (counts(nbytes=5 * 10**9), "bandwidth", "5,000 MB at 1,000.0 GB/s"),
        (counts(macs=5 * 10**9), "compute", "5,000 M multiply-adds at 1,000 G/s"),
    ],
)
def test_the_highest_floor_decides(of: Counts, bound: Bound, words: str) -> None:
    found = verdict(6.25, of)
    assert (found.bound, found.share) == (bound, pytest.approx(0.8))
    assert found.sentence.startswith(f"{bound}-bound: {words}")
    assert "5.00 ms of the 6.25 ms" in found.sentence
    assert "(80%)" in found.sentence


def test_unexplained_time_is_said() -> None:
    assert any("other 75%" in line for line in verdict(4.0, counts()).advice)
    assert not any("No floor" in line for line in verdict(1.5, counts()).advice)


def test_a_beaten_floor_is_said() -> None:
    assert any("Faster than its floor" in line for line in verdict(0.5, counts()).advice)


def test_advice_fits_the_case() -> None:
    def advice(of: Counts, **changes: object) -> str:
        return " ".join(verdict(6.25, of, **changes).advice)

    launch, bandwidth = counts(dispatches=5000), counts(nbytes=5 * 10**9)
    assert "--rows 8" in advice(launch)
    assert "--rows 8" not in advice(launch, rows=8)
    assert "Compile the step" in advice(launch, compiled=False)
    assert "Compile the step" not in advice(launch)
    assert "Quantise" in advice(bandwidth, packed=False)
    assert "Quantise" not in advice(bandwidth)
    assert "unpacked when loaded" in advice(bandwidth, packed=False, gpu=False)
    assert "BLAS" in advice(counts(macs=5 * 10**9))
