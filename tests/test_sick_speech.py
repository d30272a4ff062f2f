"""A sick stream is stopped, told and, on request, tried once more; never written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import warble_mlx
from warble_mlx import Warble
from warble_mlx.cli import main
from warble_mlx.engine import Emission, Engine, Request
from warble_mlx.errors import SickError, WarbleError
from warble_mlx.reading import next_seed

TEXT = "Where did you go?"

Generate = Callable[..., Iterator[Emission]]


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine gives one frame for ever, unless the seed is above 100: then it speaks.

    Holds the seeds that were asked for.
    """
    asked: list[int] = []
    healthy = Engine.generate

    def generate(self: Engine, requests: Iterable[Request], rows: int = 1) -> Iterator[Emission]:
        (request,) = requests
        asked.append(request.seed)
        if request.seed > 100:
            yield from healthy(self, [request], rows)
            return
        for _ in range(request.max_frames):
            yield Emission(0, np.arange(10, dtype=np.int32), None)
        yield Emission(0, None, "length")

    monkeypatch.setattr(Engine, "generate", generate)
    return asked


def test_sick_speech_raises(warble: Warble, seeds: list[int]) -> None:
    with pytest.raises(SickError, match="one frame was repeated") as raised:
        warble.say(TEXT, seed=7)
    assert raised.value.reason == "codes-repeat"
    assert raised.value.exit_status == 4
    assert seeds == [7]


def test_a_stream_stops_in_the_middle(warble: Warble, seeds: list[int]) -> None:
    stream = warble.stream(TEXT, seed=7)
    first = next(stream)
    assert (first.begin, first.end) == (0, 4)
    with pytest.raises(SickError):
        list(stream)
    assert list(stream) == []
    with pytest.raises(WarbleError, match="not ended"):
        assert stream.speech


def test_another_seed_on_request(warble: Warble, seeds: list[int]) -> None:
    speech = warble.say(TEXT, seed=7, retry=1)
    assert seeds == [7, next_seed(7)]
    assert speech.retries == 1
    assert speech.finish_reason == "stop"
    assert speech.timings.total_s >= speech.timings.first_audio_s > 0
    again = warble.say(TEXT, seed=speech.pieces[0].seed)
    assert again.retries == 0
    assert np.array_equal(again.codes, speech.codes)


def test_retries_are_bounded(warble: Warble, seeds: list[int]) -> None:
    with pytest.raises(SickError):
        warble.say(TEXT, seed=7, retry=1, greedy=True)
    assert seeds == [7], "greedy speech is always the same"
    with pytest.raises(WarbleError, match="retry must lie"):
        warble.say(TEXT, seed=7, retry=9)
    with pytest.raises(WarbleError, match="retry must lie"):
        warble.say(TEXT, seed=7, retry=-1)


def test_healthy_speech_is_not_retried(warble: Warble, seeds: list[int]) -> None:
    speech = warble.say(TEXT, seed=101, retry=1)
    assert seeds == [101]
    assert speech.retries == 0
    assert speech.warnings == ()


def test_sick_samples_raise(warble: Warble, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = type(warble._decoder).step
    monkeypatch.setattr(
        type(warble._decoder),
        "step",
        lambda self, *a: (decode(self, *a)[0] * 0, decode(self, *a)[1]),
    )
    with pytest.raises(SickError, match="silence") as raised:
        warble.say(TEXT, seed=3)
    assert raised.value.reason == "audio-silent"


def test_an_early_end_raises(warble: Warble, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: Engine, requests: Iterable[Request], rows: int = 1) -> Iterator[Emission]:
        for i in range(2):
            yield Emission(0, np.arange(i, 10 + i, dtype=np.int32), None)
        yield Emission(0, None, "stop")

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(SickError) as raised:
        warble.say("Bring the heavy box to the second floor.", seed=3)
    assert raised.value.reason == "too-short"


def test_warnings_come_along(warble: Warble) -> None:
    speech = warble.say("Hello, мир, my friend.", seed=1)
    assert [w.rpartition(" ")[2] for w in speech.warnings] == ["(language-unsupported)"]


def test_the_command_line_writes_nothing_and_says_why(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.wav"
    assert status_of(["say", TEXT, "--seed", "7", "-o", str(out)]) == 4
    assert not list(tmp_path.iterdir())
    told = capsys.readouterr().err
    assert "no speech" in told
    assert "codes-repeat" in told
    assert len(told.strip().splitlines()) == 1


def test_the_command_line_tells_what_was_doubtful(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["say", "यह वाक्य हिंदी में है।", "--seed", "7", "-o", str(tmp_path / "x.wav")]
    assert status_of(line) == 4
    doubt, told = capsys.readouterr().err.strip().splitlines()
    assert doubt.endswith("(language-unsupported)")
    assert told.endswith("(codes-repeat)")


def test_the_command_line_tells_of_a_retry(
    seeds: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.wav"
    line = ["say", TEXT, "--seed", "7", "--retry", "1", "-o", str(out), "--json"]
    assert status_of(line) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["retries"] == 1
    assert "attempt 2" in told.err
    assert out.is_file()


def test_the_command_line_tells_of_a_foreign_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["say", "Hello, мир, my friend.", "--seed", "1", "-o", str(tmp_path / "x.wav"), "--json"]
    assert status_of(line) == 0
    told = capsys.readouterr()
    assert "language-unsupported" in told.err
    assert "language-unsupported" in json.loads(told.out)["warnings"][0]


def status_of(line: list[str]) -> int:
    try:
        return main(line) or 0
    except SystemExit as ended:
        return int(ended.code or 0)
