"""Pictures of a report and of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from warble_mlx.fidelity.compare import Fidelity
from warble_mlx.fidelity.sweep import Sweep
from warble_mlx.report_file import check_chart, save_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = {"both": "o", "slow": "^", "fast": "s"}
LEAST = 1e-6  # nats; below it the component was not packed, and a logarithmic axis has no place


def draw(document: Fidelity | Sweep, path: Path) -> None:
    """Draw a report (per codebook) or a sweep (quality over bytes per frame).

    The suffix of `path` gives the format (png, svg, pdf). Raises MissingExtraError without
    matplotlib, WarbleError when the file cannot be written or its format is unknown.
    """
    check_chart(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    if isinstance(document, Fidelity):
        _books(figure, document)
    else:
        _sweep(figure, document)
    save_chart(figure, path)


def _books(figure: Figure, f: Fidelity) -> None:
    left, right = figure.subplots(1, 2)
    places = range(len(f.divergence.books))
    left.bar(places, [book.kl for book in f.divergence.books])
    left.set_ylabel("KL divergence, nats")
    right.bar(places, [100 * book.agreement for book in f.divergence.books], color="C2")
    right.set_ylabel("same best token, %")
    right.set_ylim(0, 100)
    for axes in (left, right):
        axes.set_xticks(places)
        axes.set_xlabel("codebook (0: slow AR)")
    figure.suptitle(f"{f.bundle} against {f.reference}, {f.divergence.frames:,} frames")


def _sweep(figure: Figure, s: Sweep) -> None:
    panels: Any = figure.subplots(1, 2, sharex=True)
    kinds = list(dict.fromkeys((row.packing.mode, row.packing.bits, row.learned) for row in s.rows))
    for axes, title, of in (
        (panels[0], "slow AR", lambda d: d.semantic_kl),
        (panels[1], "fast AR", lambda d: d.fast_kl),
    ):
        for number, kind in enumerate(kinds):
            for component, marker in MARKERS.items():
                rows = [
                    row
                    for row in s.rows
                    if (row.packing.mode, row.packing.bits, row.learned) == kind
                    and row.component == component
                    and of(row.divergence) > LEAST
                ]
                axes.plot(
                    [row.bytes_per_frame / 1e6 for row in rows],
                    [of(row.divergence) for row in rows],
                    marker,
                    color=f"C{number % 10}",
                    fillstyle="none" if kind[2] else "full",
                )
        axes.set_yscale("log")
        axes.set_xlabel("MB read per frame")
        axes.set_ylabel("KL divergence, nats")
        axes.set_title(title)
    for number, (mode, bits, learned) in enumerate(kinds):
        name = f"{mode} {bits} bits" + (", learned" if learned else "")
        style = "none" if learned else "full"
        panels[1].plot([], [], "o", color=f"C{number % 10}", fillstyle=style, label=name)
    for component, marker in MARKERS.items():
        panels[1].plot([], [], marker, color="grey", label=f"packed: {component}")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.suptitle(f"{s.reference}, {s.texts} texts")
