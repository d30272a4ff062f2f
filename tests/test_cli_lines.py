"""`warble -`: what comes through a pipe is spoken while more of it is still to come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from loudspeaker import Loudspeaker
from speaking import quick_warble

import warble_mlx
from warble_mlx import Warble, cli, player
from warble_mlx.audio import encode
from warble_mlx.engine import Request
from warble_mlx.errors import SickError
from warble_mlx.reading import piece_seed

SEED = 11
PAUSE = np.zeros(11_025, np.float32)
LINES = ["Alpha one.", "Bravo two.", "Cedar three."]
sick: set[int] = set()


def fall_ill(_number: int, frame: int, request: Request) -> None:
    if request.seed in sick and frame == 2:
        raise SickError("codes-repeat", "one frame", "luck", "another seed")


@pytest.fixture(scope="module")
def loaded() -> Warble:
    return quick_warble(fall_ill)[0]


@pytest.fixture
def warble(loaded: Warble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Warble:
    sick.clear()
    monkeypatch.setitem(vars(warble_mlx), "load", lambda *_args, **_options: loaded)
    monkeypatch.setattr(player, "can_play", lambda: False)
    monkeypatch.chdir(tmp_path)
    return loaded


def said(warble: Warble, *lines: str) -> np.ndarray:
    """Each line on its own with its own seed, silence between them."""
    parts: list[np.ndarray] = []
    for number, line in enumerate(lines):
        parts += [PAUSE] * bool(number)
        parts.append(warble.say(line, seed=piece_seed(SEED, number)).samples)
    return np.concatenate(parts)


def pcm(samples: np.ndarray) -> bytes:
    return encode(samples, 44_100, "wav")[44:]


Feed = Callable[[Callable[[int], object]], threading.Thread]


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Feed]:
    """A pipe as stdin, written to by a function of its file descriptor in a thread."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "r", encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)

        def start(write: Callable[[int], object]) -> threading.Thread:
            def run() -> None:
                try:
                    write(writing)
                finally:
                    os.close(writing)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        yield start


def test_lines_are_spoken_one_by_one(
    warble: Warble, feed: Feed, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = "\n".join(LINES).encode()
    # Bytes that cut words and signs anywhere.
    thread = feed(lambda out: [os.write(out, text[i : i + 3]) for i in range(0, 99, 3)])
    assert cli.main(["-", "--raw", "--seed", str(SEED)]) == 0
    thread.join()
    out, err = capfdbinary.readouterr()
    assert out == pcm(said(warble, *LINES))
    assert b"3 pieces" in err
    assert f"seed {SEED} -> stdout".encode() in err


def test_the_first_line_is_heard_before_the_second_is_written(
    warble: Warble, feed: Feed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    speaker = Loudspeaker(runs=True)
    monkeypatch.setattr(player, "can_play", lambda: True)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    first = said(warble, LINES[0])
    heard: list[bool] = []

    def write(out: int) -> None:
        os.write(out, f"{LINES[0]}\n".encode())
        for _ in range(2000):  # all of it, though it is less than a player waits for
            if np.count_nonzero(speaker.heard) >= np.count_nonzero(first):
                heard.append(True)
                break
            threading.Event().wait(0.01)
        os.write(out, LINES[1].encode())

    thread = feed(write)
    assert cli.main(["-", "--seed", str(SEED)]) == 0
    thread.join()
    assert heard
    sound = speaker.heard[speaker.heard != 0]
    wanted = said(warble, *LINES[:2])
    assert np.allclose(sound, wanted[wanted != 0], atol=1e-6)
    assert "loudspeaker" in capfd.readouterr().err


def test_a_sick_line_is_told_of_and_the_rest_is_spoken(
    warble: Warble, feed: Feed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sick.add(piece_seed(SEED, 1))
    speaker = Loudspeaker(runs=True)
    monkeypatch.setattr(player, "can_play", lambda: True)
    monkeypatch.setitem(sys.modules, "sounddevice", speaker)
    thread = feed(lambda out: os.write(out, "\n".join(LINES).encode()))
    assert cli.main(["-", "--json", "--seed", str(SEED)]) == 4
    thread.join()
    out, err = capfd.readouterr()
    assert [json.loads(line)["text"] for line in out.splitlines()] == [LINES[0], LINES[2]]
    assert "(codes-repeat)" in err
    assert "2 pieces" in err


@pytest.mark.parametrize(("raw", "told"), [(b" \n\n", "nothing to say"), (b"\xff\xfea", "UTF-8")])
def test_no_text(
    warble: Warble,
    feed: Feed,
    capfd: pytest.CaptureFixture[str],
    raw: bytes,
    told: str,
) -> None:
    feed(lambda out: os.write(out, raw)).join()
    assert cli.main(["-", "--raw"]) == 2
    assert told in capfd.readouterr().err


def test_a_file_still_takes_the_whole_text(warble: Warble, feed: Feed) -> None:
    feed(lambda out: os.write(out, b"Alpha one.\nBravo two.")).join()
    assert cli.main(["-", "-o", "speech.wav", "--seed", str(SEED)]) == 0
    whole = warble.say("Alpha one.\nBravo two.", seed=SEED)
    assert Path("speech.wav").read_bytes()[44:] == pcm(whole.samples)


def test_in_a_shell() -> None:
    """The real command between two pipes: sound comes out while stdin is open."""
    command = [sys.executable, "-m", "warble_mlx", "-", "--raw", "--seed", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"Hi.\n")
        running.stdin.flush()
        assert len(running.stdout.read(2000)) == 2000
        out, err = running.communicate(b"Bye.")
        assert running.returncode == 0, err
        assert len(out) > 20_000
        assert b"2 pieces" in err
