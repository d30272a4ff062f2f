"""Voices made of clips: the file, the folder, and speaking with them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warble_mlx
from warble_mlx import RegisteredVoice, Warble, staging
from warble_mlx.errors import CheckpointError, TextError, VoiceError
from warble_mlx.hub import bundled_folder
from warble_mlx.registered import Codec, check_name, read_voice
from warble_mlx.safetensors_file import write_safetensors
from warble_mlx.voice_folder import (
    find_registered,
    keep,
    registered_voices,
    remove,
    voice_folder,
)

CLIP = Path(__file__).parent / "cases" / "ref" / "ref.flac"
SAID = "The old lighthouse keeper counted every passing ship before the fog."


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


@pytest.fixture(scope="module")
def voice(warble: Warble) -> RegisteredVoice:
    return warble.register(CLIP, SAID, "Anna", description="a keeper's tale", language="en")


@pytest.fixture
def saved(voice: RegisteredVoice, tmp_path: Path) -> Path:
    return voice.save(tmp_path / "file.safetensors")


# ------------------------------------------------------------------------------------- the file


def test_a_file_holds_codes_and_facts_and_nothing_else(voice: RegisteredVoice, saved: Path) -> None:
    header, codes = raw(saved)
    metadata = header.pop("__metadata__")
    assert {name: entry["dtype"] for name, entry in header.items()} == {"codes": "I32"}
    assert np.array_equal(codes, voice.codes)
    assert codes.shape == (10, 79)
    provenance = json.loads((bundled_folder() / "config.json").read_text())["provenance"]
    assert metadata == {
        "format": "warble-voice",
        "format_version": "1",
        "name": "Anna",
        "transcript": SAID,
        "description": "a keeper's tale",
        "language": "en",
        "codec": "10 codebooks of 1024 and 1024, 2048 samples a frame at 44100 Hz",
        "codec_sha256": provenance["source_files"]["codec.safetensors"],
        "clip_seconds": "3.627",
        "clip_sample_rate": "44100",
        "made_by": f"warble-mlx {warble_mlx.__version__}",
    }
    assert b"ref.flac" not in saved.read_bytes()
    assert saved.stat().st_size < 5000
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_reading_gives_back_what_was_saved(voice: RegisteredVoice, saved: Path) -> None:
    found = read_voice(saved)
    assert np.array_equal(found.codes, voice.codes)
    rest = {k: v for k, v in vars(found).items() if k not in ("codes", "clip_seconds")}
    assert rest == {k: v for k, v in vars(voice).items() if k in rest}
    assert found.clip_seconds == pytest.approx(voice.clip_seconds, abs=1e-3)


def test_a_failed_save_leaves_the_old_file(
    voice: RegisteredVoice, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.os, "replace", full)
    with pytest.raises(VoiceError, match="No space left"):
        voice.save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_what_cannot_be_saved(voice: RegisteredVoice, tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match=r"\*\.safetensors"):
        voice.save(tmp_path / "voice.bin")
    with pytest.raises(VoiceError, match="cannot name a voice"):
        replace(voice, name="").save(tmp_path / "a.safetensors")
    with pytest.raises(VoiceError, match="cannot be written"):
        voice.save(tmp_path / "nowhere" / "a.safetensors")
    assert not list(tmp_path.iterdir())


DTYPES = {np.int32: "I32", np.int64: "I64", np.float32: "F32"}


def raw(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Header and codes of a voice file, without the product's own reader."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return header, np.frombuffer(data[8 + length :], "<i4").reshape(header["codes"]["shape"])


def rewritten(path: Path, codes: np.ndarray | None = None, **metadata: str | None) -> Path:
    """`path` with other codes or metadata; None removes an entry."""
    header, old = raw(path)
    known = {**header["__metadata__"], **metadata}
    kept = {key: value for key, value in known.items() if value is not None}
    new = old if codes is None else codes
    shape = {"codes": (DTYPES[new.dtype.type], new.shape)}
    write_safetensors(path, shape, lambda _: new, kept)
    return path


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format": None}, "is no voice file"),
        ({"format": "pt"}, "is no voice file"),
        ({"format_version": "2"}, "format '2', this version reads 1"),
        ({"name": "../../etc/passwd"}, "cannot name a voice"),
        ({"name": "12"}, "cannot name a voice"),
        ({"name": None}, "its name is missing"),
        ({"transcript": ""}, "nothing to say in the transcript"),
        ({"transcript": "a" * 2001}, "its transcript is missing, too long"),
        ({"description": "\x1b]0;title\x07"}, "its description is missing, too long or not plain"),
        ({"description": "a" * 501}, "501 characters"),
        ({"language": "en\u202e"}, "its language"),
        ({"language": "a b"}, "no language code"),
        ({"codec": None}, "its codec"),
        ({"codec_sha256": "abc"}, "make no sense"),
        ({"clip_seconds": "nan"}, "make no sense"),
        ({"clip_seconds": "long"}, "damaged voice file"),
        ({"clip_sample_rate": None}, "damaged voice file"),
        ({"made_by": "x\ny"}, "its made_by"),
    ],
)
def test_metadata_is_read_strictly(
    saved: Path, metadata: dict[str, str | None], words: str
) -> None:
    with pytest.raises(VoiceError, match=words) as caught:
        read_voice(rewritten(saved, **metadata))
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (np.zeros((10, 5), np.int64), "one int32 tensor"),
        (np.zeros((10, 5), np.float32), "one int32 tensor"),
        (np.zeros((9, 5), np.int32), r"shape \[9, 5\]"),
        (np.zeros(10, np.int32), r"shape \[10\]"),
        (np.zeros((10, 0), np.int32), "0 frames"),
        (np.zeros((10, 4097), np.int32), "4097 frames"),
        (np.zeros((10, 30_000), np.int32), "at most 1000000"),
        (np.full((10, 5), -1, np.int32), "0 or more"),
    ],
)
def test_codes_are_read_strictly(saved: Path, codes: np.ndarray, words: str) -> None:
    with pytest.raises(VoiceError, match=words) as caught:
        read_voice(rewritten(saved, codes))
    assert str(saved) in str(caught.value)


def is_refused_or_sound(path: Path) -> bool:
    """Whether a file with wrong bytes is named in a VoiceError, or still makes a voice."""
    try:
        found = read_voice(path)
    except VoiceError as error:
        return str(path) in str(error)
    return found.codes.shape == (10, 79)


def test_hostile_files_are_voice_errors(saved: Path, tmp_path: Path) -> None:
    good = saved.read_bytes()
    length = int.from_bytes(good[:8], "little")
    bad: dict[str, bytes] = {
        "empty": b"",
        "text": b"hello",
        "huge header": (1 << 60).to_bytes(8, "little") + good[8:],
        "cut": good[:-1],
        "longer": good + b"\0",
        "deep": (500_000).to_bytes(8, "little") + b'{"a":' + b"[" * 499_995,
        "not UTF-8": good[:8] + b'{"\xff' + good[11:],
        "overlap": good.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'),
    }
    assert len(set(bad.values())) == len(bad)
    for name, data in bad.items():
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data)
        with pytest.raises(VoiceError) as caught:
            read_voice(path)
        assert "bad.safetensors" in str(caught.value), name
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(good)
        for at in rng.integers(0, 8 + length, 3):
            data[at] = int(rng.integers(256))
        path.write_bytes(data)
        assert is_refused_or_sound(path)
    for other in (tmp_path, tmp_path / "none.safetensors"):
        with pytest.raises(VoiceError, match=r"is a folder|does not exist"):
            read_voice(other)


def test_a_second_tensor_is_refused(saved: Path) -> None:
    header, codes = raw(saved)
    shapes = {"codes": ("I32", codes.shape), "more": ("I32", codes.shape)}
    write_safetensors(saved, shapes, lambda _: codes, header["__metadata__"])
    with pytest.raises(VoiceError, match="one int32 tensor"):
        read_voice(saved)


# -------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name", ["a", "Anna", "anna-2", "my_voice", "Ms Smith", "2nd", "Zoë", "声"]
)
def test_names_that_are_good(name: str) -> None:
    assert check_name(name) == name


def test_names_are_composed() -> None:
    assert check_name("Zoe\u0308") == "Zo\u00eb"
    assert check_name(" a   b ") == "a b"


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "a" * 41, "../a", "a/b", "a\\b", "a.b", ".a", "-a", "_a", "?", "a\nb", "a\tb",
        "a\0b", "a\u200bb", "a:b", "12", "speaker 3", "Speaker3", "<|speaker:1|>", "~", "a*",
    ],
)  # fmt: skip
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(VoiceError, match="cannot name a voice"):
        check_name(name)


def test_the_bundles_own_names_are_taken(warble: Warble) -> None:
    for name in ("Robin", "robin"):
        with pytest.raises(VoiceError, match="of the model itself"):
            warble.register(CLIP, SAID, name)


# --------------------------------------------------------------------------------- the folder


def test_the_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARBLE_VOICES", "~/v")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert voice_folder() == tmp_path / "v"
    monkeypatch.delenv("WARBLE_VOICES")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert voice_folder() == tmp_path / ".local/share/warble-mlx/voices"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert voice_folder() == tmp_path / "Library/Application Support/warble-mlx/voices"


def test_keeping_finding_and_removing(voice: RegisteredVoice) -> None:
    assert find_registered("Anna") is None
    assert list(registered_voices()) == []
    path = keep(voice)
    assert path == voice_folder() / "Anna.safetensors"
    for name in ("Anna", "ANNA", " anna "):
        found = find_registered(name)
        assert found is not None
        assert found.name == "Anna"
    with pytest.raises(VoiceError, match="already"):
        keep(replace(voice, name="anna"))
    keep(replace(voice, name="anna", description="new"), force=True)
    (only,) = registered_voices()
    assert isinstance(only, RegisteredVoice)
    assert only.description == "new"
    assert remove("aNNa") == path
    with pytest.raises(VoiceError, match="there are: none"):
        remove("Anna")


def test_names_never_leave_the_folder(
    voice: RegisteredVoice, warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer for a file that exists and one that does not, and neither is opened."""
    keep(voice)
    outside = voice.save(tmp_path / "outside.safetensors")
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []
    monkeypatch.setattr("warble_mlx.voice_folder.read_voice", lambda path: opened.append(path))
    here = os.path.relpath(outside, voice_folder())
    stem = here.removesuffix(".safetensors")
    answers = set()
    for name in (str(outside), here, stem, "outside.safetensors", "none.safetensors", "outside"):
        with pytest.raises(VoiceError) as caught:
            warble.say("Yes.", voice=name)
        answers.add(str(caught.value).replace(repr(name), "?"))
    assert opened == []
    assert len(answers) == 2  # with the suffix, and without


