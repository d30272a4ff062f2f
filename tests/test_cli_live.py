"""`warble say` that speaks while it generates: to a pipe, a file or a loudspeaker; and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from loudspeaker import Loudspeaker
from speaking import quick_warble

import warble_mlx
from warble_mlx import Speech, Warble, cli, player
from warble_mlx.audio import encode
from warble_mlx.engine import Request
from warble_mlx.errors import SickError
from warble_mlx.live import Pcm
from warble_mlx.narration import journal_of, part_of

TEXT = "Alpha one, the first of all of them.\n\nBravo two, which is the second of them."
SEED = 11
LINE = [TEXT, "--seed", str(SEED)]


class Hook:
    """Raises at a frame of the first or second piece, counted from 1, and counts frames."""

    def __init__(self) -> None:
        self.at: tuple[int, int] | None = None
        self.error: BaseException = KeyboardInterrupt()
        self.frames = 0

    def __call__(self, number: int, frame: int, _request: Request) -> None:
        self.frames += 1
        if (number + 1, frame + 1) == self.at:
            raise self.error


HOOK = Hook()


@pytest.fixture(scope="module")
def loaded() -> tuple[Warble, list[Request]]:
    return quick_warble(HOOK)


@pytest.fixture
def whole(
    loaded: tuple[Warble, list[Request]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Speech:
    warble, asked = loaded
    vars(HOOK).update(vars(Hook()))
    speech = warble.say(TEXT, seed=SEED)
    asked.clear()
    HOOK.frames = 0
    monkeypatch.setitem(vars(warble_mlx), "load", lambda *_args, **_options: warble)
    monkeypatch.setattr(player, "can_play", lambda: False)
    monkeypatch.chdir(tmp_path)
    return speech


def as_pcm(samples: np.ndarray) -> bytes:
    return encode(samples, 44_100, "wav")[44:]


# ---------------------------------------------------------------------- stdout


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (["--stream", "-o", "-"], 44),
        (["--raw"], 0),
        (["--raw", "-o", "-"], 0),
        (["--raw", "--stream"], 0),
        (["--stream", "--retry", "1", "-o", "-"], 44),
    ],
)
def test_a_pipe_gets_what_a_file_would_hold(
    whole: Speech, capfdbinary: pytest.CaptureFixture[bytes], options: list[str], head: int
) -> None:
    assert cli.main([*LINE, *options]) == 0
    out, err = capfdbinary.readouterr()
    assert out[head:] == as_pcm(whole.samples)
    assert out[:head] in (
        b"",
        Pcm(44_100).endless_header(),
        encode(whole.samples, 44_100, "wav")[:44],
    )
    assert err.decode().splitlines()[0].endswith(f"seed {SEED} -> stdout")


def test_raw_goes_nowhere_but_to_stdout(
    whole: Speech, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([*LINE, "--raw", "-o", "x.wav"]) == 2
    assert "--raw writes to stdout" in capfd.readouterr().err
    assert cli.main([*LINE, "--raw", "--json"]) == 2
    monkeypatch.setenv("WARBLE_OUTPUT", "x.wav")  # a default, which the option overrules
    assert cli.main([*LINE, "--raw"]) == 0
    assert not list(Path().iterdir())


STREAMS = """
import os, signal, sys
import warble_mlx
from speaking import quick_warble
from warble_mlx import cli

# Who starts the tests in the background has Ctrl-C ignored in all that comes of them.
signal.signal(signal.SIGINT, signal.default_int_handler)

def hook(number, frame, request):
    {action}

