"""One measurement from end to end."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable

import mlx.core as mx

from warble_mlx.backend import on_gpu
from warble_mlx.bench.cost import frame_macs, frame_reads, total_bytes
from warble_mlx.bench.generation import time_generation, time_speaking
from warble_mlx.bench.graph import cache_slots, step_primitives, unfused_primitives
from warble_mlx.bench.hardware import measure_hardware
from warble_mlx.bench.machine import this_command, this_machine
from warble_mlx.bench.parts import host_ms, part_times
from warble_mlx.bench.report import SCHEMA, Model, Report, project
from warble_mlx.bench.subject import Subject, dtype_named
from warble_mlx.bench.synthetic import layout
from warble_mlx.bench.verdict import Counts, floors, judge
from warble_mlx.config import TransformerConfig
from warble_mlx.errors import WarbleError


def measure(
    subject: Subject,
    *,
    frames: int = 150,
    runs: int = 3,
    warmup: int = 1,
    rows: int = 1,
    bandwidths: Iterable[float] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time and count everything about `subject`.

    frames: allowed per row and run, at least 2; rows: streams stepped together; bandwidths:
    GB/s of other devices to project to; progress: told what is being done.
    """
    if frames < 2 or runs < 1 or rows < 1 or warmup < 0:
        raise WarbleError("a measurement needs two frames, one run and one row at least")
    config, engine = subject.config, subject.engine
    _, dtype = dtype_named(subject.dtype)
    longest = subject.request(0, frames)
    engine.check_budget(longest)
    progress("timing frames")
    generation = time_generation(
        engine,
        lambda seed: subject.request(seed, frames),
        frame_rate_hz=config.frame_rate_hz,
        rows=rows,
        runs=runs,
        warmup=warmup,
    )
    progress("timing speech with the codec")
    speaking = time_speaking(
        lambda seed: subject.speak(seed, frames), config.frame_rate_hz, runs=runs, warmup=warmup
    )
    progress("timing parts and counting primitives")
    parts = part_times(engine, longest, compiled=subject.compiled)
    host = host_ms(engine, longest)
    primitives = step_primitives(engine, longest)
    unfused = unfused_primitives(engine, longest)
    slots = cache_slots(engine, longest)
    reads = frame_reads(engine.model, slots, dtype, rows)
    macs = frame_macs(config, slots, rows)
    mx.clear_cache()
    progress("measuring the device")
    hardware = measure_hardware(dtype, compiled=subject.compiled)
    counts = Counts(primitives.dispatched, host, total_bytes(reads), sum(macs.values()))
    stored = total_bytes(frame_reads(layout(config, subject.stored), slots, mx.bfloat16))
    return Report(
        schema=SCHEMA,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=this_command(),
        machine=this_machine(),
        model=Model(
            name=subject.name,
            sha256=subject.fingerprint,
            dtype=subject.dtype,
            stored_bits=subject.stored.bits if subject.stored else 16,
            packed=subject.packed,
            compiled=subject.compiled,
            slow=_described(config.slow),
            fast=_described(config.fast),
        ),
        slots=slots,
        generation=generation,
        speaking=speaking,
        parts_ms=parts,
        host_ms=host,
        primitives=primitives,
        unfused=unfused,
        reads=reads,
        macs=macs,
        stored_bytes=stored,
        hardware=hardware,
        floors=floors(counts, hardware),
        verdict=judge(
            generation.ms_per_step,
            counts,
            hardware,
            rows=rows,
            compiled=subject.compiled,
            packed=subject.packed,
            gpu=on_gpu(),
        ),
        projections=project(stored, config.frame_rate_hz, bandwidths),
    )


def _described(t: TransformerConfig) -> str:
    return f"{t.n_layer} layers, width {t.dim}, {t.n_head}/{t.n_kv_head} heads, SwiGLU {t.ffn}"
