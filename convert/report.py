"""What a conversion did: sizes per component, what was dropped, where it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warble_mlx.convert.names import COMPONENTS, DECODER, FILES, MODEL, component_of
from warble_mlx.convert.plan import Plan
from warble_mlx.convert.source import Dropped


@dataclass(frozen=True)
class Component:
    """Tensors, parameters and bytes of one part of the model, and the file that holds it."""

    name: str
    file: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """Result of a conversion. `notes` are sentences for the user."""

    out: Path
    components: tuple[Component, ...]
    dropped: tuple[Dropped, ...]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all files."""
        return sum(c.parameters for c in self.components)

    @property
    def speaking_bytes(self) -> int:
        """Bytes of weights that are needed to speak (all but the codec's encoder)."""
        return sum(c.nbytes for c in self.components if c.file in (MODEL, DECODER))


def components_of(plan: Plan) -> tuple[Component, ...]:
    """The size table's lines, in the order of the files and of `names.COMPONENTS`."""
    order = [label for _, label in COMPONENTS]
    lines: dict[tuple[int, int, str], list[int]] = {}
    for name, planned in plan.tensors.items():
        label = component_of(name)
        key = (FILES.index(planned.spec.file), order.index(label), label)
        line = lines.setdefault(key, [0, 0, 0])
        line[0] += 1
        line[1] += math.prod(planned.spec.shape)
        line[2] += planned.nbytes
    return tuple(Component(label, FILES[f], *lines[f, o, label]) for f, o, label in sorted(lines))


def format_report(report: Report) -> str:
    """The report as aligned text: components with sums per file, dropped tensors, notes."""
    rows: list[Sequence[str]] = [("component", "tensors", "parameters", "MB")]
    for file in FILES:
        parts = [c for c in report.components if c.file == file]
        if parts:
            rows += [_row(f"  {c.name}", [c]) for c in parts]
            rows.append(_row(file, parts))
    speaking = [c for c in report.components if c.file in (MODEL, DECODER)]
    rows.append(_row("needed to speak", speaking))
    if len(speaking) < len(report.components):
        rows.append(_row("with voice registration", report.components))
    lines = table(rows)
    reasons: dict[str, list[str]] = {}
    for drop in report.dropped:
        reasons.setdefault(drop.reason, []).append(drop.name)
    lines += [
        f"dropped {len(names)} ({reason}): {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for reason, names in reasons.items()
    ]
    return "\n".join([*lines, *report.notes])


def _row(label: str, parts: Sequence[Component]) -> tuple[str, str, str, str]:
    return (
        label,
        str(sum(c.tensors for c in parts)),
        f"{sum(c.parameters for c in parts):,}",
        f"{sum(c.nbytes for c in parts) / 1e6:,.1f}",
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: first column left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
