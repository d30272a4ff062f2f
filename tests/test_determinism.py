"""One seed, one speech: alone, beside others, streamed or not; and short texts stay short."""

from __future__ import annotations

import numpy as np
import pytest

import warble_mlx
from warble_mlx import Warble
from warble_mlx.engine import Request
from warble_mlx.errors import WarbleError
from warble_mlx.text import speakable

SHORT = ["Hi", "Yes.", "Bye", "好"]
TEXTS = ["Hi", "Where did you go?", "A pot of hot soup stood beside the open window."]


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


def request(warble: Warble, text: str, seed: int, voice: str | None = None) -> Request:
    found = next(v for v in warble.voices if v.name == (voice or warble.default_voice.name))
    prompt = warble._prompts.build(speakable(text), speaker=found.token)
    return Request(prompt, 120, warble.defaults, seed)


def generated(warble: Warble, requests: list[Request], rows: int) -> list[np.ndarray]:
    """Codes [10, frames] of each, made `rows` at a time; all must end by themselves."""
    frames: list[list[np.ndarray]] = [[] for _ in requests]
    for emission in warble.engine.generate(requests, rows=rows):
        if emission.codes is not None:
            frames[emission.request].append(emission.codes)
        assert emission.finish_reason in (None, "stop")
    return [np.stack(own, axis=1) for own in frames]


def test_alone_and_beside_others(warble: Warble) -> None:
    requests = [request(warble, text, 40 + i) for i, text in enumerate(TEXTS)]
    # Another order, another number of rows, and a neighbour of another voice.
    alone = [generated(warble, [one], 1)[0] for one in requests]
    other = request(warble, "Good morning.", 9, "Finch")
    together = generated(warble, [other, *requests[::-1]], 3)[1:][::-1]
    for own, beside in zip(alone, together, strict=True):
        assert np.array_equal(own, beside)


def test_streamed_or_not(warble: Warble) -> None:
    text, seed = TEXTS[1], 41
    (wanted,) = generated(warble, [request(warble, text, seed)], 1)
    said = warble.say(text, seed=seed)
    stream = warble.stream(text, seed=seed, keep_samples=True)
    chunks = list(stream)
    assert np.array_equal(said.codes, wanted)
    assert np.array_equal(stream.speech.codes, wanted)
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), said.samples)
    assert said.seed == stream.speech.seed == seed


def test_nothing_is_left_of_the_speech_before(warble: Warble) -> None:
    fresh = warble.say("Bye", seed=5)
    warble.say(TEXTS[2], seed=6, voice="Finch")
    after = warble.say("Bye", seed=5)
    assert np.array_equal(fresh.codes, after.codes)
    assert np.array_equal(fresh.samples, after.samples)


def test_the_seed_is_always_told(warble: Warble) -> None:
    first, second = warble.say("Hi"), warble.say("Hi")
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**32
    assert np.array_equal(warble.say("Hi", seed=first.seed).codes, first.codes)
    for wrong in (-1, 2**32):
        with pytest.raises(WarbleError, match="seed must lie"):
            warble.say("Hi", seed=wrong)


def test_short_texts_stay_short(warble: Warble) -> None:
    """Twenty seeds each: 0.15 to 2.5 s, ended by the model itself; 4 s for the one in a script
    that it has not learned."""
    requests = [request(warble, text, seed) for text in SHORT for seed in range(100, 120)]
    lengths = [codes.shape[1] / 21.533 for codes in generated(warble, requests, 20)]
    assert len(lengths) == 80
    assert min(lengths) > 0.15
    unread = {i for i, one in enumerate(SHORT) if not one.isascii()}
    known = [length for i, length in enumerate(lengths) if i // 20 not in unread]
    assert max(known) < 2.5
    assert max(lengths) < 4