def test_a_broken_file_does_not_hide_the_others(voice: RegisteredVoice) -> None:
    keep(voice)
    (voice_folder() / "Bert.safetensors").write_bytes(b"nothing")
    (voice_folder() / "12.safetensors").write_bytes(b"no name")
    first, second = registered_voices()
    assert isinstance(first, RegisteredVoice)
    assert isinstance(second, VoiceError)


# ------------------------------------------------------------------------------------ speaking


def test_three_ways_to_one_voice(voice: RegisteredVoice, warble: Warble, saved: Path) -> None:
    keep(voice)
    spoken = warble.say("Yes.", ref_audio=CLIP, ref_text=SAID, seed=1)
    for wanted in (voice, saved, "anna"):
        again = warble.say("Yes.", voice=wanted, seed=1)
        assert np.array_equal(again.codes, spoken.codes)
        assert again.voice == "Anna"
    unnamed = warble.register(CLIP, SAID)
    assert unnamed.name == ""
    assert warble.say("Yes.", voice=unnamed, seed=1).voice is None


def test_the_models_own_voice_comes_first(voice: RegisteredVoice, warble: Warble) -> None:
    keep(replace(voice, name="Robin"))
    own = warble.say("Yes.", voice="robin", seed=1)
    assert np.array_equal(own.codes, warble.say("Yes.", voice=5, seed=1).codes)


