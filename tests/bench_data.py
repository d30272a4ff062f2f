"""A report with made-up figures, to test what is done with reports."""

from __future__ import annotations

from typing import Any

import msgspec

from warble_mlx.bench.cost import Read
from warble_mlx.bench.generation import Generation, Speaking
from warble_mlx.bench.graph import Primitives
from warble_mlx.bench.hardware import Hardware
from warble_mlx.bench.machine import Machine
from warble_mlx.bench.report import SCHEMA, Model, Report, project
from warble_mlx.bench.verdict import Counts, floors, judge


def made_up_report(**changes: Any) -> Report:
    """Launch-bound: 800 dispatches at 4 µs are 3.2 of 4 ms; `changes` replace fields."""
    hardware = Hardware(copy_gbs=4000.0, read_gbs=3000.0, gmacs=300_000.0, launch_us=4.0)
    counts = Counts(dispatches=800, host_ms=0.5, nbytes=583_000_000, macs=1_000_000_000)
    report = Report(
        schema=SCHEMA,
        date="2026-11-30T12:00:00+00:00",
        command="warble bench --synthetic full",
        machine=Machine(
            device="GPU, made up",
            processor="made up",
            cores=16,
            system="Linux 6 on x86_64",
            python="3.12.3",
            mlx="0.32.4",
            mlx_wheels={"mlx-cuda-13": "0.32.4"},
            warble_mlx="0.1.0",
            blas="not needed",
        ),
        model=Model(
            name="synthetic full, 4-bit",
            sha256="ab" * 32,
            dtype="bfloat16",
            stored_bits=4,
            packed=True,
            compiled=True,
            slow="24 layers",
            fast="4 layers",
        ),
        slots=512,
        generation=Generation(
            rows=1,
            runs=3,
            frames=150,
            first_frame_ms=20.0,
            ms_per_step=4.0,
            step_p50_ms=3.9,
            step_p95_ms=4.4,
            frames_per_s=250.0,
            rtf=0.09,
            peak_memory_bytes=1_500_000_000,
        ),
        speaking=Speaking(runs=3, first_audio_ms=60.0, rtf=0.12, codec_ms_per_frame=0.9),
        parts_ms={"slow AR": 1.5, "fast AR, 9 passes": 2.0},
        host_ms=0.5,
        primitives=Primitives({"Broadcast": 300, "Compiled": 500, "QuantizedMatmul": 300}),
        unfused=Primitives({"Broadcast": 900, "Multiply": 2400, "QuantizedMatmul": 300}),
        reads={"slow AR Linears": Read(201_000_000), "fast AR Linears": Read(33_500_000, 9)},
        macs={"slow AR Linears": 358_000_000, "slow AR attention": 20_000_000},
        stored_bytes=583_000_000,
        hardware=hardware,
        floors=floors(counts, hardware),
        verdict=judge(4.0, counts, hardware, rows=1, compiled=True, packed=True, gpu=True),
        projections=project(583_000_000, 21.533, [60]),
    )
    return msgspec.structs.replace(report, **changes)
