"""How fast a model speaks here, what bounds it, and what would help.

    from warble_mlx.bench import bundle_subject, measure
    report = measure(bundle_subject(None), frames=150)
    print(report.verdict.sentence)

A frame is timed in the product's own loop (`Engine.generate`). Beside it stand three floors, each
a quantity counted from the model over a rate measured on this device: bytes over bandwidth,
multiply-adds over matrix throughput, dispatches over launch rate. The highest floor names the
bottleneck.
"""

from __future__ import annotations

from warble_mlx.bench.compare import compare
from warble_mlx.bench.measure import measure
from warble_mlx.bench.report import Report, format_report, read_report, write_report
from warble_mlx.bench.subject import Subject, bundle_subject, synthetic_subject

__all__ = [
    "Report",
    "Subject",
    "bundle_subject",
    "compare",
    "format_report",
    "measure",
    "read_report",
    "synthetic_subject",
    "write_report",
]
