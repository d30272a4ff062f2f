"""The command line, with a stand-in for the model: commands, options, errors, imports."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from command_line import FRAMES, FakeWarble, Run

import warble_mlx
import warble_mlx.convert
from warble_mlx import cli
from warble_mlx.errors import VoiceError

HEAVY = {"mlx", "numpy", "soundfile", "soxr", "huggingface_hub", "tokenizers", "msgspec", "tqdm"}
NEVER = {"torch", "transformers", "mlx_lm", "coremltools", "scipy", "librosa", "pydantic"}


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
    own = {"WARBLE_VOICES": "WARBLE_EXPORT_VOICES"}  # the folder of registered voices has the name
    for name, command in cli.warble.commands.items():
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:  # type: ignore[attr-defined]
                long = next(o for o in param.opts if o.startswith("--"))
                expected = "WARBLE_" + long[2:].replace("-", "_").upper()
                assert param.envvar == own.get(expected, expected), (name, long)


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
