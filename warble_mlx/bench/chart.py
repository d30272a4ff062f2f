"""A bar chart of one report."""

from __future__ import annotations

from pathlib import Path

from warble_mlx.bench.report import Report
from warble_mlx.report_file import check_chart, save_chart


def draw(report: Report, path: Path) -> None:
    """Two panels: the step beside its floors, and the bytes it reads by component.

    The suffix of `path` gives the format (png, svg, pdf). Raises MissingExtraError without
    matplotlib, WarbleError when the file cannot be written or its format is unknown.
    """
    check_chart(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    floors = report.floors
    bars = {
        "measured": report.generation.ms_per_step,
        "launch floor": floors.launch_ms,
        "bandwidth floor": floors.bandwidth_ms,
        "compute floor": floors.compute_ms,
    }
    left.barh(list(bars), list(bars.values()), color=["C0", "C1", "C1", "C1"])
    left.invert_yaxis()
    left.set_xlabel("ms per step")
    left.set_title(f"{report.verdict.bound}-bound, {report.verdict.share:.0%} of it")
    reads = {name: read.total / 1e6 for name, read in report.reads.items()}
    right.barh(list(reads), list(reads.values()), color="C2")
    right.invert_yaxis()
    right.set_xlabel("MB read per step")
    figure.suptitle(f"{report.model.name}, {report.model.dtype}, {report.machine.device}")
    save_chart(figure, path)
