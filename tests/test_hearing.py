"""samples/hearing.py, without a recogniser: utterances side by side, and runs that go on."""

from __future__ import annotations

import json
import multiprocessing
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import warble_mlx.reading
from warble_mlx import Warble, WarbleError, load
from warble_mlx.errors import SickError

sys.path.append(str(Path(__file__).parents[1] / "samples"))

from hearing import Journal, Utterance, in_processes, read, speak, untaken

UTTERANCES = [
    Utterance(1, 1, "Good morning."),
    Utterance(2, 2, "The birch canoe slid on the planks."),
    Utterance(1, 3, "No."),
    Utterance(None, 4, "Turn left."),
]


@pytest.fixture(scope="module")
def bundled() -> Warble:
    return load()


class Deaf:
    """A recogniser that must not be asked."""

    def read(self, samples: np.ndarray, rate_hz: int) -> str:
        raise AssertionError


def test_side_by_side_each_says_what_it_says_alone(bundled: Warble) -> None:
    found = {said.utterance: said for said in speak(bundled, UTTERANCES, rows=3)}
    assert set(found) == set(UTTERANCES)
    for utterance in UTTERANCES:
        alone = bundled.say(utterance.text, voice=utterance.voice, seed=utterance.seed)
        said = found[utterance]
        assert said.codes == zlib.crc32(alone.codes.tobytes())
        assert said.finish_reason == alone.finish_reason
        np.testing.assert_allclose(said.samples, alone.samples, atol=1e-4)


def test_an_utterance_is_taken_when_there_is_room_for_it(bundled: Warble) -> None:
    taken: list[Utterance] = []

    def noted() -> Iterator[Utterance]:
        for utterance in UTTERANCES:
            taken.append(utterance)
            yield utterance

    speaking = speak(bundled, noted(), rows=2)
    next(speaking)
    assert taken == UTTERANCES[:2]
    assert len(list(speaking)) == 3
    assert taken == UTTERANCES


def test_those_who_take_share_without_gap_and_twin() -> None:
    taken = multiprocessing.get_context("spawn").Value("q", 0)
    one, other = (untaken(UTTERANCES, taken) for _ in range(2))
    found = [next(one), next(other), next(other), next(one)]
    assert found == UTTERANCES
    assert list(one) == list(other) == []


def test_nothing_to_say_is_said_at_once(bundled: Warble) -> None:
    assert list(speak(bundled, [])) == []


def test_options_reach_the_model(bundled: Warble) -> None:
    (sampled,) = speak(bundled, UTTERANCES[:1])
    (greedy,) = speak(bundled, UTTERANCES[:1], greedy=True)
    assert sampled.codes != greedy.codes


def test_what_is_no_speech_counts_as_silence(
    bundled: Warble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SickError("audio-silent", "seen", "cause", "remedy")

    monkeypatch.setattr(warble_mlx.reading, "check_waveform", refuse)
    (said,) = speak(bundled, UTTERANCES[:1])
    row = read(said, Deaf())
    assert (row["heard"], row["seconds"], row["finish_reason"]) == ("", 0.0, "audio-silent")
    assert (row["errors"], row["words"]) == (2, 2)


def test_what_cannot_be_said_is_an_error(bundled: Warble) -> None:
    with pytest.raises(WarbleError, match="Nobody"):
        list(speak(bundled, [Utterance("Nobody", 1, "Yes.")]))


def test_a_journal_gives_back_what_was_completed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "ä", "seed": seed} for seed in range(3)]
    first = Journal(path, {"model": "a"})
    for row in rows:
        first.add(row)
    path.write_bytes(path.read_bytes()[:-5])  # stopped inside the last line
    again = Journal(path, {"model": "a"})
    assert again.rows == rows[:2]
    again.add(rows[2])
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]] == rows
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_journal_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Journal(path, {"model": "a"}).add({"text": "a"})
    before = path.read_bytes()
    with pytest.raises(WarbleError, match="another model"):
        Journal(path, {"model": "b"})
    assert path.read_bytes() == before


def test_a_process_that_fails_ends_the_run(tmp_path: Path) -> None:
    """With a recogniser it is the model that is missing, without one the recogniser."""
    with pytest.raises(WarbleError, match="status 1"):
        list(in_processes(str(tmp_path / "nothing"), UTTERANCES, jobs=2))