warble, _ = quick_warble(hook)
warble_mlx.load = lambda *a, **k: warble
sys.exit(cli.main(sys.argv[1:]))
"""


def start(action: str, *line: str, **settings: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", STREAMS.format(action=action), *LINE, *line],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.PIPE,
        **settings,  # type: ignore[call-overload]
    )


def test_the_first_bytes_come_before_the_speech_is_finished(whole: Speech) -> None:
    """At its 20th frame the generation waits until the reader has the first chunk."""
    action = "frame == 20 and number == 0 and sys.stdin.buffer.read(1)"
    running = start(action, "--stream", "-o", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert running.stdin
    assert running.stdout
    head = running.stdout.read(44 + 4 * 2048 * 2)
    assert head[:44] == Pcm(44_100).endless_header()
    assert head[44:] == as_pcm(whole.samples)[: 4 * 2048 * 2]
    running.stdin.write(b".")
    rest, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert head[44:] + rest == as_pcm(whole.samples)


def test_a_file_behind_stdout_gets_its_length(whole: Speech, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    with out.open("wb") as file:
        start("pass", "--stream", "-o", "-", stdout=file).communicate(timeout=60)
    assert out.read_bytes() == encode(whole.samples, 44_100, "wav")
    before = out.read_bytes()
    with out.open("ab") as file:  # nothing there may be changed
        start("pass", "--stream", "-o", "-", stdout=file).communicate(timeout=60)
    after = out.read_bytes()
    assert after[: len(before)] == before
    assert after[len(before) :] == Pcm(44_100).endless_header() + as_pcm(whole.samples)


def test_a_reader_that_has_gone_ends_it_quietly(whole: Speech) -> None:
    action = "(sys.stderr.write('.'), sys.stderr.flush(), __import__('time').sleep(0.02))"
    running = start(action, "--stream", "-o", "-", stdout=subprocess.PIPE)
    assert running.stdout
    running.stdout.read(100)
    running.stdout.close()
    assert running.stderr
    err = running.stderr.read()
    running.stderr.close()
    assert running.wait(60) == 141
    assert set(err) == set(b".")  # no complaint
    assert len(err) < len(whole.codes[0])  # and no frame more than up to the next chunk


@pytest.mark.parametrize("is_file", [True, False])
def test_ctrl_c_leaves_a_valid_wav(whole: Speech, tmp_path: Path, is_file: bool) -> None:
    action = "(number, frame) == (0, 22) and os.kill(os.getpid(), __import__('signal').SIGINT)"
    out = tmp_path / "x.wav"
    with out.open("wb") as file:
        target = file if is_file else subprocess.PIPE
        running = start(action, "--stream", "-o", "-", stdout=target)
        data, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.decode().strip() == "warble: interrupted"
    data = out.read_bytes() if is_file else data
    heard = soundfile.read(io.BytesIO(data), dtype="int16")[0].tobytes()
    assert 0 < len(heard) <= 22 * 2048 * 2
    assert as_pcm(whole.samples).startswith(heard)
    if is_file:
        assert int.from_bytes(data[40:44], "little") == len(data) - 44


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
def test_a_file_grows_beside_its_name(
    whole: Speech, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(f"x.{suffix}")
    seen: list[int] = []

    def look(self: Hook, _number: int, _frame: int, _request: Request) -> None:
        assert not out.exists()
        seen.append(soundfile.info(part_of(out)).frames)

    monkeypatch.setattr(Hook, "__call__", look)
    assert cli.main([*LINE, "--stream", "-o", str(out)]) == 0
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5  # chunk by chunk
    assert list(Path().iterdir()) == [out]
    if suffix != "mp3":
        assert soundfile.read(out, dtype="int16")[0].tobytes() == as_pcm(whole.samples)


@pytest.mark.parametrize("at", [(1, 15), (2, 15)])
def test_ctrl_c_keeps_what_was_spoken_under_the_growing_name(
    whole: Speech, capfd: pytest.CaptureFixture[str], at: tuple[int, int]
) -> None:
    out = Path("x.mp3")
    HOOK.at = at
    line = [*LINE, "--stream", "-o", str(out)]
    assert cli.main(line) == 130
    told = capfd.readouterr().err
    assert str(part_of(out)) in told
    assert not out.exists()
    heard = soundfile.read(part_of(out), dtype="int16")[0]
    spoken = whole.pieces[0].samples[1] * (at[0] - 1)
    assert spoken < len(heard) <= spoken + 15 * 2048 + 44_100 // 2
    assert as_pcm(whole.samples).startswith(heard.tobytes())
    HOOK.at = None
    if at[0] == 1:  # nothing to resume: the same command starts anew
        assert re.search(r"the \d\.\d\d s that were spoken are kept in", told)
        assert not journal_of(out).exists()
        assert cli.main(line) == 0
    else:
        assert "1 of 2 pieces are kept" in told
        assert cli.main([*line, "--resume"]) == 0
    assert list(Path().iterdir()) == [out]


@pytest.mark.parametrize(("at", "kept"), [((1, 15), False), ((2, 15), True)])
def test_what_was_no_speech_is_not_kept(
    whole: Speech, capfd: pytest.CaptureFixture[str], at: tuple[int, int], kept: bool
) -> None:
    out = Path("x.wav")
    HOOK.at, HOOK.error = at, SickError("codes-repeat", "seen", "cause", "remedy")
    assert cli.main([*LINE, "--stream", "-o", str(out)]) == 4
    capfd.readouterr()
    assert part_of(out).exists() is kept
    if kept:
        assert soundfile.info(part_of(out)).frames == whole.pieces[0].samples[1]


def test_a_device_is_no_file_to_grow(whole: Speech, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LINE, "--stream", "-o", "/dev/null"]) == 2
    assert "--stream writes to a file" in capfd.readouterr().err


# ---------------------------------------------------------------------- loudspeaker


def test_it_is_played_while_it_is_generated(
    whole: Speech, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Loudspeaker()
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    monkeypatch.setattr(player, "can_play", lambda: True)
    heard_at: list[int] = []

    def listen(self: Hook, number: int, frame: int, _request: Request) -> None:
        if (number, frame) == (1, 1):
            device.play_for(1.0)
            heard_at.append(np.count_nonzero(device.heard))
            device.run()

    monkeypatch.setattr(Hook, "__call__", listen)
    assert cli.main([*LINE, "--json"]) == 0
    assert heard_at[0] > 10_000  # the second piece was not there yet
    heard = device.heard
    assert np.array_equal(heard[heard != 0], whole.samples[whole.samples != 0])
    out, err = capfd.readouterr()
    assert json.loads(out)["seconds"] == whole.seconds
    assert "-> loudspeaker" in err


def test_ctrl_c_silences_the_loudspeaker(
    whole: Speech, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Loudspeaker(runs=True)
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    monkeypatch.setattr(player, "can_play", lambda: True)
    HOOK.at = (2, 5)
    assert cli.main(LINE) == 130
    assert device.log == ["start", "abort", "close"]
    assert capfd.readouterr().err.strip() == "warble: interrupted"
    assert HOOK.frames == whole.pieces[0].frames[1] + 5
