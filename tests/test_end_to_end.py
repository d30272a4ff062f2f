"""The bundled voice pack, from text to samples."""

from __future__ import annotations

import json
import os
import wave
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden_data import FOLDER, assert_close, assert_same_codes

import warble_mlx
from warble_mlx import Speech, Warble
from warble_mlx.errors import BudgetError, TextError, VoiceError, WarbleError
from warble_mlx.health import clicks

TEXT = "Where did you go?"
GOLDEN = FOLDER / "bundled"
CASES = json.loads((GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


@pytest.fixture(scope="module")
def speech(warble: Warble) -> Speech:
    return warble.say(TEXT, seed=3)


def test_what_a_speech_holds(speech: Speech, warble: Warble) -> None:
    frames = speech.codes.shape[1]
    assert speech.samples.dtype == np.float32
    assert speech.samples.shape == (frames * 2048,)
    assert speech.sample_rate == 44100
    assert len(repr(speech)) < 1000  # in a notebook, no pages of numbers
    assert speech.codes.shape[0] == 10
    assert speech.codes.dtype == np.int32
    assert speech.finish_reason == "stop"
    assert speech.seed == 3
    assert speech.text == TEXT
    assert speech.voice == warble.default_voice.name
    assert 0.4 < speech.seconds < 4
    assert 0.02 < np.abs(speech.samples).max() <= 1
    t = speech.timings
    assert 0 < t.first_audio_s <= t.total_s
    assert t.generate_s + t.codec_s == pytest.approx(t.total_s)
    assert speech.rtf == pytest.approx(t.total_s / speech.seconds)


def test_a_seed_repeats_and_seeds_differ(warble: Warble, speech: Speech) -> None:
    again = warble.say(TEXT, seed=3)
    assert_same_codes(again.codes, speech.codes, "seed 3")
    assert np.array_equal(again.samples, speech.samples)
    assert not np.array_equal(warble.say(TEXT, seed=4).codes, speech.codes)


def test_a_random_seed_is_reported_and_repeats(warble: Warble) -> None:
    first = warble.say("Yes.")
    assert_same_codes(warble.say("Yes.", seed=first.seed).codes, first.codes, "reported seed")


def test_temperature_zero_is_greedy(warble: Warble) -> None:
    a = warble.say("Yes.", temperature=0, seed=1)
    b = warble.say("Yes.", greedy=True, seed=2)
    assert_same_codes(a.codes, b.codes, "greedy")


def test_a_stream_is_the_same_speech(warble: Warble, speech: Speech) -> None:
    with warble.stream(TEXT, seed=3) as stream:
        with pytest.raises(WarbleError, match="not ended"):
            _ = stream.speech
        chunks = list(stream)
    assert len(chunks) > 1
    assert [c.begin for c in chunks[1:]] == [c.end for c in chunks[:-1]]
    assert chunks[0].begin == 0
    assert chunks[-1].end == speech.codes.shape[1]
    assert all(c.samples.shape == ((c.end - c.begin) * 2048,) for c in chunks)
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), speech.samples)
    assert_same_codes(stream.speech.codes, speech.codes, "stream")


def test_closing_a_stream_stops_it(warble: Warble) -> None:
    stream = warble.stream(TEXT, seed=3)
    next(stream)
    stream.close()
    assert list(stream) == []


def test_voices_differ_and_unknown_ones_are_listed(warble: Warble) -> None:
    number, name = warble.say("Yes.", voice=1, seed=0), warble.voices[0].name
    assert_same_codes(warble.say("Yes.", voice=name.upper(), seed=0).codes, number.codes, name)
    assert_same_codes(warble.say("Yes.", voice="speaker 1", seed=0).codes, number.codes, "speaker")
    assert not np.array_equal(warble.say("Yes.", voice=2, seed=0).codes, number.codes)
    with pytest.raises(VoiceError, match=name):
        warble.say("Yes.", voice="nobody")


def test_a_reference_clip_becomes_a_voice(warble: Warble, speech: Speech, tmp_path: Path) -> None:
    clip = speech.save(tmp_path / "clip.wav")
    cloned = warble.say("Yes.", ref_audio=clip, ref_text=TEXT, seed=0)
    assert cloned.voice is None
    assert cloned.seconds > 0
    assert not np.array_equal(cloned.codes, warble.say("Yes.", seed=0).codes)
    reference = warble.register(clip, TEXT)
    assert reference.codes.shape == speech.codes.shape
    for half in ({"ref_audio": clip}, {"ref_text": TEXT}):
        with pytest.raises(VoiceError, match="clip and transcript together"):
            warble.say("Yes.", **half)
    with pytest.raises(VoiceError, match="not both"):
        warble.say("Yes.", voice=1, ref_audio=clip, ref_text=TEXT)


