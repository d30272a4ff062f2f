"""Pieces, joints, seeds and limits of a long text, on a generator that costs nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from speaking import quick_warble

from warble_mlx import Warble
from warble_mlx.config import ModelConfig
from warble_mlx.engine import Request
from warble_mlx.errors import BudgetError, SickError, WarbleError
from warble_mlx.reading import (
    FIRST_CHUNK,
    NEXT_CHUNK,
    Progress,
    fade_in,
    fade_out,
    next_seed,
    part_limit,
    piece_seed,
    utterance_frames,
)

TEXT = "Alpha one.\n\nBravo two.\n\nCedar three."
RATE, FRAME = 44_100, 2048

Quick = tuple[Warble, list[Request]]


@pytest.fixture(scope="module")
def loaded() -> Quick:
    return quick_warble()


@pytest.fixture
def quick(loaded: Quick) -> Quick:
    loaded[1].clear()
    return loaded


def test_one_part_passes_through_untouched(quick: Quick) -> None:
    warble, asked = quick
    speech = warble.say("Alpha one.", seed=5)
    assert [request.seed for request in asked] == [5]
    state, at, expected = warble._decoder.initial_state(1), 0, []
    while at < speech.codes.shape[1]:
        length = NEXT_CHUNK if at else FIRST_CHUNK
        samples, state = warble._decoder.step(
            mx.array(speech.codes[None, :, at : at + length]), state
        )
        expected.append(np.array(samples[0]))
        at += length
    assert np.array_equal(speech.samples, np.concatenate(expected))
    assert [(p.text, p.samples, p.frames) for p in speech.pieces] == [
        ("Alpha one.", (0, len(speech.samples)), (0, speech.codes.shape[1]))
    ]


@pytest.mark.parametrize("pause_s", [0, 0.1234])
def test_silence_between_pieces_is_exact_and_edges_are_faded(quick: Quick, pause_s: float) -> None:
    speech = quick[0].say(
        f'{TEXT} <break time="0.8s"/>Done.<break time="0.1s"/>', seed=1, pause_s=pause_s
    )
    pieces, samples = speech.pieces, speech.samples
    gaps = [b.samples[0] - a.samples[1] for a, b in pairwise(pieces)]
    assert gaps == [round(2 * pause_s * RATE)] * 2 + [35_280]
    assert len(samples) - pieces[-1].samples[1] == 4410
    for (a, b), gap in zip(pairwise(pieces), gaps, strict=True):
        assert not samples[a.samples[1] : b.samples[0]].any()
        assert np.abs(samples[a.samples[1] - 1 : a.samples[1] + gap + 1]).max() < 1e-3
    assert not samples[pieces[-1].samples[1] :].any()
    frames = [end - begin for begin, end in (p.frames for p in pieces)]
    assert [(p.samples[1] - p.samples[0]) // FRAME for p in pieces] == frames
    assert sum(frames) == speech.codes.shape[1]


def test_a_fade_touches_only_a_loud_edge() -> None:
    loud = np.full(1000, 0.5, np.float32)
    faded = fade_in(loud, RATE)
    assert faded[0] == 0
    assert np.all(np.diff(faded[:221]) > 0)
    assert np.abs(np.diff(faded)).max() < 0.5 * np.pi / 2 / 220 * 1.01  # no step, so no click
    assert np.array_equal(faded[220:], loud[220:])
    assert np.array_equal(fade_out(loud, RATE), faded[::-1])
    quiet = np.concatenate([np.full(10, 3e-4, np.float32), loud])
    assert fade_in(quiet, RATE) is quiet
    assert fade_in(np.zeros(0, np.float32), RATE).size == 0
    assert fade_in(loud[:100], RATE)[0] == 0
    assert np.all(loud == 0.5)


def test_seeds_of_pieces_follow_from_one(quick: Quick) -> None:
    warble, asked = quick
    first, again = warble.say(TEXT, seed=9), warble.say(TEXT, seed=9)
    seeds = [request.seed for request in asked[:3]]
    assert seeds == [9, piece_seed(9, 1), piece_seed(9, 2)] == [p.seed for p in first.pieces]
    assert len(set(seeds)) == 3
    assert first.seed == 9
    assert np.array_equal(first.samples, again.samples)
    assert len({piece_seed(seed, i) for seed in range(100) for i in range(100)}) > 9990


def test_every_piece_has_the_same_voice(quick: Quick) -> None:
    warble, asked = quick
    warble.say(TEXT, voice=1)
    assert len({request.prompt.prefix.tobytes() for request in asked}) == 1
    token = asked[0].prompt.target[0, 0]
    assert all(request.prompt.target[0, 0] == token for request in asked)


def test_without_a_voice_the_first_piece_is_the_reference_of_the_others(quick: Quick) -> None:
    warble, asked = quick
    plan = replace(warble.plan(TEXT, seed=2), speaker="")
    stream = warble.perform(plan)
    list(stream)
    first = stream.speech.codes[:, slice(*stream.pieces[0].frames)]
    prefixes = [request.prompt.prefix for request in asked]
    assert prefixes[0].shape[1] < prefixes[1].shape[1]
    assert np.array_equal(prefixes[1], prefixes[2])
    assert first.tobytes() in {
        np.ascontiguousarray(prefixes[1][1:, i : i + first.shape[1]]).tobytes()
        for i in range(prefixes[1].shape[1])
    }
    asked.clear()
    progress = stream.progress
    half = Progress(progress.pieces[:2], progress.codes[:2])
    list(warble.perform(plan, half))
    assert np.array_equal(asked[0].prompt.prefix, prefixes[2])


def test_a_reading_goes_on_from_any_piece(quick: Quick) -> None:
    warble, _ = quick
    plan = warble.plan(f"{TEXT}\n\n***\n\nDone.", seed=4)
    stream = warble.perform(plan, keep_samples=True)
    list(stream)
    whole, progress = stream.speech, stream.progress
    assert whole.samples.size
    for done in range(len(whole.pieces) + 1):
        rest = warble.perform(plan, Progress(progress.pieces[:done], progress.codes[:done], 7.0))
        samples = [chunk.samples for chunk in rest]
        begin = whole.pieces[done - 1].samples[1] if done else 0
        heard = np.concatenate([np.zeros(0, np.float32), *samples])
        assert np.array_equal(heard, whole.samples[begin:])
        assert rest.speech.pieces == whole.pieces
        assert np.array_equal(rest.speech.codes, whole.codes)
        assert rest.speech.seconds == whole.seconds
        assert rest.speech.timings.total_s >= 7


@pytest.mark.parametrize("frames", [1, 10, 20, 30, 60])
def test_max_seconds_limits_the_whole(quick: Quick, frames: int) -> None:
    seconds = frames * FRAME / RATE
    whole = quick[0].say(TEXT, seed=3)
    cut = quick[0].say(TEXT, seed=3, max_seconds=seconds)
    assert cut.finish_reason == "length"
    assert len(cut.samples) <= frames * FRAME
    assert len(cut.samples) > frames * FRAME - FRAME - 22050
    assert np.array_equal(cut.codes, whole.codes[:, : cut.codes.shape[1]])
    assert quick[0].say(TEXT, seed=3, max_seconds=1000).finish_reason == "stop"


def test_silence_alone_may_use_up_the_limit(quick: Quick) -> None:
    speech = quick[0].say('<break time="2s"/>Yes.', seed=3, max_seconds=1)
    assert speech.finish_reason == "length"
    assert speech.codes.shape == (10, 0)
    assert speech.pieces == ()
    assert speech.seed == 3


def test_a_piece_cut_by_its_budget_is_told(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    warble, _ = quick
    short = warble._prompts.build("Yes.", speaker=warble.default_voice.token).target.shape[1]
    monkeypatch.setattr(warble, "default_max_frames", short)
    speech = warble.say("Yes.\n\nAlpha bravo one.\n\nYes.", seed=0)
    assert [piece.finish_reason for piece in speech.pieces] == ["stop", "length", "stop"]
    assert speech.finish_reason == "length"


def test_only_the_sick_piece_is_tried_again() -> None:
    sick = {piece_seed(1, 1), next_seed(piece_seed(1, 1))}

    def fall_ill(_number: int, frame: int, request: Request) -> None:
        if request.seed in sick and frame == 8:
            raise SickError("codes-repeat", "one frame", "luck", "another seed")

    warble, asked = quick_warble(fall_ill)
    with pytest.raises(SickError):
        warble.say(TEXT, seed=1, retry=1)
    asked.clear()
    speech = warble.say(TEXT, seed=1, retry=2)
    assert speech.retries == 2
    assert speech.seed == 1
    wanted = [1, next_seed(next_seed(piece_seed(1, 1))), piece_seed(1, 2)]
    assert [piece.seed for piece in speech.pieces] == wanted
    assert len(asked) == 5
    for a, b in pairwise(speech.pieces):
        assert b.samples[0] - a.samples[1] == RATE // 2
        assert b.frames[0] == a.frames[1]
    assert len(speech.samples) == speech.pieces[-1].samples[1]


def test_a_stream_forgets_its_samples_unless_asked(quick: Quick) -> None:
    stream = quick[0].stream(TEXT, seed=1)
    samples = np.concatenate([chunk.samples for chunk in stream])
    assert stream.speech.samples.size == 0
    assert stream.speech.seconds == len(samples) / RATE
    with pytest.raises(WarbleError, match="keep_samples"):
        stream.speech.save("never.wav")
    kept = quick[0].stream(TEXT, seed=1, keep_samples=True)
    list(kept)
    assert np.array_equal(kept.speech.samples, samples)


def test_a_piece_is_known_before_the_silence_after_it(quick: Quick) -> None:
    stream = quick[0].stream(TEXT, seed=1)
    at = 0
    for chunk in stream:
        if chunk.begin == chunk.end and not at:
            assert [piece.text for piece in stream.pieces] == ["Alpha one."]
            at = stream.pieces[0].samples[1]
    assert at
    assert len(stream.pieces) == 3


def test_closing_stops_between_pieces_too(quick: Quick) -> None:
    warble, asked = quick
    stream = warble.stream(TEXT, seed=1)
    while not stream.pieces:
        next(stream)
    stream.close()
    assert list(stream) == []
    assert len(asked) == 1
    with pytest.raises(WarbleError, match="not ended"):
        _ = stream.speech


@pytest.mark.parametrize("pause_s", [-0.1, 61, float("nan")])
def test_a_pause_out_of_range(quick: Quick, pause_s: float) -> None:
    with pytest.raises(WarbleError, match="pause_s"):
        quick[0].say(TEXT, pause_s=pause_s)


def test_the_limit_of_a_part_fits_the_context(quick: Quick) -> None:
    config: ModelConfig = quick[0].config
    frames_per_character = config.frame_rate_hz / 8
    for overhead in (20, 300, 700):
        for own_voice in (False, True):
            limit = part_limit(config, overhead, 10_000, None, own_voice)
            times = 2 if own_voice else 1
            used = overhead + times * limit * (1 + frames_per_character) + 64
            assert used <= config.max_seq_len
            assert used > config.max_seq_len - 2 * times * (1 + frames_per_character)
    assert part_limit(config, 20, 215, None, False) == int(215 / frames_per_character)
    assert part_limit(config, 20, 300, 170, False) == 170
    assert part_limit(config, 700, 300, 170, False) < 80
    with pytest.raises(BudgetError, match="shorter reference"):
        part_limit(config, 950, 300, 170, False)
    with pytest.raises(BudgetError, match="needs at least"):
        utterance_frames(config, 300, 1000, "x" * 100)
