"""The command line, with a stand-in for the model: what it is asked, and what becomes of it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from loudspeaker import Loudspeaker

import warble_mlx
import warble_mlx.convert
from warble_mlx import cli, hub, player, speech_check
from warble_mlx.errors import CheckpointError, HubError, SickError, VoiceError
from warble_mlx.model_files import BUNDLE_MARK
from warble_mlx.reading import Chunk
from warble_mlx.results import Speech, Timings

CLIPS = Path(__file__).parent / "cases" / "ref"
SAID = "The old lighthouse keeper counted every passing ship before the fog."
FRAMES = 43
HEAVY = {"mlx", "numpy", "soundfile", "soxr", "huggingface_hub", "tokenizers", "msgspec", "tqdm"}
NEVER = {"torch", "transformers", "mlx_lm", "coremltools", "scipy", "librosa", "pydantic"}


class FakeStream:
    """Says in chunks what was said as a whole."""

    def __init__(self, speech: Speech) -> None:
        self.speech = speech
        self.plan = SimpleNamespace(slowest_s=9.0, burst_s=lambda _rate: 0.8)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Chunk]:
        for part in np.array_split(self.speech.samples, 5):
            yield Chunk(part, 0, 0)


class FakeWarble:
    """Speaks a tone of two seconds and keeps what it was asked."""

    def __init__(self) -> None:
        self.name = 'voice pack "Test"'
        self.is_bundled = False
        self.sample_rate = 44_100
        self.config = SimpleNamespace(frame_rate_hz=21.53)
        self.loaded: list[tuple[Any, bool]] = []
        self.said: list[dict[str, Any]] = []
        self.finish_reason = "stop"
        self.frames = FRAMES
        self.error: BaseException | None = None
        self.dequantized = False

    def load(
        self,
        model: Any = None,
        *,
        dtype: Any = None,
        offline: bool = False,
        dequantize: bool = False,
    ) -> FakeWarble:
        self.dequantized = dequantize
        self.loaded.append((model, offline))
        return self

    def say(self, text: str, **options: Any) -> Speech:
        self.said.append({"text": text, **options})
        if self.error:
            raise self.error
        length = self.frames * 2048
        return Speech(
            samples=(0.5 * np.sin(np.arange(length) / 20)).astype(np.float32),
            sample_rate=44_100,
            codes=np.ones((10, self.frames), np.int32),
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            seed=1234 if options.get("seed") is None else options["seed"],
            text=text.strip(),
            voice="Silas",
            model=self.name,
            timings=Timings(0.32 if self.frames else float("nan"), 0.9, 0.2, 1.1),
        )

    def stream(self, text: str, **options: Any) -> FakeStream:
        return FakeStream(self.say(text, **options))

    @property
    def asked(self) -> dict[str, Any]:
        (said,) = self.said
        return said


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWarble:
    fake = FakeWarble()
    # The name is imported on first use, so it may not be there yet: the dictionary, not the object.
    monkeypatch.setitem(vars(warble_mlx), "load", fake.load)
    monkeypatch.setattr(player, "can_play", lambda: False)
    monkeypatch.chdir(tmp_path)
    return fake


class Result(SimpleNamespace):
    status: int
    out: bytes
    err: str


Run = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*args: str, stdin: bytes | None = None) -> Result:
        """Run the command line; without `stdin` a person sits at the keyboard."""
        kind = Terminal if stdin is None else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin or b"")))
        status = cli.main(args)
        out, err = capfdbinary.readouterr()
        return Result(status=status, out=out, err=err.decode())

    return run


def test_packed_weights_are_unpacked_on_request(fake: FakeWarble, run: Run) -> None:
    assert run("Hello there.", "-o", "x.wav").status == 0
    assert not fake.dequantized
    assert run("Hello there.", "-o", "y.wav", "--dequantize").status == 0
    assert fake.dequantized


# ------------------------------------------------------------------------ the default command


@pytest.mark.parametrize(
    "args",
    [
        ("say", "Hello there.", "-o", "x.wav"),
        ("Hello there.", "-o", "x.wav"),
        ("-o", "x.wav", "Hello there."),
        ("-o", "x.wav", "--", "Hello there."),
        ("Hello", "there.", "-o", "x.wav"),
        ("Hello", "-o", "x.wav", "there."),
        ("say", "--output=x.wav", "Hello", "there."),
    ],
)
def test_text_needs_no_command(fake: FakeWarble, run: Run, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.status == 0
    assert fake.asked["text"] == "Hello there."
    assert soundfile.info("x.wav").frames == FRAMES * 2048
    assert result.out == b""


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (("voicse",), "voice"),
        (("voicess",), "voices"),
        (("doctro", "--json"), "doctor"),
        (("convrt", "./a", "./b"), "convert"),
    ],
)
def test_mistyped_command_is_not_spoken(
    fake: FakeWarble, run: Run, args: tuple[str, ...], meant: str
) -> None:
    result = run(*args)
    assert result.status == 2
    assert f"did you mean: warble {meant}?" in result.err
    assert f"warble say {args[0]}" in result.err
    assert not fake.loaded


def test_command_after_options_is_not_spoken(fake: FakeWarble, run: Run) -> None:
    result = run("--offline", "voices")
    assert result.status == 2
    assert "a command comes first: warble voices" in result.err
    assert not fake.loaded


@pytest.mark.parametrize(
    "args",
    [("say", "voicse"), ("voice", "of", "reason"), ("Hello",), ("voicse, please",), ("help", "me")],
)
def test_what_is_text_is_spoken(fake: FakeWarble, run: Run, args: tuple[str, ...]) -> None:
    assert run(*args, "-o", "x.wav").status == 0
    assert fake.asked["text"] == " ".join(args).removeprefix("say ")


def test_no_arguments_at_a_terminal_show_the_help(fake: FakeWarble, run: Run) -> None:
    result = run()
    assert result.status == 0
    assert b"Usage: warble" in result.out


@pytest.mark.parametrize(
    ("args", "usage"), [(("help",), b"warble [OPTIONS]"), (("help", "voices"), b"warble voices")]
)
def test_help_is_a_word_for_the_help(
    fake: FakeWarble, run: Run, args: tuple[str, ...], usage: bytes
) -> None:
    result = run(*args)
    assert result.status == 0
    assert b"Usage: " + usage in result.out
    assert not fake.loaded


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


# -------------------------------------------------------------------------------- the options


def test_options_reach_the_model(fake: FakeWarble, run: Run) -> None:
    options = "-m some/model --offline -v clara --seed 7 --temperature 0.5 --top-p 0.8 --top-k 20"
    result = run("say", *options.split(), "--max-seconds", "9.5", "-o", "x.wav", "Hi")
    assert result.status == 0
    assert fake.loaded == [("some/model", True)]
    assert fake.asked == {
        "text": "Hi",
        "voice": "clara",
        "ref_audio": None,
        "ref_text": None,
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 20,
        "greedy": False,
        "max_seconds": 9.5,
        "retry": 0,
        "normalise": False,
    }


def test_without_options_the_model_decides(fake: FakeWarble, run: Run) -> None:
    run("Hi", "-o", "x.wav")
    assert fake.loaded == [(None, False)]
    decided = {name: value for name, value in fake.asked.items() if name != "text"}
    assert (decided.pop("greedy"), decided.pop("normalise"), decided.pop("retry")) == (0, 0, 0)
    assert set(decided.values()) == {None}


def test_zero_is_zero(fake: FakeWarble, run: Run) -> None:
    run("Hi", "-o", "x.wav", "--seed", "0", "--temperature", "0", "--top-p", "0", "--top-k", "0")
    asked = fake.asked
    assert (asked["seed"], asked["temperature"], asked["top_p"], asked["top_k"]) == (0, 0, 0, 0)
    assert asked["greedy"] is True


def test_underscores_are_hyphens(fake: FakeWarble, run: Run) -> None:
    result = run("Hi", "-o", "x.wav", "--top_p", "0.5", "--max_seconds=3", "--allow_truncated")
    assert result.status == 0
    assert (fake.asked["top_p"], fake.asked["max_seconds"]) == (0.5, 3)


def test_every_option_has_an_environment_variable() -> None:
    for name, command in cli.warble.commands.items():
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:  # type: ignore[attr-defined]
                long = next(o for o in param.opts if o.startswith("--"))
                expected = "WARBLE_" + long[2:].replace("-", "_").upper()
                assert param.envvar == expected, (name, long)


def test_environment_sets_defaults_that_the_line_overrides(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SEED": "5", "VOICE": "pip", "TOP_P": "0.25", "OUTPUT": "e.flac"}.items():
        monkeypatch.setenv(f"WARBLE_{name}", value)
    assert run("Hi", "--seed", "6").status == 0
    assert (fake.asked["seed"], fake.asked["voice"], fake.asked["top_p"]) == (6, "pip", 0.25)
    assert soundfile.info("e.flac").format == "FLAC"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seed", "-1", "from 0 to 4294967295, not -1"),
        ("--seed", "4294967296", "from 0 to 4294967295"),
        ("--seed", "1.5", "'1.5' is not a whole number"),
        ("--temperature", "-0.1", "0 or more, not -0.1"),
        ("--temperature", "nan", "0 or more, not nan"),
        ("--temperature", "hot", "'hot' is not a number"),
        ("--top-p", "1.01", "from 0 to 1, not 1.01"),
        ("--top-k", "-3", "0 or more, not -3"),
        ("--max-seconds", "0", "more than 0, not 0"),
        ("--max-seconds", "inf", "more than 0, not inf"),
        ("--rate", "200", "no speed control"),
        ("-r", "200", "no speed control"),
        ("--speed", "1.5", "no speed control"),
        ("-a", "USB", "system's default output"),
    ],
)
def test_bad_values_are_told(
    fake: FakeWarble, run: Run, option: str, value: str, words: str
) -> None:
    result = run("say", option, value, "Hi")
    assert result.status == 2
    assert words in result.err
    assert option in result.err
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


# ------------------------------------------------------------------------------------- errors


def test_our_errors_are_one_line_and_status_2(fake: FakeWarble, run: Run) -> None:
    fake.error = VoiceError("no voice 'x'; this model has: Silas (1)")
    result = run("Hi", "-o", "x.wav")
    assert result.status == 2
    assert result.err == "warble: no voice 'x'; this model has: Silas (1)\n"
    assert not list(Path().iterdir())


def test_unexpected_errors_are_status_1(fake: FakeWarble, run: Run) -> None:
    fake.error = ZeroDivisionError("division by zero")
    result = run("Hi", "-o", "x.wav")
    assert result.status == 1
    assert result.err == (
        "warble: unexpected error: ZeroDivisionError: division by zero; --debug shows where\n"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a", None, "b"), "b: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "c"), "c: Read-only file system"),
    ],
)
def test_a_disk_that_refuses_is_no_defect(
    fake: FakeWarble, run: Run, error: OSError, told: str
) -> None:
    fake.error = error
    result = run("Hi", "-o", "x.wav")
    assert result.status == 2
    assert f"warble: {told}" in result.err


@pytest.mark.parametrize(
    ("redirection", "command", "status", "told"),
    [
        ("<&-", 'say "Hi." -o out.wav', 0, b"out.wav"),
        (">&-", "voices", 2, b"warble: stdout is closed"),
        ("2>&-", "voices", 0, b""),
    ],
)
def test_closed_standard_streams(
    tmp_path: Path, redirection: str, command: str, status: int, told: bytes
) -> None:
    """As some launchers start their programs."""
    line = f"exec {sys.executable} -m warble_mlx {command} {redirection}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    assert told in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout(unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "warble_mlx", "voices"], stdout=full, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "warble: stdout: No space left on device\n"


@pytest.mark.parametrize("error", [VoiceError("no voice"), ZeroDivisionError("zero")])
@pytest.mark.parametrize("by", ["option", "environment"])
def test_debug_shows_where(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, by: str
) -> None:
    fake.error = error
    monkeypatch.setenv("WARBLE_DEBUG", "1" if by == "environment" else "0")
    result = run("Hi", "-o", "x.wav", *(["--debug"] if by == "option" else []))
    assert "Traceback" in result.err
    assert "in say" in result.err
    assert result.status == (2 if isinstance(error, VoiceError) else 1)


def test_interrupt_is_status_130_and_leaves_nothing(fake: FakeWarble, run: Run) -> None:
    fake.error = KeyboardInterrupt()
    result = run("Hi", "-o", "x.wav")
    assert result.status == 130
    assert "interrupted" in result.err
    assert not list(Path().iterdir())


# ----------------------------------------------------------------------------- other commands


def model_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", BUNDLE_MARK):
        (path / name).write_text("{}")
    voices = [
        {"id": 1, "name": "Silas", "token": "<|speaker:1|>", "language": "en"},
        {"id": 3, "name": "Clara", "token": "<|speaker:3|>", "description": "clear"},
    ]
    (path / "voices.json").write_text(json.dumps({"default": 3, "voices": voices}))
    return path


@pytest.mark.parametrize("args", [("voices",), ("-v", "?"), ("say", "--voice", "?")])
def test_voices_are_listed_without_loading(
    fake: FakeWarble, run: Run, tmp_path: Path, args: tuple[str, ...]
) -> None:
    model_folder(tmp_path / "model")
    result = run(*args, "-m", "model")
    assert result.status == 0
    assert [line.split() for line in result.out.decode().splitlines()] == [
        ["1", "Silas", "en"],
        ["*", "3", "Clara", "clear"],
    ]
    assert not fake.loaded


def test_voices_as_json(fake: FakeWarble, run: Run, tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    listed = json.loads(run("voices", "-m", "model", "--json").out)
    assert [(v["id"], v["name"], v["default"]) for v in listed] == [
        (1, "Silas", False),
        (3, "Clara", True),
    ]


def test_model_without_named_voices(fake: FakeWarble, run: Run, tmp_path: Path) -> None:
    (model_folder(tmp_path / "model") / "voices.json").unlink()
    result = run("voices", "-m", "model")
    assert result.out == b""
    assert "names no voices" in result.err


class Converted:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(warble_mlx.convert, "convert", self)
        monkeypatch.setattr(warble_mlx.convert, "format_report", lambda report: f"table {report}")

    def __call__(self, source: Path, out: Path, **options: Any) -> str:
        self.calls.append({"source": source, "out": out, **options})
        return "of sizes"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Converted:
    model_folder(tmp_path / "model")
    return Converted(monkeypatch)


def test_convert_prints_the_report_and_lets_the_result_speak(
    fake: FakeWarble, run: Run, converted: Converted, tmp_path: Path
) -> None:
    result = run("convert", "model", "out", "--codec-dtype", "bfloat16", "--force")
    assert result.status == 0
    assert result.out == b"table of sizes\n"
    (call,) = converted.calls
    assert call.pop("progress") is not None
    assert call == {
        "source": tmp_path / "model",
        "out": Path("out"),
        "codec_dtype": "bfloat16",
        "force": True,
        "source_id": None,
        "revision": None,
    }
    assert fake.loaded == [("out", True)]
    assert fake.asked["text"] == speech_check.TEXT
    assert "check: 2.00 s of speech" in result.err


def test_convert_from_the_hub_passes_id_and_commit_on(
    fake: FakeWarble, run: Run, converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locate(model: str, *, offline: bool, revision: str | None) -> hub.Source:
        assert (model, offline, revision) == ("org/name", True, "v1")
        return hub.Source(Path("model"), "org/name", "c0ffee")

    monkeypatch.setattr(hub, "locate", locate)
    assert run("convert", "org/name", "out", "--offline", "--revision", "v1").status == 0
    assert converted.calls[0]["source_id"] == "org/name"
    assert converted.calls[0]["revision"] == "c0ffee"


@pytest.mark.parametrize(("finish", "frames"), [("length", FRAMES), ("stop", 0)])
def test_convert_fails_if_the_result_does_not_speak(
    fake: FakeWarble, run: Run, converted: Converted, finish: str, frames: int
) -> None:
    fake.finish_reason, fake.frames = finish, frames
    result = run("convert", "model", "out")
    assert result.status == 2
    assert "it does not speak" in result.err
    assert run("convert", "model", "out", "--no-check").status == 0


def test_convert_says_that_a_bundle_without_speech_is_there(
    fake: FakeWarble, run: Run, converted: Converted
) -> None:
    fake.error = SickError("too-long", "no end came", "it missed its end", "try another seed")
    result = run("convert", "model", "out")
    assert result.status == 2
    assert "out was written, but it does not speak: no end came; probably it missed" in result.err
    assert "dropped" not in result.err


def test_convert_passes_errors_on(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("unknown tensor x")

    model_folder(tmp_path / "model")
    monkeypatch.setattr(warble_mlx.convert, "convert", fail)
    result = run("convert", "model", "out")
    assert (result.status, result.err) == (2, "warble: unknown tensor x\n")
    result = run("convert", "./missing", "out")
    assert (result.status, result.err) == (2, "warble: there is no folder ./missing\n")


def test_inspect_wants_a_bundle(run: Run, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / BUNDLE_MARK).unlink()
    result = run("inspect", str(folder))
    assert result.status == 2
    assert f"warble convert {folder} OUT" in result.err


def test_failed_download_is_one_line(
    fake: FakeWarble, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise HubError("org/name is not in the cache and downloads are off")

    monkeypatch.setitem(vars(warble_mlx), "load", load)
    result = run("Hi", "-m", "org/name", "--offline", "-o", "x.wav")
    assert (result.status, result.err.count("\n")) == (2, 1)


# ---------------------------------------------------------------------------- imports and help


def modules_after(code: str) -> set[str]:
    """Top-level modules in a fresh process that has run `code`."""
    script = f"{code}\nimport sys\nprint('MODULES', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    listed = re.search(rb"^MODULES (.*)$", done.stderr, re.MULTILINE)
    assert listed
    return {name.partition(".")[0] for name in listed[1].decode().split()}


def test_import_is_light() -> None:
    assert not (HEAVY | NEVER) & modules_after("import warble_mlx")


@pytest.mark.parametrize("args", [["--help"], ["say", "--help"], ["--version"], ["convert", "-h"]])
def test_help_is_light(args: list[str]) -> None:
    loaded = modules_after(f"from warble_mlx.cli import main\nmain({args})")
    assert "click" in loaded
    assert not (HEAVY | NEVER) & loaded


def test_a_model_needs_no_foreign_framework() -> None:
    loaded = modules_after("import warble_mlx; warble_mlx.load")
    assert {"mlx", "numpy", "tokenizers"} <= loaded
    assert not NEVER & loaded


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "warble_mlx", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"warble, version {warble_mlx.__version__}\n"
