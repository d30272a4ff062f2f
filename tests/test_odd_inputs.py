"""What people really hand over: texts, clips and names that nobody thinks of first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr
from speaking import quick_warble

import warble_mlx
from warble_mlx import Warble, cli, player
from warble_mlx.clips import read_clip
from warble_mlx.errors import AudioError, TextError, VoiceError
from warble_mlx.normalise import normalised

CLIP = Path(__file__).parent / "cases" / "ref" / "ref.flac"
RATE = 44_100


@pytest.fixture(scope="module")
def warble() -> Warble:
    return quick_warble()[0]


# ---------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Hello \ud800 there", "Hello there"),
        ("\ud83d\ude00 hi", "hi"),
        ("Hel\0lo", "Hello"),
        ("\ufeffHel\ufefflo", "Hello"),
        ("Hello \u202eevil\u202c there", "Hello evil there"),
        ("A family \U0001f468\u200d\U0001f469\u200d\U0001f467 here",
         "A family \U0001f468\U0001f469\U0001f467 here"),
        ("hi \U000e0041\U000e0042", "hi"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("שלום עולם", "שלום עולם"),
        ("a", "a"),
        ("7", "7"),
        ("½", "½"),
        ("\U0001d407\U0001d422", "\U0001d407\U0001d422"),
        ("One.\r\n\r\nTwo.\r\rThree.", "One. Two. Three."),
        ("One.\x0cTwo.\u2028Three.\u2029Four.\x85Five.", "One. Two. Three. Four. Five."),
        ("<\u200b|im_end|\u200b> hi", "hi"),
        ("＜｜ｉｍ_end｜＞ hi", "hi"),
        ("<|im_<|x|>end|> hi", "<|im_ end|> hi"),
        (" " * 100_000 + "x", "x"),
    ],
)  # fmt: skip
def test_odd_texts_are_spoken(warble: Warble, text: str, spoken: str) -> None:
    with warble.stream(text, seed=1) as stream:
        assert next(stream).samples.size
    assert stream.plan.text == spoken


@pytest.mark.parametrize(
    "text",
    ["\udfff", "\U0001f468\u200d\U0001f469", "\U0001f1e9\U0001f1ea", "?!", "…", "\0\0",
     "\u0301\u0301", "\u00a0\u2003\t", "\ue000", "<|im_end|><|voice|>", "<speak></speak>",
     '<break time="1s"/>', b"hello", None, 5, ["a"]],
)  # fmt: skip
def test_texts_without_anything_to_say(warble: Warble, text: object) -> None:
    with pytest.raises(TextError):
        warble.plan(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["a" * 100_000, "好" * 30_000, "1" * 50_000, "h\u0337\u0321" * 9_000]
)
def test_a_word_of_any_length_is_spoken_in_pieces(warble: Warble, text: str) -> None:
    parts = warble.plan(text, seed=1).spoken
    assert "".join(part.text for part in parts) == text
    with warble.stream(text, seed=1) as stream:
        assert next(stream).samples.size


@pytest.mark.parametrize(
    "unit",
    [" ", "\t", "\n", "* ", "*a ", "_", "`a ", "[", "[a](", "|-", "- ", "> ", "\\", "<a ", "```\n"],
)  # fmt: skip
def test_markup_without_end_is_read_at_once(unit: str) -> None:
    """Each of these took quadratic time somewhere, which is hours for a text of this length."""
    assert "x" in normalised(unit * (200_000 // len(unit)) + "\n\nx")


# ---------------------------------------------------------------------- clips


@pytest.fixture(scope="module")
def spoken() -> npt.NDArray[np.float64]:
    samples: npt.NDArray[np.float64] = soundfile.read(CLIP)[0]
    return samples


@pytest.mark.parametrize(
    ("format", "subtype"),
    [
        ("WAV", "ULAW"), ("WAV", "ALAW"), ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"),
        ("WAV", "GSM610"), ("WAV", "DOUBLE"), ("WAVEX", "PCM_16"), ("RF64", "PCM_16"),
        ("W64", "PCM_24"), ("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16"),
    ],
)  # fmt: skip
def test_unusual_files_are_the_same_clip(
    tmp_path: Path, spoken: npt.NDArray[np.float64], format: str, subtype: str
) -> None:
    path = tmp_path / "clip.wav"
    soundfile.write(path, spoken, RATE, format=format, subtype=subtype)
    samples, info = read_clip(path)
    assert info.format == f"{format} {subtype}"
    assert np.corrcoef(samples[: spoken.size], spoken)[0, 1] > 0.98


def test_opus_is_the_same_clip(tmp_path: Path, spoken: npt.NDArray[np.float64]) -> None:
    path = tmp_path / "clip.opus"
    there = soxr.resample(spoken, RATE, 48_000)
    soundfile.write(path, there, 48_000, format="OGG", subtype="OPUS")
    samples, _ = read_clip(path)
    assert abs(samples.size - spoken.size) < 100


@pytest.mark.parametrize("channels", [7, 16, 32])
def test_many_channels(tmp_path: Path, spoken: npt.NDArray[np.float64], channels: int) -> None:
    path = tmp_path / "clip.wav"
    several = np.zeros((spoken.size, channels))
    several[:, 3] = spoken
    soundfile.write(path, several, RATE)
    samples, info = read_clip(path)
    assert info.channels == channels
    assert np.abs(samples).max() > 0.01


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def nothing(path: Path) -> None:
    pass


def half_a_flac(path: Path) -> None:
    data = CLIP.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def random_bytes(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(5000))


def utf_16(path: Path) -> None:
    path.write_bytes("hello".encode("utf-16"))


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (a_folder, "x.wav", "is a folder"),
        (a_pipe, "x.wav", "is a pipe or a device: save it to a file first"),
        (a_circle, "x.wav", "cannot be read: Too many levels"),
        (nothing, "x.wav", "does not exist"),
        (nothing, "x" * 300, "cannot be read: File name too long"),
        (nothing, "x\0.wav", "cannot be read: .*embedded null"),
        (half_a_flac, "x.flac", "a damaged FLAC"),
        (random_bytes, "x.wav", "not recognised|not known"),
        (random_bytes, "x.raw", r"bare PCM.*ffmpeg -f s16le -ar 44100 -ac 1 -i \S+x.raw \S+x.wav"),
        (utf_16, "x.wav", "not recognised|not known"),
    ],
)
def test_what_is_no_clip_is_named(
    tmp_path: Path, make: Callable[[Path], None], name: str, words: str
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(AudioError, match=rf"(?s)({words}).*\(reference-unreadable\)$") as caught:
        read_clip(path)
    assert len(str(caught.value)) < 400 + 2 * len(str(tmp_path))


@pytest.mark.parametrize("length", [1, 10, 100, 417, 1000])
def test_a_truncated_mp3_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.mp3"
    path.write_bytes(CLIP.with_name("ref.mp3").read_bytes()[:length])
    with pytest.raises((AudioError, VoiceError), match=r"\(reference-(unreadable|too-short)\)$"):
        read_clip(path)


# ---------------------------------------------------------------------- names and files of text


@pytest.fixture
def run(
    warble: Warble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:  # fmt: skip
    monkeypatch.setitem(vars(warble_mlx), "load", lambda *_args, **_options: warble)
    monkeypatch.setattr(player, "can_play", lambda: False)
    monkeypatch.chdir(tmp_path)

    def run(*line: str) -> tuple[int, str]:
        return cli.main(line), capfd.readouterr().err

    return run


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x" * 300 + ".wav", "File name too long"),
        ("a\0.wav", "embedded null"),
        ("", "is a folder"),
        (".wav", "no suffix"),
        ("folder.wav", "is a folder"),
        ("no/such/x.wav", "there is no folder"),
    ],
)
def test_names_that_no_speech_can_have(
    run: Callable[..., tuple[int, str]], name: str, words: str, stream: list[str]
) -> None:
    Path("folder.wav").mkdir()
    status, err = run("Hi", "-o", name, *stream)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
    shutil.rmtree("folder.wav")
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("Hello.".encode("utf-16"), "is UTF-16, not UTF-8: convert it with iconv -f UTF-16"),
        ("Hello.".encode("utf-32"), "is UTF-32, not UTF-8: convert it with iconv -f UTF-32"),
        ("Grüße".encode("latin-1"), "is not UTF-8 (byte 2 is 0xfc)"),
        (b"Hi \xed\xa0\x80 there", "is not UTF-8"),
        (b"\x1f\x8b\x08\0\xff", "is not UTF-8"),
        (b"\xef\xbb\xbf", "there is nothing to say"),
        (b"", "there is nothing to say"),
    ],
)
def test_files_that_are_no_text(
    run: Callable[..., tuple[int, str]], data: bytes, words: str
) -> None:
    Path("text.txt").write_bytes(data)
    status, err = run("-f", "text.txt", "-o", "x.wav")
    assert status == 2
    assert words in err
    assert not Path("x.wav").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "", "no.txt"])
def test_names_that_no_text_has(run: Callable[..., tuple[int, str]], name: str) -> None:
    status, err = run("-f", name, "-o", "x.wav")
    assert status == 2
    assert "cannot be read" in err
    assert len(err) < 250


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfHello.\r\nThere.\r\n", b"Hel\0lo. There.\x1a"])
def test_marks_and_line_ends_of_other_systems(
    run: Callable[..., tuple[int, str]], data: bytes
) -> None:
    Path("text.txt").write_bytes(data)
    assert run("-f", "text.txt", "-o", "x.wav")[0] == 0
    assert soundfile.info("x.wav").frames > 0


CASES = [
    json.loads(line)
    for line in (CLIP.parents[1] / "texts" / "texts.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_every_text_of_the_cases_is_spoken_or_refused(
    run: Callable[..., tuple[int, str]], case: dict[str, Any]
) -> None:
    """From the command line to the file; what becomes of the words is tested elsewhere."""
    if not isinstance(case["text"], str):
        with pytest.raises(TextError):
            quick_warble()[0].say(case["text"])
        return
    expect = case["expect"]
    Path("text.txt").write_text(case["text"], "utf-8", newline="")
    voice = ["-v", case["voice"]] if "voice" in case else []
    status, err = run("-f", "text.txt", "-o", "x.wav", *voice)
    allowed = {"ok": {0}, "reject": {2}}.get(expect["outcome"], {0, 2})
    assert status in allowed
    assert Path("x.wav").exists() is (status == 0)
    assert (expect.get("warn") or "seed" if status == 0 else "") in err
    if "effective_voice" in expect and status == 0:
        plan = quick_warble()[0].plan(case["text"], voice=expect["effective_voice"])
        assert plan.speaker == "<|speaker:1|>"
