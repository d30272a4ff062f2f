"""A long text written to a file as it goes, stopped in every way, and gone on with."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from speaking import quick_warble

import warble_mlx
from warble_mlx import Speech, Warble, cli, cli_say
from warble_mlx.audio import PEAK_LIMIT
from warble_mlx.engine import Request
from warble_mlx.errors import AudioError, SickError, WarbleError
from warble_mlx.narration import finish, journal_of, narrate, narrate_text, part_of, unfinished

TEXT = 'Alpha one.\n\nBravo two.\n\nCedar three.\n\nDelta four.<break time="0.7s"/>'
PIECES = 4
SEED = 11


class Stop(BaseException):
    """Like Ctrl-C, but a test's own."""


class Stopper:
    """Raises at one frame of one request."""

    def __init__(self) -> None:
        self.at: tuple[int, int] | None = None

    def __call__(self, number: int, frame: int, _request: Request) -> None:
        if (number, frame) == self.at:
            raise Stop


STOPPER = Stopper()


@pytest.fixture(scope="module")
def loaded() -> tuple[Warble, list[Request]]:
    return quick_warble(STOPPER)


@pytest.fixture
def warble(loaded: tuple[Warble, list[Request]]) -> Warble:
    STOPPER.at = None
    loaded[1].clear()
    return loaded[0]


@pytest.fixture
def whole(warble: Warble, loaded: tuple[Warble, list[Request]]) -> Speech:
    speech = warble.say(TEXT, seed=SEED)
    loaded[1].clear()
    return speech


def tell(warble: Warble, target: Path, *, resume: bool = False, **options: object) -> Speech:
    options = {"text": TEXT, "seed": SEED, **options}
    return narrate_text(warble, target=target, resume=resume, **options)[0]


def stop(warble: Warble, target: Path, at: tuple[int, int]) -> None:
    STOPPER.at = at
    with pytest.raises(Stop):
        tell(warble, target)
    STOPPER.at = None


def pcm(path: Path) -> np.ndarray:
    return soundfile.read(path, dtype="int16")[0]


def as_pcm(samples: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 44_100, format="WAV", subtype="PCM_16")
    buffer.seek(0)
    return soundfile.read(buffer, dtype="int16")[0]


def test_the_file_holds_what_is_said_at_once(warble: Warble, whole: Speech, tmp_path: Path) -> None:
    out = tmp_path / "book.wav"
    speech = tell(warble, out)
    assert np.array_equal(pcm(out), as_pcm(whole.samples))
    assert speech.pieces == whole.pieces
    assert np.array_equal(speech.codes, whole.codes)
    assert speech.seconds == whole.seconds
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("at", [(1, 0), (1, 5), (2, 3), (PIECES - 1, 9)])
def test_a_stopped_run_goes_on_with_the_same_samples(
    warble: Warble, whole: Speech, loaded: tuple[Warble, list[Request]], tmp_path: Path,
    at: tuple[int, int],
) -> None:  # fmt: skip
    out = tmp_path / "book.wav"
    stop(warble, out, at)
    assert not out.exists()
    done = at[0]
    assert len(unfinished(out).entries) == done
    assert len(pcm(part_of(out))) == whole.pieces[done - 1].samples[1]
    loaded[1].clear()
    speech = tell(warble, out, resume=True, seed=None)  # the seed is remembered
    assert len(loaded[1]) == PIECES - done
    assert np.array_equal(pcm(out), as_pcm(whole.samples))
    assert speech.pieces == whole.pieces
    assert np.array_equal(speech.codes, whole.codes)
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_may_be_stopped_again_and_again(
    warble: Warble, whole: Speech, loaded: tuple[Warble, list[Request]], tmp_path: Path
) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (1, 1))
    for _ in range(2, PIECES):
        loaded[1].clear()
        STOPPER.at = (1, 1)
        with pytest.raises(Stop):
            tell(warble, out, resume=True)
    STOPPER.at = None
    tell(warble, out, resume=True)
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


def test_without_a_finished_piece_nothing_stays(warble: Warble, tmp_path: Path) -> None:
    stop(warble, tmp_path / "book.wav", (0, 3))
    assert not list(tmp_path.iterdir())