def test_a_budget_cuts_and_says_so(warble: Warble) -> None:
    cut = warble.say(TEXT, seed=3, max_seconds=0.2)
    assert cut.finish_reason == "length"
    assert cut.codes.shape[1] == 5  # 0.2 s * 21.53 frames / s, rounded up
    with pytest.raises(BudgetError, match=r"1000 seconds|frames are wanted"):
        warble.say(TEXT, max_seconds=1000)
    with pytest.raises(BudgetError, match="more than 0"):
        warble.say(TEXT, max_seconds=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -1},
        {"seed": -1}, {"seed": 2**32},
    ],
)  # fmt: skip
def test_settings_out_of_range(warble: Warble, wrong: dict[str, float]) -> None:
    with pytest.raises(WarbleError, match=next(iter(wrong))):
        warble.say(TEXT, **wrong)


@pytest.mark.parametrize("text", ["", "...", None])
def test_nothing_to_say(warble: Warble, text: str) -> None:
    with pytest.raises(TextError):
        warble.say(text)


def test_a_text_of_several_pieces_is_one_speech(warble: Warble, speech: Speech) -> None:
    text = f'{TEXT}\n\nYes.<break time="300ms"/>No.'
    long = warble.say(text, seed=3, pause_s=0.1)
    assert long.text == f"{TEXT} Yes. No."
    assert [piece.text for piece in long.pieces] == [TEXT, "Yes.", "No."]
    assert {piece.finish_reason for piece in long.pieces} == {"stop"} == {long.finish_reason}
    assert [b.samples[0] - a.samples[1] for a, b in pairwise(long.pieces)] == [8820, 13230]
    for a, b in pairwise(long.pieces):
        assert not long.samples[a.samples[1] : b.samples[0]].any()
        assert b.frames[0] == a.frames[1]
    assert not clicks(long.samples, long.sample_rate)
    assert long.pieces[-1].samples[1] == len(long.samples)
    assert long.pieces[-1].frames[1] == long.codes.shape[1]
    first = slice(*long.pieces[0].frames)
    assert_same_codes(long.codes[:, first], speech.codes, "the first piece has the seed itself")
    assert len({piece.seed for piece in long.pieces}) == 3

    with warble.stream(text, seed=3, pause_s=0.1) as stream:
        chunks = list(stream)
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), long.samples)
    assert stream.speech.seconds == long.seconds
    assert stream.speech.samples.size == 0
    with pytest.raises(WarbleError, match="keep_samples"):
        stream.speech.save("nowhere.wav")


def test_a_sentence_beyond_the_training_length_is_planned_in_pieces(warble: Warble) -> None:
    parts = warble.plan("word " * 40 + "end").spoken
    assert len(parts) == 2
    assert max(len(part.text) for part in parts) <= 170


def test_save_writes_what_was_said(speech: Speech, tmp_path: Path) -> None:
    path = speech.save(tmp_path / "out.wav")
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels()) == (44100, 1)
        pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    assert np.abs(pcm / 32767 - speech.samples).max() < 1e-3


@pytest.mark.parametrize("case", CASES, ids=[c["file"] for c in CASES])
def test_the_codec_decodes_the_golden_codes(warble: Warble, case: dict[str, object]) -> None:
    """Waveforms of the source checkpoint's own golden data; the codec is stored as there."""
    golden = np.load(GOLDEN / str(case["file"]))
    samples = warble._decoder.decode(mx.array(golden["codes"].astype(np.int32))[None])
    assert_close(samples[0], golden["waveform"], 1e-5, str(case["file"]))


@pytest.mark.skipif("WARBLE_SHARED" not in os.environ, reason="needs the source checkpoint")
@pytest.mark.parametrize("number", range(3))
def test_a_source_checkpoint_converts_and_speaks_its_golden_data(
    converted_source: Warble, number: int
) -> None:
    """Another small checkpoint, with golden data that PyTorch made beside it."""
    folder = Path(os.environ["WARBLE_SHARED"]) / "tiny" / "golden"
    case = json.loads((folder / "golden.json").read_text())[number]
    golden = np.load(folder / case["file"])
    spoken = converted_source.say(case["text"], voice=case["voice"], greedy=True)
    assert_same_codes(spoken.codes, golden["codes"].astype(np.int32), case["file"])
    assert_close(spoken.samples, golden["waveform"], 1e-5, case["file"])


@pytest.fixture(scope="module")
def converted_source(tmp_path_factory: pytest.TempPathFactory) -> Warble:
    from warble_mlx.convert import convert

    out = tmp_path_factory.mktemp("converted") / "bundle"
    convert(Path(os.environ["WARBLE_SHARED"]) / "tiny", out)
    return warble_mlx.load(out)


def test_the_public_names() -> None:
    public = {n for n in dir(Warble) if not n.startswith("_")}
    assert public == {
        "astream", "default_voice", "perform", "plan", "reading", "register", "sample_rate", "say",
        "stream", "voices",
    }  # fmt: skip
    assert set(warble_mlx.__all__) == {
        "AsyncStream", "Chunk", "RegisteredVoice", "Speech", "Stream", "Voice", "Warble",
        "WarbleError", "__version__", "load",
    }  # fmt: skip
