"""Playing, with a stand-in for sounddevice."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warble_mlx import player
from warble_mlx.errors import AudioError, MissingExtraError


class PortAudioError(Exception):
    pass


class Device(SimpleNamespace):
    """What of sounddevice is used; `log` keeps the order of the calls."""

    def __init__(self, *, broken: bool = False, interrupted: bool = False) -> None:
        super().__init__(log=[], broken=broken, interrupted=interrupted)

    def query_devices(self, kind: str) -> dict[str, str]:
        assert kind == "output"
        if self.broken:
            raise PortAudioError("Error querying device -1")
        return {"name": "Speakers"}

    def play(self, samples: Any, rate: int) -> None:
        if self.broken:
            raise PortAudioError("no device")
        self.log.append(("play", len(samples), float(np.abs(samples).max()), rate))

    def wait(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.log.append("wait")

    def stop(self) -> None:
        self.log.append("stop")


def use(monkeypatch: pytest.MonkeyPatch, device: Device) -> Device:
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    return device


def test_plays_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Device())
    assert player.can_play()
    player.play(np.full(100, 0.5), 44_100)
    assert device.log == [("play", 100, 0.5, 44_100), "wait"]


def test_loud_and_broken_samples_never_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Device())
    player.play(np.full(10, 3.0), 44_100)
    assert device.log[0][2] < 1
    with pytest.raises(AudioError, match="audio-not-finite"):
        player.play(np.full(10, np.nan), 44_100)
    assert len(device.log) == 2


def test_interrupt_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use(monkeypatch, Device(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        player.play(np.ones(10), 44_100)
    assert device.log[-1] == "stop"


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Device(broken=True))
    assert not player.can_play()
    with pytest.raises(AudioError, match=r"-o speech\.wav"):
        player.play(np.ones(10), 44_100)


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
    assert not player.can_play()
    with pytest.raises(raised) as caught:
        player.play(np.ones(10), 44_100)
    assert words in str(caught.value)
