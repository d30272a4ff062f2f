"""Readings side by side: what each says is what it says alone, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest

import warble_mlx
from warble_mlx import Warble
from warble_mlx.ensemble import Ensemble, Event
from warble_mlx.errors import SickError, WarbleError
from warble_mlx.health import FrameMonitor
from warble_mlx.reading import Reading

TEXTS = ["Hi", "Where did you go?", "Yes.", "Good morning.\n\nBye."]


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


def reading(warble: Warble, text: str, seed: int, **options: object) -> Reading:
    return warble.reading(warble.plan(text, seed=seed, **options))


class Hearer:
    """Collects what an ensemble brings."""

    def __init__(self) -> None:
        self.samples: dict[Reading, list[np.ndarray]] = {}
        self.ends: dict[Reading, WarbleError | None] = {}

    def see(self, events: list[Event]) -> None:
        for event in events:
            assert event.reading not in self.ends
            if event.chunk is not None:
                self.samples.setdefault(event.reading, []).append(event.chunk.samples)
            else:
                self.ends[event.reading] = event.error


def finish(ensemble: Ensemble, hearer: Hearer) -> None:
    while ensemble.busy:
        hearer.see(list(ensemble.step()))


def test_joining_between_frames_changes_nothing(warble: Warble) -> None:
    alone = [warble.say(text, seed=70 + i).samples for i, text in enumerate(TEXTS)]
    ensemble, hearer = Ensemble(warble.engine, 3), Hearer()
    waiting = [reading(warble, text, 70 + i) for i, text in enumerate(TEXTS)]
    every = list(waiting)
    steps = 0
    while waiting or ensemble.busy:
        if waiting and ensemble.room and steps % 3 == 0:
            hearer.see(list(ensemble.start(waiting.pop(0))))
        hearer.see(list(ensemble.step()))
        steps += 1
    for one, wanted in zip(every, alone, strict=True):
        assert hearer.ends[one] is None
        assert np.array_equal(np.concatenate(hearer.samples[one]), wanted)
    assert ensemble.room == 3


def test_one_that_leaves_frees_its_row_at_once(warble: Warble) -> None:
    wanted = warble.say(TEXTS[1], seed=5).samples
    ensemble, hearer = Ensemble(warble.engine, 2), Hearer()
    leaving, staying = reading(warble, TEXTS[3], 4), reading(warble, TEXTS[1], 5)
    for one in (leaving, staying):
        hearer.see(list(ensemble.start(one)))
    with pytest.raises(WarbleError, match="all 2 rows are busy"):
        list(ensemble.start(reading(warble, "Hi", 1)))
    for _ in range(5):
        hearer.see(list(ensemble.step()))
    ensemble.stop(leaving)
    ensemble.stop(leaving)
    assert ensemble.room == 1
    late = reading(warble, "Hi", 70)
    hearer.see(list(ensemble.start(late)))
    finish(ensemble, hearer)
    assert leaving not in hearer.ends
    assert np.array_equal(np.concatenate(hearer.samples[staying]), wanted)
    assert np.array_equal(np.concatenate(hearer.samples[late]), warble.say("Hi", seed=70).samples)


def test_a_sick_one_harms_no_other(warble: Warble, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = warble.say("Hi", seed=3).samples
    see = FrameMonitor.see
    # Judged by its length in characters: a monitor knows its text's.
    begin = FrameMonitor.__init__

    def noted(self: FrameMonitor, sizes: object, text: str, rate: float) -> None:
        begin(self, sizes, text, rate)  # type: ignore[arg-type]
        self.text = text  # type: ignore[attr-defined]

    def judge(self: FrameMonitor, codes: np.ndarray) -> None:
        see(self, codes)
        if self.text == "Yes." and self.frames == 4:  # type: ignore[attr-defined]
            raise SickError("codes-repeat", "seen", "cause", "remedy")

    monkeypatch.setattr(FrameMonitor, "__init__", noted)
    monkeypatch.setattr(FrameMonitor, "see", judge)
    ensemble, hearer = Ensemble(warble.engine, 2), Hearer()
    good, sick = reading(warble, "Hi", 3), reading(warble, "Yes.", 3, retry=1)
    for one in (good, sick):
        hearer.see(list(ensemble.start(one)))
    finish(ensemble, hearer)
    assert isinstance(hearer.ends[sick], SickError)
    assert sick.retries == 1
    assert hearer.ends[good] is None
    assert np.array_equal(np.concatenate(hearer.samples[good]), wanted)


def test_the_batch_is_no_wider_than_it_must(warble: Warble) -> None:
    ensemble = Ensemble(warble.engine, 8)
    every = [reading(warble, "Hi", i) for i in range(5)]
    widths = []
    for one in every:
        list(ensemble.start(one))
        list(ensemble.step())
        widths.append(len(ensemble._batch._rows))
    assert widths == [1, 2, 4, 4, 8]
    for one in every[:4]:
        ensemble.stop(one)
    list(ensemble.step())
    assert len(ensemble._batch._rows) == 1
    ensemble.stop(every[4])
    assert ensemble.busy == 0


def test_one_that_may_not_go_on_rests_between_pieces(warble: Warble) -> None:
    alone = [warble.say(TEXTS[3], seed=7).samples, warble.say("Hi", seed=70).samples]
    resting: set[Reading] = set()
    ensemble = Ensemble(warble.engine, 2, lambda reading: reading not in resting)
    hearer = Hearer()
    slow, other = reading(warble, TEXTS[3], 7), reading(warble, "Hi", 70)
    hearer.see(list(ensemble.start(slow)))
    resting.add(slow)  # from its second piece on
    while not ensemble.is_resting:
        hearer.see(list(ensemble.step()))
    assert len(slow.pieces) == 1
    hearer.see(list(ensemble.start(other)))
    assert not ensemble.is_resting
    while other not in hearer.ends:
        hearer.see(list(ensemble.step()))
    assert slow not in hearer.ends
    resting.clear()
    finish(ensemble, hearer)
    for one, wanted in zip((slow, other), alone, strict=True):
        assert hearer.ends[one] is None
        assert np.array_equal(np.concatenate(hearer.samples[one]), wanted)


def test_chunk_sizes_do_not_change_the_samples(warble: Warble) -> None:
    wanted = warble.say("Where did you go?", seed=5).samples
    plan = warble.plan("Where did you go?", seed=5)
    chunks = list(warble.reading(plan, chunk_frames=(7, 64)).chunks())
    assert [c.end - c.begin for c in chunks[:-1]] == [7]
    heard = np.concatenate([c.samples for c in chunks])
    assert np.abs(heard - wanted).max() < 1e-5
