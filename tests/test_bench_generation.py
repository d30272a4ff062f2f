"""Timed runs: what is summed up, and that the loop measured is the product's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from warble_mlx import reading
from warble_mlx.bench import generation
from warble_mlx.bench.generation import Run, SpeechTimes, stream, summed_up, timed_run
from warble_mlx.bench.subject import Subject, synthetic_subject
from warble_mlx.bench.synthetic import TINY, random_codec
from warble_mlx.errors import WarbleError

FRAME_RATE = TINY.frame_rate_hz


@pytest.fixture(scope="module")
def subject() -> Subject:
    return synthetic_subject("tiny")


def test_summary_of_made_up_runs() -> None:
    runs = [
        Run(first_frame_s=0.1, total_s=1.0, frames=20, steps_s=[0.01] * 9),
        Run(first_frame_s=0.3, total_s=3.0, frames=20, steps_s=[0.02] * 7 + [0.06, 0.08]),
        Run(first_frame_s=0.2, total_s=2.0, frames=20, steps_s=[0.02] * 9),
    ]
    found = summed_up(runs, 2, 20.0, 7)
    assert found.first_frame_ms == pytest.approx(200)
    assert found.ms_per_step == pytest.approx(20)  # means 10, 31, 20: the middle one
    assert found.step_p50_ms == pytest.approx(20)
    assert 20 < found.step_p95_ms < 80
    assert found.frames_per_s == pytest.approx(2 / 0.02)
    assert found.rtf == pytest.approx(2.0 / 20 * 20)  # 20 frames at 20 per second are 1 s
    assert (found.rows, found.runs, found.frames, found.peak_memory_bytes) == (2, 3, 20, 7)


def test_a_run_takes_every_frame_of_every_row(subject: Subject) -> None:
    run = timed_run(subject.engine, [subject.request(seed, 5) for seed in range(3)])
    assert run.frames == 15
    assert len(run.steps_s) == 4
    assert 0 < run.first_frame_s < run.total_s


def test_a_run_of_one_frame_cannot_be_timed(subject: Subject) -> None:
    with pytest.raises(WarbleError, match="too few"):
        timed_run(subject.engine, [subject.request(0, 1)])


def test_chunks_are_those_of_the_product() -> None:
    assert generation.FIRST_CHUNK == reading.FIRST_CHUNK
    assert generation.NEXT_CHUNK == reading.NEXT_CHUNK


@pytest.mark.parametrize("frames", [3, 4, 23])
def test_streaming_decodes_every_frame_once(subject: Subject, frames: int) -> None:
    decoder = random_codec(TINY)
    chunks: list[int] = []

    class Watched:
        def initial_state(self, batch: int) -> object:
            return decoder.initial_state(batch)

        def step(self, codes: mx.array, state: object) -> object:
            chunks.append(codes.shape[2])
            return decoder.step(codes, state)  # type: ignore[arg-type]

    times = stream(subject.engine, Watched(), subject.request(0, frames))  # type: ignore[arg-type]
    assert sum(chunks) == frames
    assert chunks == {3: [3], 4: [4], 23: [4, 16, 3]}[frames]
    assert times.audio_s == pytest.approx(frames / FRAME_RATE)
    assert 0 < times.first_audio_s <= times.total_s
    assert 0 < times.codec_s < times.total_s
    assert times.rtf == pytest.approx(times.total_s / times.audio_s)


def test_speaking_takes_medians_of_the_warm_runs() -> None:
    seen: list[int] = []

    def speak(seed: int) -> SpeechTimes:
        seen.append(seed)
        slow = 100.0 if seed == 0 else float(seed)
        return SpeechTimes(first_audio_s=slow, codec_s=1.0, total_s=2 * slow, audio_s=2.0)

    found = generation.time_speaking(speak, 10.0, runs=3, warmup=1)
    assert seen == [0, 1, 2, 3]
    assert found.first_audio_ms == 2000
    assert found.rtf == 2.0
    assert found.codec_ms_per_frame == pytest.approx(1e3 / 20)
    assert np.isfinite(found.codec_ms_per_frame)
