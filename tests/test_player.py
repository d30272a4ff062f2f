"""Playing while the speech is still being made, with a stand-in for sounddevice."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import numpy.typing as npt
import pytest
from loudspeaker import Loudspeaker

from warble_mlx import player
from warble_mlx.errors import AudioError, MissingExtraError
from warble_mlx.player import Player, needed_s

RATE = 44_100
FRAME = 2048
SIZES = [4] + [16] * 20  # frames of the chunks of a stream
BURST_S = 16 * FRAME / RATE


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def chunks(sizes: list[int] = SIZES) -> list[npt.NDArray[np.float32]]:
    """Noise without a zero in it, so that every zero that is heard is a gap."""
    rng = np.random.default_rng(3)
    return [rng.uniform(0.1, 0.5, n * FRAME).astype(np.float32) for n in sizes]


def use(monkeypatch: pytest.MonkeyPatch, device: Loudspeaker) -> Loudspeaker:
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    return device


def play(device: Loudspeaker, rtf: float, later: float | None = None) -> tuple[Player, float]:
    """Make chunks at `rtf` (from the middle on at `later`) and play them meanwhile; the player, and
    when the first sample was heard."""
    clock, made = Clock(), chunks()
    expected_s = sum(SIZES) * FRAME / RATE
    with Player(RATE, burst_s=BURST_S, expected_s=expected_s, clock=clock) as playing:
        for number, chunk in enumerate(made):
            slow = later if later and number >= len(made) // 2 else rtf
            takes = 0.3 + rtf * chunk.size / RATE if number == 0 else slow * chunk.size / RATE
            device.play_for(takes)
            clock.now += takes
            playing.write(chunk)
        device.run()
    return playing, float(np.flatnonzero(device.heard)[0]) / RATE


@pytest.mark.parametrize("rtf", [0.02, 0.1, 0.5, 0.8, 0.95])
def test_faster_than_real_time_there_are_no_gaps(
    monkeypatch: pytest.MonkeyPatch, rtf: float
) -> None:
    device = use(monkeypatch, Loudspeaker())
    playing, first_s = play(device, rtf)
    heard, said = device.heard, np.concatenate(chunks())
    begin = int(np.flatnonzero(heard)[0])
    assert np.array_equal(heard[begin : begin + said.size], said)
    assert not heard[begin + said.size :].any()
    assert playing.gaps == 0
    # It begins with the second chunk, or the one after it, and not with the last.
    assert first_s < 0.3 + rtf * (4 + 2 * 16) * FRAME / RATE + 0.1
    assert device.log == ["start", "close"]
    assert device.settings == {"samplerate": RATE, "channels": 1, "dtype": "float32"}


def test_slower_than_real_time_it_waits_for_as_much_as_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = use(monkeypatch, Loudspeaker())
    playing, first_s = play(device, rtf=1.3)
    heard, said = device.heard, np.concatenate(chunks())
    begin = int(np.flatnonzero(heard)[0])
    assert np.array_equal(heard[begin : begin + said.size], said)
    assert playing.gaps == 0
    assert 1.3 * (4 + 2 * 16) * FRAME / RATE < first_s < 1.3 * said.size / RATE


def test_when_the_machine_slows_down_it_pauses_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = use(monkeypatch, Loudspeaker())
    playing, _ = play(device, rtf=0.5, later=2.5)
    heard = device.heard
    assert playing.gaps > 0
    assert np.array_equal(heard[heard != 0], np.concatenate(chunks()))


def test_what_must_be_there_before_it_begins() -> None:
    assert needed_s(0.5, 1.0, 100.0) >= 0.5  # a chunk is made while that is played
    assert needed_s(0.5, 1.0, 100.0) == needed_s(0.5, 1.0, 0.0)
    assert needed_s(1.5, 1.0, 100.0) >= 50.0
    assert needed_s(0.01, 0.7, 10.0) < 0.1


def test_a_single_chunk_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Loudspeaker())
    (chunk,) = chunks([3])
    with Player(RATE, burst_s=BURST_S, expected_s=1.0) as playing:
        playing.write(chunk)
        device.play_for(1.0)
        assert not device.heard.any()  # more may come
        device.run()
    assert np.array_equal(device.heard[device.heard != 0], chunk)


def test_nothing_to_play_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Loudspeaker(runs=True))
    with Player(RATE, burst_s=BURST_S, expected_s=0.0):
        pass
    assert not device.heard.any()


def test_the_maker_waits_for_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must not grow with what was made too early."""
    device = use(monkeypatch, Loudspeaker(runs=True))
    monkeypatch.setattr(player, "_MOST_S", 1.0)
    monkeypatch.setattr(player, "_POLL_S", 0.001)
    most = 0
    with Player(RATE, burst_s=0.01, expected_s=1.0, clock=Clock()) as playing:
        for chunk in chunks([16] * 12):
            playing.write(chunk)
            most = max(most, playing._queued)
    assert most <= 2 * RATE
    assert np.array_equal(device.heard[device.heard != 0], np.concatenate(chunks([16] * 12)))


def test_loud_and_broken_samples_never_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Loudspeaker(runs=True))
    with Player(RATE, burst_s=BURST_S, expected_s=0.0) as playing:
        playing.write(np.full(1000, 3.0, np.float32))
    assert 0.9 < device.heard.max() < 1
    device = use(monkeypatch, Loudspeaker())
    with (
        pytest.raises(AudioError, match="audio-not-finite"),
        Player(RATE, burst_s=BURST_S, expected_s=0.0) as playing,
    ):
        playing.write(np.full(10, np.nan, np.float32))
    assert device.log == ["start", "abort", "close"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_silences_at_once(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    device = use(monkeypatch, Loudspeaker())

    def interrupted() -> None:
        with Player(RATE, burst_s=BURST_S, expected_s=0.0) as playing:
            playing.write(chunks([16])[0])
            raise error

    with pytest.raises(error):
        interrupted()
    assert device.log == ["start", "abort", "close"]


def test_ctrl_c_while_the_end_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Loudspeaker())

    def interrupted(_seconds: float) -> bool:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Player(RATE, burst_s=BURST_S, expected_s=0.0) as playing,
    ):
        monkeypatch.setattr(playing._is_heard, "wait", interrupted)
    assert device.log == ["start", "abort", "close"]


def test_a_device_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Loudspeaker())
    monkeypatch.setattr(player, "_POLL_S", 0.001)
    with Player(RATE, burst_s=BURST_S, expected_s=0.0) as playing:
        playing.write(chunks([16])[0])
        device.active = False
    assert device.log == ["start", "close"]


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Loudspeaker())
    assert player.can_play()
    use(monkeypatch, Loudspeaker(broken=True))
    assert not player.can_play()
    assert player.why_mute() == "this machine has no loudspeaker"
    with pytest.raises(AudioError, match=r"-o speech\.wav"):
        Player(RATE, burst_s=BURST_S, expected_s=0.0)


@pytest.mark.parametrize(
    ("failure", "raised", "words"),
    [
        (ModuleNotFoundError("sounddevice"), MissingExtraError, 'pip install "warble-mlx[play]"'),
        (OSError("PortAudio library not found"), AudioError, "apt install libportaudio2"),
    ],
)
def test_missing_library(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, raised: type[Exception], words: str
) -> None:
    def fail(name: str) -> None:
        raise failure

    monkeypatch.setattr(importlib, "import_module", fail)
    assert words in str(player.why_mute())
    with pytest.raises(raised) as caught:
        Player(RATE, burst_s=BURST_S, expected_s=0.0)
    assert words in str(caught.value)
