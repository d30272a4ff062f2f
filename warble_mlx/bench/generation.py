"""Timed runs of the product's loop: frames alone, and frames with the codec behind them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.codec import CodecDecoder
from warble_mlx.engine import Engine, Request
from warble_mlx.errors import WarbleError

# Frames of the first and of later chunks, as `speech` streams them; not imported from there,
# because that needs the audio libraries, which a machine that only measures may lack.
FIRST_CHUNK = 4
NEXT_CHUNK = 16


class Run(msgspec.Struct, frozen=True):
    """One timed run, in seconds."""

    first_frame_s: float  # from the call to the first frame, prompt included
    total_s: float
    frames: int  # of all rows together
    steps_s: list[float]  # between the frames of the first request


class Generation(msgspec.Struct, frozen=True):
    """Several runs of the two transformers, summed up. Rows step together."""

    rows: int
    runs: int
    frames: int  # per run, of all rows together; the median run
    first_frame_ms: float  # median run
    ms_per_step: float  # mean step of the median run; one frame of every row
    step_p50_ms: float  # over all steps of all runs
    step_p95_ms: float
    frames_per_s: float  # of all rows together, between first and last frame
    rtf: float  # time over audio of all rows together, prompt included; the median run
    peak_memory_bytes: int


class SpeechTimes(msgspec.Struct, frozen=True):
    """One utterance with its codec, streamed, in seconds."""

    first_audio_s: float
    codec_s: float
    total_s: float
    audio_s: float

    @property
    def rtf(self) -> float:
        """Time over audio, everything included."""
        return self.total_s / self.audio_s


class Speaking(msgspec.Struct, frozen=True):
    """Several utterances, summed up: medians."""

    runs: int
    first_audio_ms: float
    rtf: float
    codec_ms_per_frame: float


def timed_run(engine: Engine, requests: Sequence[Request]) -> Run:
    """Generate all `requests` side by side."""
    stamps: list[float] = []
    frames = 0
    begin = time.perf_counter()
    for emission in engine.generate(requests, rows=len(requests)):
        if emission.codes is None:
            continue
        frames += 1
        if emission.request == 0:
            stamps.append(time.perf_counter())
    total = time.perf_counter() - begin
    if len(stamps) < 2:
        raise WarbleError(
            f"the model ended after {len(stamps)} frames, too few to time: give another model, or"
            " more --frames"
        )
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    return Run(stamps[0] - begin, total, frames, steps)


def time_generation(
    engine: Engine,
    request_for: Callable[[int], Request],
    *,
    frame_rate_hz: float,
    rows: int,
    runs: int,
    warmup: int,
) -> Generation:
    """Warm up, then time `runs` runs of `rows` requests; seeds are counted up."""
    for n in range(warmup):
        timed_run(engine, [request_for(n * rows + row) for row in range(rows)])
    mx.reset_peak_memory()
    timed = [
        timed_run(engine, [request_for((warmup + n) * rows + row) for row in range(rows)])
        for n in range(runs)
    ]
    return summed_up(timed, rows, frame_rate_hz, int(mx.get_peak_memory()))


def summed_up(
    runs: Sequence[Run], rows: int, frame_rate_hz: float, peak_memory_bytes: int
) -> Generation:
    """Medians over runs, percentiles over steps."""
    steps = np.array([step for run in runs for step in run.steps_s])
    step = statistics.median(statistics.fmean(run.steps_s) for run in runs)
    return Generation(
        rows=rows,
        runs=len(runs),
        frames=round(statistics.median(run.frames for run in runs)),
        first_frame_ms=1e3 * statistics.median(run.first_frame_s for run in runs),
        ms_per_step=1e3 * step,
        step_p50_ms=1e3 * float(np.percentile(steps, 50)),
        step_p95_ms=1e3 * float(np.percentile(steps, 95)),
        frames_per_s=rows / step,
        rtf=statistics.median(run.total_s / run.frames for run in runs) * frame_rate_hz,
        peak_memory_bytes=peak_memory_bytes,
    )


def stream(engine: Engine, decoder: CodecDecoder, request: Request) -> SpeechTimes:
    """One utterance, decoded chunk by chunk while it is generated."""
    begin = time.perf_counter()
    state = decoder.initial_state(1)
    waiting: list[np.ndarray] = []
    first_audio = codec = 0.0
    samples_made = 0
    for emission in engine.generate([request]):
        if emission.codes is not None:
            waiting.append(emission.codes)
        ended = emission.finish_reason is not None
        if not waiting or (
            not ended and len(waiting) < (NEXT_CHUNK if samples_made else FIRST_CHUNK)
        ):
            continue
        decoding = time.perf_counter()
        samples, state = decoder.step(mx.array(np.stack(waiting, axis=1))[None], state)
        samples_made += np.array(samples[0]).size
        now = time.perf_counter()
        codec += now - decoding
        first_audio = first_audio or now - begin
        waiting.clear()
    rate = engine.model.config.codec_sample_rate
    return SpeechTimes(first_audio, codec, time.perf_counter() - begin, samples_made / rate)


def time_speaking(
    speak: Callable[[int], SpeechTimes], frame_rate_hz: float, *, runs: int, warmup: int
) -> Speaking:
    """Warm up, then time `runs` utterances; seeds are counted up."""
    for n in range(warmup):
        speak(n)
    timed = [speak(warmup + n) for n in range(runs)]
    return Speaking(
        runs=runs,
        first_audio_ms=1e3 * statistics.median(t.first_audio_s for t in timed),
        rtf=statistics.median(t.rtf for t in timed),
        codec_ms_per_frame=1e3
        * statistics.median(t.codec_s / (t.audio_s * frame_rate_hz) for t in timed),
    )
