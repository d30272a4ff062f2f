"""`warble voice`: voices made of clips, from the shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import warble_mlx
from warble_mlx import Warble, cli
from warble_mlx.hub import bundled_folder
from warble_mlx.voice_folder import (
    keep,
    voice_folder,
)
from warble_mlx.voices import read_voices

CLIP = Path(__file__).parent / "cases" / "ref" / "ref.flac"
SAID = "The old lighthouse keeper counted every passing ship before the fog."


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        status = cli.main(args)
        out, err = capfd.readouterr()
        return status, out, err

    return run


def test_from_a_clip_to_speech_by_command(run: Run, warble: Warble) -> None:
    about = ("--description", "a tale", "--language", "en")
    status, out, err = run("voice", "add", "anna", str(CLIP), "--text", SAID, *about)
    assert (status, out) == (0, "")
    assert "anna: 79 frames of 3.63 s at 44100 Hz" in err
    assert str(voice_folder() / "anna.safetensors") in err

    for command in (("voices",), ("voice", "list"), ("say", "-v", "?")):
        status, out, _ = run(*command)
        assert status == 0
        assert len(out.splitlines()) == len(read_voices(bundled_folder()).voices) + 1
        assert out.splitlines()[-1].split() == ["-", "anna", "en", "a", "tale", "(registered)"]
    rows = json.loads(run("voice", "list", "--json")[1])
    assert rows[-1] == {
        "id": None, "name": "anna", "language": "en", "description": "a tale", "default": False,
        "registered": True, "usable": True,
    }  # fmt: skip
    assert not any(row["registered"] for row in rows[:-1])

    shown = json.loads(run("voice", "show", "Anna", "--json")[1])
    assert (shown["transcript"], shown["frames"]) == (SAID, 79)
    assert f"transcript        {SAID}\n" in run("voice", "show", "anna")[1]

    wanted = warble.say("Yes.", voice="anna", seed=1)
    path = str(voice_folder() / "anna.safetensors")
    status, out, err = run("Yes.", "-v", path, "-o", "x.wav", "--seed", "1", "--json")
    assert status == 0, err
    facts = json.loads(out)
    assert (facts["voice"], facts["frames"]) == ("anna", wanted.codes.shape[1])

    status, _, err = run("voice", "add", "Anna", str(CLIP), "--text", SAID)
    assert status == 2
    assert "already" in err

    assert run("voice", "remove", "anna")[0] == 0
    assert list(voice_folder().iterdir()) == []
    for command in ("remove", "show"):
        status, _, err = run("voice", command, "anna")
        assert status == 2
        assert "no voice 'anna' is registered" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("anna", str(CLIP)), "--text"),
        (("anna", str(CLIP), "--text", ""), "reference-text-required"),
        (("anna", str(CLIP), "--text", "No."), "transcript-too-short-for-clip"),
        (("anna", "none.wav", "--text", SAID), "reference-unreadable"),
        (("../anna", str(CLIP), "--text", SAID), "cannot name a voice"),
        (("Robin", str(CLIP), "--text", SAID), "of the model itself"),
        (("anna", str(CLIP), "--text", SAID, "--clip-seconds", "2"), "is not A:B"),
        (("anna", str(CLIP), "--text", SAID, "--clip-seconds", "3:2"), "to a later end"),
        (("anna", str(CLIP), "--text", SAID, "--clip-seconds", "2:9"), "no part from 2 s"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], words: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setitem(vars(warble_mlx), "load", load)
    status, out, err = run("voice", "add", *args)
    assert (status, out) == (2, "")
    assert words in err
    assert not voice_folder().exists()


def test_a_part_of_a_clip_is_chosen_by_option(run: Run) -> None:
    part = ("--clip-seconds", "0:2", "--text", "The old lighthouse keeper counted every")
    status, _, err = run("voice", "add", "anna", str(CLIP), *part)
    assert status == 0, err
    assert "44 frames of 2.00 s" in err
    said = ("--ref-audio", str(CLIP), "--ref-text", part[3], *part[:2])
    status, out, err = run("Yes.", *said, "-o", "x.wav", "--seed", "1", "--json")
    assert status == 0, err
    frames = json.loads(out)["frames"]
    assert run("Yes.", "-v", "anna", "-o", "y.wav", "--seed", "1")[0] == 0
    assert Path("x.wav").read_bytes() == Path("y.wav").read_bytes()
    assert frames > 0
    status, _, err = run("Yes.", "--clip-seconds", "0:2")
    assert status == 2
    assert "needs --ref-audio" in err


def test_doubts_are_told_once(run: Run) -> None:
    few = ("--ref-audio", str(CLIP), "--ref-text", "The old lighthouse.")
    status, _, err = run("Yes.", *few, "-o", "x.wav", "--seed", "1", "--max-seconds", "1",
                         "--allow-truncated")  # fmt: skip
    assert status == 0, err
    assert err.count("transcript-too-short-for-clip") == 1


def test_voices_of_another_codec_are_marked(run: Run, warble: Warble) -> None:
    voice = warble.register(CLIP, SAID, "Anna")
    keep(replace(voice, codec=replace(voice.codec, sha256="0" * 64)))
    (voice_folder() / "Bert.safetensors").write_bytes(b"nothing")
    status, out, err = run("voices")
    assert status == 0
    assert "(registered, for another codec)" in out
    assert "Bert.safetensors" in err


def test_words_after_voice_that_are_no_command_are_spoken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken: list[str] = []

    class Stop(Exception):
        pass

    def load(*_: object, **__: object) -> None:
        raise Stop

    monkeypatch.setitem(vars(warble_mlx), "load", load)
    monkeypatch.setattr(
        "warble_mlx.cli_say.read_text", lambda ctx, text, file: spoken.append(" ".join(text))
    )
    run("voice", "of", "reason", "-o", "x.wav")
    assert spoken == ["voice of reason"]
    assert "Make, show and remove" in "".join(run("voice", "--help")[1:])
    assert "Make, show and remove" in "".join(run("voice")[1:])
