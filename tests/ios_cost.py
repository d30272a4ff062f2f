"""Exports that are measured, to be run in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ios_data

from warble_mlx.ios_export.drive import open_function
from warble_mlx.ios_export.exporter import export
from warble_mlx.ios_export.job import peak_rss_bytes
from warble_mlx.ios_export.manifest import Check, Function, Manifest
from warble_mlx.ios_export.mlx_functions import LM_FILE, write_codec, write_language_model
from warble_mlx.ios_export.mlx_part import weight_checks


class Cost(NamedTuple):
    """What something took in a process, and the most memory that the process has held so far."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s, {self.cpu_seconds:.1f} s of CPU,"
            f" {self.peak_bytes / 1e6:.0f} MB at most"
        )


def costing(work: Callable[[], object]) -> Cost:
    """Do it and measure."""
    started, cpu = time.monotonic(), time.process_time()
    work()
    return Cost(time.monotonic() - started, time.process_time() - cpu, peak_rss_bytes())


def swift_folder(bundle: Path, out: Path) -> tuple[Manifest, Cost]:
    """The part `mlx-swift` exported to `out`, and what that cost."""
    made: list[Manifest] = []
    cost = costing(lambda: made.append(export(bundle, out, only=["mlx-swift"])))
    return made[0], cost


def transformers(bundle: Path, out: Path) -> tuple[Cost, Cost, list[Check]]:
    """The Core ML packages of both transformers in `out`: what writing them cost, then what holding
    a few frames against the runtime cost, and those checks."""
    from warble_mlx.ios_export.coreml_transformers import transformer_checks, write_transformers
    from warble_mlx.ios_export.taught import teach, teacher

    job = ios_data.job_on(bundle)
    written = costing(lambda: write_transformers(job, out))
    checks: list[Check] = []

    def compare() -> None:
        taught = teach(teacher(job), job.prompt("Hello there."), 4, 7)
        checks.extend(transformer_checks(job, out, taught))

    return written, costing(compare), checks


def functions(bundle: Path, out: Path) -> tuple[list[Function], Cost, list[Check]]:
    """The functions in `out`, what loading and writing cost, and the check of their weights."""
    job = ios_data.job_on(bundle)
    made: list[Function] = []

    def write() -> None:
        made.extend(write_language_model(job.loaded, out))
        made.extend(write_codec(job.loaded, out, for_gpu=True))

    cost = costing(write)
    return made, cost, weight_checks(job, open_function(out / LM_FILE))