def test_torn_files_are_cut_back(warble: Warble, whole: Speech, tmp_path: Path) -> None:
    """As a kill leaves them: half a line in the journal, half a piece in the part."""
    out = tmp_path / "book.wav"
    stop(warble, out, (2, 3))
    with journal_of(out).open("ab") as file:
        file.write(b'{"text": "Cedar thr')
    with soundfile.SoundFile(part_of(out), "r+") as file:
        file.seek(0, soundfile.SEEK_END)
        file.write(np.full(777, 0.3, np.float32))
    with part_of(out).open("ab") as file:
        file.write(b"\1" * 555)  # behind what the header knows of
    tell(warble, out, resume=True)
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"text": TEXT.replace("two", "too")}, "text"),
        ({"text": TEXT.replace("0.7", "0.8")}, "text"),
        ({"voice": 1}, "voice"),
        ({"seed": SEED + 1}, "seed"),
        ({"temperature": 0.1}, "settings"),
        ({"pause_s": 0.3}, "settings"),
        ({"max_seconds": 1000}, "settings"),
    ],
)
def test_another_run_is_not_resumed(
    warble: Warble, whole: Speech, tmp_path: Path, changed: dict[str, object], name: str
) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (1, 1))
    before = journal_of(out).read_bytes(), part_of(out).read_bytes()
    with pytest.raises(WarbleError, match=f"cannot be resumed: {name} (is|are) not as before"):
        tell(warble, out, resume=True, **changed)
    assert (journal_of(out).read_bytes(), part_of(out).read_bytes()) == before
    tell(warble, out, resume=True, retry=2)  # does not change what is spoken
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


def test_another_model_is_not_resumed(
    warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (1, 1))
    monkeypatch.setattr(warble, "dtype", "float16")
    with pytest.raises(WarbleError, match="model is not as before"):
        tell(warble, out, resume=True)


def test_an_unfinished_run_is_not_overwritten(warble: Warble, tmp_path: Path) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (1, 1))
    before = part_of(out).read_bytes()
    with pytest.raises(WarbleError, match="--resume"):
        tell(warble, out)
    assert part_of(out).read_bytes() == before
    assert journal_of(out).exists()


def test_nothing_to_resume(warble: Warble, tmp_path: Path) -> None:
    out = tmp_path / "book.wav"
    with pytest.raises(WarbleError, match="nothing to resume"):
        tell(warble, out, resume=True)
    out.write_bytes(b"")
    with pytest.raises(WarbleError, match="may be finished"):
        tell(warble, out, resume=True)


@pytest.mark.parametrize("damage", [b"", b"what\n", b"{}\n", b'{"version": 99, "seed": 1}\n'])
def test_a_damaged_journal_is_told(warble: Warble, tmp_path: Path, damage: bytes) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (1, 1))
    journal_of(out).write_bytes(damage)
    with pytest.raises(WarbleError, match="no journal"):
        tell(warble, out, resume=True)


def test_a_part_that_is_too_short_or_gone_is_told(warble: Warble, tmp_path: Path) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (2, 1))
    with soundfile.SoundFile(part_of(out), "r+") as file:
        file.truncate(100)
    with pytest.raises(WarbleError, match="holds 100 samples"):
        tell(warble, out, resume=True)
    part_of(out).unlink()
    with pytest.raises(WarbleError, match=r"nothing to resume: .*book\.wav\.part does not exist"):
        tell(warble, out, resume=True)
    tell(warble, out)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("suffix", ["flac", "mp3", "ogg"])
