"""Two measurements side by side."""

from __future__ import annotations

from collections.abc import Callable

from warble_mlx.bench.cost import total_bytes
from warble_mlx.bench.report import Report
from warble_mlx.cli_base import table

FIGURES: dict[str, Callable[[Report], float]] = {
    "ms per step": lambda r: r.generation.ms_per_step,
    "step p50, ms": lambda r: r.generation.step_p50_ms,
    "step p95, ms": lambda r: r.generation.step_p95_ms,
    "frames/s": lambda r: r.generation.frames_per_s,
    "RTF, transformers": lambda r: r.generation.rtf,
    "RTF with codec": lambda r: r.speaking.rtf,
    "first audio, ms": lambda r: r.speaking.first_audio_ms,
    "peak memory, MB": lambda r: r.generation.peak_memory_bytes / 1e6,
    "primitives dispatched": lambda r: r.primitives.dispatched,
    "primitives before fusion": lambda r: r.unfused.dispatched,
    "MB read per step": lambda r: total_bytes(r.reads) / 1e6,
    "M multiply-adds per step": lambda r: sum(r.macs.values()) / 1e6,
    "launch, µs": lambda r: r.hardware.launch_us,
    "bandwidth, GB/s": lambda r: r.hardware.bandwidth_gbs,
    "G multiply-adds/s": lambda r: r.hardware.gmacs,
    "highest floor, ms": lambda r: r.floors.highest[1],
    "achieved share": lambda r: r.verdict.share,
}
CONDITIONS: dict[str, Callable[[Report], object]] = {
    "model": lambda r: f"{r.model.name} ({r.model.sha256[:12]})",
    "dtype": lambda r: r.model.dtype,
    "rows": lambda r: r.generation.rows,
    "frames": lambda r: r.generation.frames,
    "cache slots": lambda r: r.slots,
    "device": lambda r: r.machine.device,
    "cores": lambda r: r.machine.cores,
    "mlx": lambda r: r.machine.mlx,
    "warble-mlx": lambda r: r.machine.warble_mlx,
    "bound by": lambda r: r.verdict.bound,
}


def ratios(a: Report, b: Report) -> dict[str, float]:
    """B over A of every figure that is not zero in A."""
    return {name: of(b) / of(a) for name, of in FIGURES.items() if of(a)}


def compare(a: Report, b: Report) -> str:
    """What differs in the conditions, then every figure and B over A."""
    rows = [("", "A", "B", "B / A")]
    for name, condition in CONDITIONS.items():
        first, second = condition(a), condition(b)
        if first != second:
            rows.append((name, str(first), str(second), ""))
    over = ratios(a, b)
    for name, of in FIGURES.items():
        ratio = f"{over[name]:.3f}" if name in over else ""
        rows.append((name, _short(of(a)), _short(of(b)), ratio))
    return table(rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