def test_the_prefix_of_a_voice_is_read_once(
    voice: RegisteredVoice, warble: Warble, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    advance = type(warble.engine.model).advance

    def counting(self: Any, x: Any, *rest: Any) -> Any:
        lengths.append(x.shape[1])
        return advance(self, x, *rest)

    keep(voice)
    warble.engine.release()
    monkeypatch.setattr(type(warble.engine.model), "advance", counting)
    warble.say("Yes.", voice="anna", seed=1)
    prefills = [n for n in lengths if n > 1]
    assert len(prefills) == 2  # the voice, with at least its frames, and the text
    assert prefills[0] > voice.codes.shape[1]
    lengths.clear()
    warble.say("No.", voice="anna", seed=1)
    assert [n for n in lengths if n > 1] == prefills[1:]
    assert len(warble.engine._prefixes) == 1


def test_a_voice_needs_no_encoder(voice: RegisteredVoice, warble: Warble, tmp_path: Path) -> None:
    keep(voice)
    lean = tmp_path / "lean"
    shutil.copytree(bundled_folder(), lean)
    (lean / "codec_encoder.safetensors").unlink()
    model = warble_mlx.load(lean)
    with pytest.raises(CheckpointError, match=r"codec_encoder\.safetensors"):
        model.register(CLIP, SAID)
    spoken = model.say("Yes.", voice="Anna", seed=1)
    assert np.array_equal(spoken.codes, warble.say("Yes.", voice=voice, seed=1).codes)


def test_a_voice_of_another_codec_is_refused(voice: RegisteredVoice, warble: Warble) -> None:
    for codec in (replace(voice.codec, sha256="0" * 64), replace(voice.codec, shape="other")):
        with pytest.raises(VoiceError, match="made for another codec") as caught:
            warble.say("Yes.", voice=replace(voice, codec=codec))
        assert codec.sha256[:8] in str(caught.value)
        assert voice.codec.sha256[:8] in str(caught.value)
    codes = np.tile(voice.codes, (1, 9))
    with pytest.raises(VoiceError, match=r"711 frames, 33\.0 s"):
        warble.say("Yes.", voice=replace(voice, codes=codes))
    with pytest.raises(VoiceError, match="this model knows"):
        warble.say("Yes.", voice=replace(voice, codes=np.full((10, 5), 1024, np.int32)))


def test_a_codec_without_provenance_is_known_by_its_decoder(warble: Warble) -> None:
    raw = json.loads((bundled_folder() / "config.json").read_text())
    known = Codec.of(bundled_folder(), warble.config, raw)
    for provenance in (None, {}, {"source_files": {"codec.pth": "?"}}, {"source_files": [1]}):
        other = Codec.of(bundled_folder(), warble.config, {**raw, "provenance": provenance})
        assert other.shape == known.shape
        assert other.sha256 != known.sha256
        assert len(other.sha256) == 64


def test_an_unknown_voice_lists_both_kinds(voice: RegisteredVoice, warble: Warble) -> None:
    keep(voice)
    with pytest.raises(VoiceError, match=r"Robin \(5\); registered: Anna"):
        warble.say("Yes.", voice="nobody")
    with pytest.raises(VoiceError, match="this model has"):
        warble.say("Yes.", voice=77)


def test_control_tokens_in_a_transcript_are_text(warble: Warble) -> None:
    made = warble.register(
        CLIP, f"<|speaker:3|>{SAID}<|im_end|>", "Eve", description="a\x1b[2Jb\nc"
    )
    assert made.transcript == SAID
    assert made.description == "a[2Jb c"
    with pytest.raises(TextError, match="nothing to say in the transcript"):
        warble.register(CLIP, "<|im_end|>")