def test_other_formats_are_made_at_the_end(
    warble: Warble, whole: Speech, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / f"book.{suffix}"
    stop(warble, out, (2, 1))
    tell(warble, out, resume=True)
    assert soundfile.info(out).format == {"ogg": "OGG", "flac": "FLAC", "mp3": "MP3"}[suffix]
    heard, rate = soundfile.read(out, dtype="float32")
    assert rate == 44_100
    assert abs(len(heard) - len(whole.samples)) < 4000
    assert np.abs(heard).max() < 1
    if suffix == "flac":
        assert np.array_equal(pcm(out), as_pcm(whole.samples))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_a_peak_above_the_limit_lowers_the_whole(tmp_path: Path, suffix: str) -> None:
    part, out = tmp_path / "x.part", tmp_path / f"x.{suffix}"
    wave = np.linspace(-1, 1, 600_000).astype(np.float32)  # more than a block
    soundfile.write(part, wave, 44_100, format="WAV", subtype="PCM_16")
    finish(part, out, suffix, 1.0)
    heard = soundfile.read(out, dtype="float32")[0]
    assert np.abs(heard - wave * PEAK_LIMIT).max() < 2 / 32768
    assert np.abs(heard).max() <= PEAK_LIMIT + 2**-15
    assert list(tmp_path.iterdir()) == [out]


def test_a_book_too_large_for_a_riff_header(
    warble: Warble, whole: Speech, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warble_mlx.narration._RIFF_LIMIT", 1000)
    out = tmp_path / "book.wav"
    stop(warble, out, (2, 1))
    tell(warble, out, resume=True)
    assert soundfile.info(out).format == "RF64"
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


def test_cut_speech_waits_for_a_decision(
    warble: Warble, whole: Speech, loaded: tuple[Warble, list[Request]], tmp_path: Path
) -> None:
    out = tmp_path / "book.wav"
    told: list[str] = []
    speech, kept = narrate_text(
        warble, TEXT, out, resume=False, seed=SEED, max_seconds=1.5, tell=told.append
    )
    assert not kept
    assert speech.finish_reason == "length"
    assert not out.exists()
    assert "--resume --allow-truncated" in told[0]
    loaded[1].clear()
    _, kept = narrate_text(
        warble, TEXT, out, resume=True, seed=SEED, max_seconds=1.5, keep_cut=True
    )
    assert kept
    assert not loaded[1]  # nothing is spoken twice
    assert len(pcm(out)) <= 1.5 * 44_100 + 2048
    assert list(tmp_path.iterdir()) == [out]


def test_samples_that_are_no_audio_reach_no_file(
    warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warble_mlx.narration

    def broken(_samples: np.ndarray) -> np.ndarray:
        raise AudioError("not finite")

    monkeypatch.setattr(warble_mlx.narration, "checked", broken)
    with pytest.raises(AudioError, match="not finite"):
        tell(warble, tmp_path / "book.wav")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told(
    warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "book.wav"
    stop(warble, out, (2, 1))

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AudioError, match=r"book.wav cannot be written: No space left"):
        tell(warble, out, resume=True)
    monkeypatch.undo()
    assert len(unfinished(out).entries) >= 2


def test_a_full_disk_that_the_audio_library_does_not_name_is_told(
    warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise soundfile.LibsndfileError(2)  # "System error."

    monkeypatch.setattr(soundfile.SoundFile, "write", fail)
    with pytest.raises(AudioError, match="System error"):
        tell(warble, tmp_path / "book.wav")
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(AudioError, match=r"book.wav cannot be written: No space left"):
        tell(warble, tmp_path / "book.wav")


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_write_one_file(
    warble: Warble, whole: Speech, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    out = tmp_path / "book.wav"
    refused: list[str] = []

    def other(_stopper: Stopper, number: int, frame: int, _request: Request) -> None:
        if (number, frame) == (1, 2):
            with pytest.raises(WarbleError) as raised:
                tell(warble, out, resume=resume)
            refused.append(str(raised.value))

    monkeypatch.setattr(Stopper, "__call__", other)
    tell(warble, out)
    assert len(refused) == 1
    assert "by another run just now" in refused[0]
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


def test_a_piece_that_is_no_speech_is_tried_with_other_seeds(
    book: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ill = True  # with `--resume` alone it would be so again, having the same seed

    def ill(_stopper: Stopper, number: int, _frame: int, _request: Request) -> None:
        if is_ill and number >= 2:
            raise SickError("too-short", "seen", "cause", "try another seed")

    monkeypatch.setattr(Stopper, "__call__", ill)
    out = book.with_name("book.wav")
    line = ["-f", str(book), "-o", str(out)]
    assert cli.main(line) == 4
    assert "with --resume --retry 3 goes on" in capfd.readouterr().err
    is_ill = False
    assert cli.main([*line, "--resume", "--retry", "3"]) == 0


def test_the_bar_counts_pieces_seconds_and_speed(warble: Warble, tmp_path: Path) -> None:
    bar = io.StringIO()
    tell(warble, tmp_path / "book.wav", bar=bar)
    drawn = bar.getvalue()
    assert f"0/{PIECES} pieces, 0 s of audio" in drawn
    assert f"{PIECES}/{PIECES} pieces" in drawn
    assert "RTF" in drawn
    assert "left" in drawn


def test_a_plan_can_be_narrated_with_a_reference_of_its_own(
    warble: Warble, loaded: tuple[Warble, list[Request]], tmp_path: Path
) -> None:
    """Without a voice the first piece is the reference, also after a stop."""
    plan = replace(warble.plan(TEXT, seed=SEED), speaker="")
    once, twice = tmp_path / "once.wav", tmp_path / "twice.wav"
    narrate(warble, plan, once)
    prefix = loaded[1][PIECES - 1].prompt.prefix
    loaded[1].clear()
    STOPPER.at = (2, 2)
    with pytest.raises(Stop):
        narrate(warble, plan, twice)
    STOPPER.at = None
    loaded[1].clear()
    narrate(warble, plan, twice, earlier=unfinished(twice))
    assert np.array_equal(loaded[1][-1].prompt.prefix, prefix)
    assert once.read_bytes() == twice.read_bytes()


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def book(warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(vars(warble_mlx), "load", lambda *_args, **_options: warble)
    monkeypatch.setattr(cli_say, "LONG_TEXT", 20)
    path = tmp_path / "book.txt"
    path.write_text(TEXT, "utf-8")
    return path


def test_a_book_from_the_command_line(
    book: Path, whole: Speech, capfd: pytest.CaptureFixture[str]
) -> None:
    out = book.with_name("book.wav")
    line = ["-f", str(book), "-o", str(out), "--seed", str(SEED), "--json"]
    assert cli.main(line) == 0
    facts = json.loads(capfd.readouterr().out)
    assert [piece["text"] for piece in facts["pieces"]] == [p.text for p in whole.pieces]
    assert {piece["finish_reason"] for piece in facts["pieces"]} == {"stop"}
    assert facts["seconds"] == whole.seconds
    assert np.array_equal(pcm(out), as_pcm(whole.samples))


def test_ctrl_c_says_how_to_go_on(
    book: Path, whole: Speech, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Stop", KeyboardInterrupt)
    out = book.with_name("book.wav")
    STOPPER.at = (2, 4)
    line = ["-f", str(book), "-o", str(out), "--pause", "0.25"]
    assert cli.main([*line, "--seed", str(SEED)]) == 130
    STOPPER.at = None
    told = capfd.readouterr().err
    assert f"2 of {PIECES} pieces are kept in {part_of(out)}" in told
    assert "--resume" in told
    assert cli.main(line) == 2
    assert cli.main([*line, "--resume"]) == 0
    assert np.array_equal(pcm(out), as_pcm(whole.samples))
    assert f"seed {SEED}" in capfd.readouterr().err


def test_cut_speech_has_its_status(book: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = book.with_name("book.wav")
    line = ["-f", str(book), "-o", str(out), "--max-seconds", "1"]
    assert cli.main(line) == 3
    assert not out.exists()
    assert f"so {out} was not written" in capfd.readouterr().err
    assert cli.main([*line, "--resume", "--allow-truncated"]) == 0
    assert out.exists()
    capfd.readouterr()


@pytest.mark.parametrize("output", [[], ["-o", "-"]])
def test_resume_needs_a_file(
    book: Path, output: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-f", str(book), "--resume", *output]) == 2
    assert "--resume needs" in capfd.readouterr().err


KILLED = """
import os, signal, sys
import warble_mlx
from speaking import quick_warble
from warble_mlx import cli, cli_say

def kill(number, frame, request):
    if (number, frame) == (2, 7):
        os.kill(os.getpid(), signal.SIGKILL)

warble, _ = quick_warble(kill)
warble_mlx.load = lambda *a, **k: warble
cli_say.LONG_TEXT = 20
cli.main(sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no such signal")
def test_a_killed_book_is_resumed(book: Path, whole: Speech) -> None:
    out = book.with_name("book.wav")
    line = ["-f", str(book), "-o", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *line, "--seed", str(SEED)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert len(unfinished(out).entries) == 2
    assert cli.main([*line, "--resume"]) == 0
    assert np.array_equal(pcm(out), as_pcm(whole.samples))
    assert sorted(out.parent.iterdir()) == [book, out]
