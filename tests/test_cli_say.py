"""`warble say` with a stand-in for the model: the text, the reference, what comes out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from command_line import FRAMES, FakeWarble, Run, Terminal
from loudspeaker import Loudspeaker

from warble_mlx import player
from warble_mlx.cli_say import figures
from warble_mlx.reading import Piece

CLIPS = Path(__file__).parent / "cases" / "ref"
SAID = "The old lighthouse keeper counted every passing ship before the fog."


def test_packed_weights_are_unpacked_on_request(fake: FakeWarble, run: Run) -> None:
    assert run("Hello there.", "-o", "x.wav").status == 0
    assert not fake.dequantized
    assert run("Hello there.", "-o", "y.wav", "--dequantize").status == 0
    assert fake.dequantized


# ---------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("args", [(), ("say",), ("-",), ("say", "-"), ("-f", "-")])
def test_text_from_stdin(fake: FakeWarble, run: Run, args: tuple[str, ...]) -> None:
    result = run(*args, *(("-o", "x.wav") if args else ()), stdin="Grüße.\n".encode())
    assert result.status == 0
    assert fake.asked["text"] == "Grüße.\n"


def test_text_from_a_file_with_a_byte_order_mark(fake: FakeWarble, run: Run) -> None:
    Path("text.txt").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.")
    assert run("-f", "text.txt", "-o", "x.wav").status == 0
    assert fake.asked["text"] == "One.\r\nTwo."


@pytest.mark.parametrize("how", ["file", "stdin"])
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("Grüße".encode("latin-1"), "not UTF-8 (byte 2 is 0xfc)"),
        ("Hi".encode("utf-16"), "UTF-16, not UTF-8"),
        (b"", "nothing to say"),
        (b" \n\t ", "nothing to say"),
        (b"\xef\xbb\xbf", "nothing to say"),
    ],
)
def test_text_that_is_none(fake: FakeWarble, run: Run, how: str, raw: bytes, words: str) -> None:
    Path("text.txt").write_bytes(raw)
    result = run("-f", "text.txt") if how == "file" else run("say", stdin=raw)
    assert result.status == 2
    assert words in result.err
    assert not fake.loaded
    assert not Path("warble.wav").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("say",), "no text"),
        (("say", ""), "nothing to say"),
        (("say", " \t "), "nothing to say"),
        (("say", "bad \udcff byte"), "not UTF-8"),
        (("say", "-f", "no.txt"), "no.txt cannot be read: No such file"),
        (("say", "-f", "."), "cannot be read: Is a directory"),
        (("say", "Hi", "-f", "no.txt"), "either TEXT or --file"),
    ],
)
def test_wrong_text_arguments(
    fake: FakeWarble, run: Run, args: tuple[str, ...], words: str
) -> None:
    result = run(*args)
    assert result.status == 2
    assert words in result.err
    assert not fake.loaded


def test_a_bad_value_from_the_environment_names_its_variable(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARBLE_TOP_P", "2")
    assert "from 0 to 1, not 2 (set in the environment as WARBLE_TOP_P)" in run("say", "Hi").err
    assert "environment" not in run("say", "--top-p", "3", "Hi").err


# ------------------------------------------------------------------------------- the reference


def test_reference_clip_and_transcript(fake: FakeWarble, run: Run) -> None:
    clip = str(CLIPS / "ref.flac")
    assert run("Hi", "-o", "x.wav", "--ref-audio", clip, "--ref-text", SAID).status == 0
    assert (fake.asked["ref_audio"], fake.asked["ref_text"]) == (clip, SAID)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ref-audio", str(CLIPS / "ref.flac")), "go together"),
        (("--ref-text", "The old."), "go together"),
        (("--ref-audio", "no.wav", "--ref-text", "x"), "reference-unreadable"),
        (("--ref-audio", str(CLIPS / "ref_short_0p2s.wav"), "--ref-text", "x"), "too-short"),
        (("--ref-audio", str(CLIPS / "ref.flac"), "--ref-text", "x"), "transcript-too-short"),
        (("--ref-audio", str(CLIPS / "ref.flac"), "--ref-text", ""), "reference-text-required"),
        (("-v", "1", "--ref-audio", str(CLIPS / "ref.flac"), "--ref-text", "x"), "not both"),
    ],
)
def test_wrong_reference_stops_before_loading(
    fake: FakeWarble, run: Run, args: tuple[str, ...], words: str
) -> None:
    result = run("Hi", *args)
    assert result.status == 2
    assert words in result.err
    assert not fake.loaded


def test_doubts_about_a_clip_are_told_and_it_is_used(fake: FakeWarble, run: Run) -> None:
    clip = str(CLIPS / "ref_8k_u8.wav")
    result = run("Hi", "-o", "x.wav", "--ref-audio", clip, "--ref-text", SAID)
    assert result.status == 0
    assert "warble: warning: the clip" in result.err
    assert "low-bandwidth" in result.err
    assert fake.asked["ref_audio"] == clip


def test_clip_beats_a_voice_from_the_environment(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARBLE_VOICE", "silas")
    clip = str(CLIPS / "ref.flac")
    assert run("Hi", "-o", "x.wav", "--ref-audio", clip, "--ref-text", SAID).status == 0
    assert fake.asked["voice"] is None


# ---------------------------------------------------------------------------------- the output


@pytest.mark.parametrize("name", ["x.wav", "x.flac", "x.mp3", "x.ogg"])
def test_suffix_gives_the_format(fake: FakeWarble, run: Run, name: str) -> None:
    result = run("Hi", "-o", name)
    assert result.status == 0
    info = soundfile.info(name)
    assert info.format == name[2:].upper()
    assert info.frames == FRAMES * 2048


@pytest.mark.parametrize(
    ("pieces", "retries", "end"),
    [(1, 0, "seed 1234"), (1, 2, "attempt 3"), (850, 1, ", 1 retry"), (850, 3, ", 3 retries")],
)
def test_retries_of_a_long_text_are_no_attempt_of_one_piece(
    pieces: int, retries: int, end: str
) -> None:
    piece = Piece("Hi.", 1234, "stop", (0, 10), (0, 1))
    said = replace(FakeWarble().say("Hi."), retries=retries, pieces=(piece,) * pieces)
    assert figures(said).endswith(end)


def test_one_line_of_figures_on_stderr(fake: FakeWarble, run: Run) -> None:
    result = run("Hi", "-o", "hello.wav")
    assert result.out == b""
    assert result.err == (
        "2.00 s of speech in 1.10 s (RTF 0.55), first audio 320 ms, stop, seed 1234 -> hello.wav\n"
    )


def test_bundled_voice_tells_how_to_get_the_full_model(fake: FakeWarble, run: Run) -> None:
    fake.is_bundled = True
    figures, voice = run("Hi", "-o", "x.wav").err.splitlines()
    assert figures.endswith("-> x.wav")
    assert fake.name in voice
    assert "warble say -m scrappylabsai/warble" in voice


def test_stdout_gets_a_whole_wav_and_nothing_else(fake: FakeWarble, run: Run) -> None:
    result = run("Hi", "-o", "-")
    assert result.status == 0
    with wave.open(io.BytesIO(result.out)) as file:
        assert file.getnframes() == FRAMES * 2048
    assert len(result.out) == 44 + 2 * FRAMES * 2048
    assert result.err.rstrip().endswith("-> stdout")
    assert not list(Path().iterdir())


def test_binary_data_is_not_thrown_at_a_terminal(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO()))
    result = run("Hi", "-o", "-")
    assert result.status == 2
    assert "redirect stdout" in result.err


def test_without_a_loudspeaker_a_file_is_written_and_named(fake: FakeWarble, run: Run) -> None:
    result = run("Hi")
    assert result.status == 0
    assert soundfile.info("warble.wav").frames == FRAMES * 2048
    assert result.err.count("warble.wav") == 2
    assert "warble.wav was written and nothing played: " in result.err
    assert 'pip install "warble-mlx[play]"' in result.err


def test_with_a_loudspeaker_it_is_played(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Loudspeaker(runs=True)
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    monkeypatch.setattr(player, "can_play", lambda: True)
    result = run("Hi")
    said = fake.say("Hi").samples
    # Zeros are pauses of the player, which cannot know how slow this machine is.
    assert np.array_equal(device.heard[device.heard != 0], said[said != 0])
    assert device.log == ["start", "close"]
    assert result.err.rstrip().endswith("-> loudspeaker")
    assert not Path("warble.wav").exists()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("x.aiff", ".wav, .flac, .mp3, .ogg"),
        ("speech", "no suffix"),
        ("no/where/x.wav", "no folder no/where"),
        (".", "is a folder"),
    ],
)
def test_wrong_output_stops_before_loading(
    fake: FakeWarble, run: Run, output: str, words: str
) -> None:
    result = run("Hi", "-o", output)
    assert result.status == 2
    assert words in result.err
    assert not fake.loaded


def test_json_is_one_object_on_stdout(fake: FakeWarble, run: Run) -> None:
    result = run("Hi “you”", "-o", "x.wav", "--json")
    assert result.out.count(b"\n") == 1
    assert json.loads(result.out) == {
        "text": "Hi “you”",
        "voice": "Silas",
        "model": fake.name,
        "bundled": False,
        "seconds": pytest.approx(FRAMES * 2048 / 44_100),
        "sample_rate": 44_100,
        "frames": FRAMES,
        "finish_reason": "stop",
        "seed": 1234,
        "retries": 0,
        "warnings": [],
        "pieces": [],
        "rtf": pytest.approx(1.1 / (FRAMES * 2048 / 44_100)),
        "timings": {"first_audio_s": 0.32, "generate_s": 0.9, "codec_s": 0.2, "total_s": 1.1},
        "output": "x.wav",
    }
    assert result.err.endswith("-> x.wav\n")


def test_json_and_audio_cannot_share_stdout(fake: FakeWarble, run: Run) -> None:
    result = run("Hi", "-o", "-", "--json")
    assert result.status == 2
    assert result.out == b""
    assert "both want stdout" in result.err
    assert not fake.loaded


@pytest.mark.parametrize("output", ["x.wav", "-"])
def test_cut_speech_is_not_kept(fake: FakeWarble, run: Run, output: str) -> None:
    fake.finish_reason = "length"
    result = run("Hi", "-o", output)
    assert result.status == 3
    assert result.out == b""
    assert not list(Path().iterdir())
    assert "cut after 2.00 s" in result.err
    assert "--max-seconds" in result.err
    assert "--allow-truncated" in result.err
    assert "->" not in result.err


def test_cut_speech_in_json(fake: FakeWarble, run: Run) -> None:
    fake.finish_reason = "length"
    result = run("Hi", "-o", "x.wav", "--json")
    facts = json.loads(result.out)
    assert (result.status, facts["finish_reason"], facts["output"]) == (3, "length", None)


def test_cut_speech_is_kept_on_request(fake: FakeWarble, run: Run) -> None:
    fake.finish_reason = "length"
    result = run("Hi", "-o", "x.wav", "--allow-truncated")
    assert result.status == 0
    assert soundfile.info("x.wav").frames == FRAMES * 2048
    assert ", length, seed 1234 -> x.wav" in result.err


def test_cut_speech_that_was_played_has_its_status(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.finish_reason = "length"
    monkeypatch.setitem(sys.modules, "sounddevice", Loudspeaker(runs=True))
    monkeypatch.setattr(player, "can_play", lambda: True)
    result = run("Hi")
    assert result.status == 3
    assert "before its end: allow more with --max-seconds, or accept it" in result.err
    assert run("Hi", "--allow-truncated").status == 0


def test_no_frames_are_no_speech(fake: FakeWarble, run: Run) -> None:
    fake.frames = 0
    result = run("Hi", "-o", "x.wav", "--json")
    assert result.status == 2
    assert "no samples" in result.err
    assert not list(Path().iterdir())


LONG_SPEECH = """
import sys, types, numpy as np, warble_mlx
from warble_mlx.results import Speech, Timings
codes = np.zeros((10, 1), np.int32)
s = Speech(np.zeros(2_000_000, np.float32), 44100, codes, "stop", 1, "Hi", None, "m",
           Timings(0, 0, 0, 0))
w = types.SimpleNamespace(say=lambda *a, **k: s, is_bundled=True, name="m")
warble_mlx.load = lambda *a, **k: w
from warble_mlx.cli import main
sys.exit(main(["say", "Hi", "-o", "-"]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_gets_every_byte(unbuffered: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LONG_SPEECH],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert len(done.stdout) == 44 + 2 * 2_000_000


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_has_gone_is_no_fuss(unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_SPEECH],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"RIFF"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert err == b""
