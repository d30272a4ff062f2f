"""The recipe of the bundled voice runs through at toy size, and its checkpoint speaks here."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden_data import assert_close

from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.config import read_config
from warble_mlx.convert import convert
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.prompt import PromptBuilder, Reference
from warble_mlx.voices import read_voices
from warble_mlx.weights import DECODER_FILE, ENCODER_FILE, load_dual_ar, load_strictly

# Last, since some packages lie in other folders of the tree than they are imported from.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from samples.bundled_voice import phonemes, progress, prompts, settings, spoken
from samples.bundled_voice.sentences import Grammar

SPOKEN = {
    "It costs $5.50.": "It costs five dollars and fifty cents.",
    "That is £1.": "That is one pound.",
    "We leave at 3:05 PM.": "We leave at three oh five PM.",
    "Be there at 8 a.m.": "Be there at eight AM.",
    "It is 12:00 now.": "It is twelve o'clock now.",
    "She was born in 1984.": "She was born in nineteen eighty four.",
    "July 4, 1776.": "July fourth, seventeen seventy six.",
    "35% of 2.5 kg": "thirty five percent of two point five kilograms",
    "Dr. Long lives on Elm St.": "Doctor Long lives on Elm Street.",
    "1,234 people": "one thousand two hundred thirty four people",
    "Call 0207": "Call zero two zero seven",
    "I am here.": "I am here.",
}


@pytest.mark.parametrize("text", SPOKEN)
def test_numbers_and_abbreviations_become_words(text: str) -> None:
    assert spoken.spoken(text) == SPOKEN[text]


def test_phonemes_are_in_the_alphabet() -> None:
    said = phonemes.translated("ðə bˈɜːt^ʃ ɪz nˌa^ʊ ɹˈʌnɪŋ, ɐnd lˈɪɾɚɹəsi!")
    assert said == "ðə bˈɜɹʧ ɪz nˌW ɹˈʌnɪŋ, ənd lˈɪTəɹəsi!"
    assert len(phonemes.numbers(said)) == len(said)


def test_stress_marks_take_the_phoneme_behind_them() -> None:
    found = phonemes.sounding(phonemes.numbers("ɡˈʊd mˌˈɔ."))
    assert found == phonemes.numbers("ɡʊʊd mɔɔɔ.")
    assert phonemes.sounding(phonemes.numbers("aˈ")) == phonemes.numbers("aˈ")


def test_a_budget_leaves_out_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = progress.Budget(50.0, started=now)
    now = 140.0
    assert budget.share(0) == pytest.approx(0.8)
    budget.excuse(110.0)
    assert budget.used() == pytest.approx(10.0)


def test_loaded_codebooks_are_followed_from_where_they_are() -> None:
    pytest.importorskip("torch", reason="the recipe trains with PyTorch: pip install '.[convert]'")
    import torch

    from samples.bundled_voice.quantiser import Book

    torch.manual_seed(0)
    book = Book(4, 8, 4)
    rows = torch.nn.functional.normalize(torch.randn(8, 4), dim=-1)
    book.codebook.weight.data.copy_(rows)
    book.in_proj.weight.data.copy_(torch.eye(4)[..., None])
    book.in_proj.bias.data.zero_()
    book.adopt()
    book(rows[None], True)  # each row sees itself
    torch.testing.assert_close(book.codebook.weight.data, rows)


def test_sentences_part_in_the_quiet_and_keep_a_little_of_it() -> None:
    pytest.importorskip("torch", reason="the recipe trains with PyTorch: pip install '.[convert]'")
    from samples.bundled_voice import synthesise

    def stretch(seconds: float, level: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.full(round(seconds * 24_000), level, np.int16)

    # "... cat. The": a closure of 0.1 s before the release of the t, a pause, and the next onset
    # 45 ms before the space is over.
    line = [(0.8, 3000), (0.1, 0), (0.02, 500), (0.35, 20), (0.9, 3000), (0.3, 0)]
    sound = np.concatenate([stretch(*each) for each in line])
    loud = synthesise.loudness(sound)
    border = synthesise.parting(loud, round(0.75 * 24_000), round(1.315 * 24_000))
    assert border / 24_000 == pytest.approx(0.92 + 0.35 / 2, abs=0.01)

    def quiet(begin: int, finish: int) -> list[float]:
        cut = synthesise.trimmed(sound, begin, finish)
        assert cut is not None
        heard = np.flatnonzero(abs(sound[slice(*cut)]) > 100) / 24_000
        return [heard[0], (cut[1] - cut[0]) / 24_000 - heard[-1]]

    assert quiet(0, border) == pytest.approx([0.0, 0.10], abs=0.015)
    assert quiet(border, len(sound)) == pytest.approx([0.06, 0.10], abs=0.015)
    # Where nothing is quiet, at the quietest.
    hurried = np.concatenate([stretch(0.3, 3000), stretch(0.02, 200), stretch(0.3, 3000)])
    border = synthesise.parting(synthesise.loudness(hurried), 4800, 9600)
    assert border / 24_000 == pytest.approx(0.31, abs=0.011)


def test_held_out_lines_and_rough_takes_are_never_targets() -> None:
    pytest.importorskip("torch", reason="the recipe trains with PyTorch: pip install '.[convert]'")
    from samples.bundled_voice.batches import Rows, Spoken
    from samples.bundled_voice.casting import FIRST_PASSING

    count, length = 40, 25
    line = np.arange(count) % 8
    rough = np.arange(count) >= 32
    codes = np.repeat(line + 8 * rough, length)[None].repeat(10, 0).astype(np.int16)
    first = np.arange(count) * length
    speaker = np.where((np.arange(count) % 3 == 0) | rough, FIRST_PASSING, 1)
    text = [np.array(prompts.encoded("Hello."), np.int64)] * count
    spoken_ = Spoken(codes, first, first + length, text, speaker, line, rough)
    for held_out in (False, True):
        rows = Rows(settings.SMOKE, spoken_, held_out=held_out)
        seen = {int(code) for batch in islice(rows, 6) for code in batch.frame_codes[:, 0]}
        assert seen == ({3, 7} if held_out else {0, 1, 2, 4, 5, 6})
    rng = np.random.default_rng(0)
    drawn = [(index, rows.row(index, rng)) for index in range(32) for _ in range(20)]
    pairs = {(index, row[1]) for index, row in drawn if row and row[1] is not None}
    assert all(line[index] != line[reference] for index, reference in pairs)
    assert all(speaker[index] == speaker[reference] for index, reference in pairs)
    assert {bool(rough[reference]) for _, reference in pairs} == {False, True}


def test_the_grammar_writes_what_the_training_can_read() -> None:
    import random

    grammar = Grammar(random.Random(3), ["orange", "literacy"])
    made = [make() for make in (grammar.everyday, grammar.with_numbers, grammar.short) * 60]
    assert len(set(made)) > 150
    for text in made:
        said = spoken.spoken(text)
        assert not any(character.isdigit() for character in said), (text, said)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage on the toy engine, a few steps each, through the command line's own functions."""
    pytest.importorskip("torch", reason="the recipe trains with PyTorch: pip install '.[convert]'")
    pytest.importorskip("safetensors", reason="the recipe keeps weights in safetensors files")
    import torch

    from samples.bundled_voice import recipe

    work = tmp_path_factory.mktemp("voice")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for stage, steps in (
            ("synthesise", "1"), ("codec", "4"), ("encode", "1"), ("dual-ar", "3"),
            ("decoder", "2"), ("export", "1"), ("source", "1"),
        ):  # fmt: skip
            arguments = [
                "recipe", stage, "--work", str(work), "--size", "smoke", "--engine", "toy",
                "--device", "cpu", "--steps", steps, "--hours", "0.01", "--seconds", "60",
            ]  # fmt: skip
            patch.setattr(sys, "argv", arguments)
            recipe.main()
    torch.set_num_threads(threads)
    return work / "checkpoint"


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    out = checkpoint.parent / "bundle"
    convert(checkpoint, out, codec_dtype="float32")
    return out


def test_the_five_voices_arrive(bundle: Path) -> None:
    voices = read_voices(bundle)
    assert [voice.id for voice in voices.voices] == [1, 2, 3, 4, 5]
    assert voices.default_voice is not None
    assert all("synthetic" in voice.description for voice in voices.voices)


def test_every_voice_of_the_source_says_every_line(checkpoint: Path) -> None:
    from samples.bundled_voice.evaluate import sourced

    found = list(sourced(checkpoint.parent / "source"))
    texts = {text for _, text, _ in found}
    assert len(texts) == 4
    assert sorted((number, text) for number, text, _ in found) == sorted(
        (number, text) for number in range(1, 6) for text in texts
    )
    assert all(0.01 < np.abs(samples).max() <= 1 for _, _, samples in found)


def test_training_prompts_are_those_of_the_runtime(bundle: Path) -> None:
    builder = PromptBuilder.from_folder(bundle, read_config(bundle))
    text, heard = "It's 5:30, naïve café!", np.arange(30, dtype=np.int32).reshape(10, 3) % 60
    tokens = prompts.encoded(text)
    for voice in (None, 3):
        speaker = f"<|speaker:{voice}|>" if voice else ""
        columns = builder.build(text, speaker=speaker, exact=True).columns
        assert columns[0].tolist() == prompts.plain(tokens, voice)
    with_reference = builder.build(text, reference=Reference("Hello there.", heard), exact=True)
    frames = (settings.FIRST_SEMANTIC + heard[0]).tolist()
    assert with_reference.columns[0].tolist() == [
        *prompts.before_speech(prompts.encoded("Hello there.")),
        *frames,
        *prompts.after_speech(tokens),
    ]


def test_the_trained_codec_is_the_codec_of_the_runtime(checkpoint: Path, bundle: Path) -> None:
    import torch

    from samples.bundled_voice.codec_net import Codec
    from samples.bundled_voice.settings import SMOKE
    from samples.bundled_voice.stored import load

    network = Codec(SMOKE.config)
    network.load_state_dict(load(checkpoint / "codec.safetensors"))
    sound = np.random.default_rng(0).normal(0, 0.1, (1, 5 * settings.FRAME)).astype(np.float32)
    with torch.no_grad():
        codes = network.encode(torch.from_numpy(sound))
        samples = network.decode(codes).numpy()
    config = read_config(bundle)
    encoder, decoder = CodecEncoder(config), CodecDecoder(config)
    load_strictly(encoder, bundle / ENCODER_FILE, mx.float32, {})
    load_strictly(decoder, bundle / DECODER_FILE, mx.float32, {})
    found, _ = encoder.encode(mx.array(sound), decoder.quantizer)
    assert (np.array(found) == codes.numpy()).mean() > 0.95  # near ties may fall either way
    decoded = np.array(decoder.decode(mx.array(codes.numpy().astype(np.int32))))
    assert_close(decoded.reshape(-1), samples.reshape(-1), 1e-4, "samples")


def test_the_trained_dual_ar_is_the_dual_ar_of_the_runtime(checkpoint: Path, bundle: Path) -> None:
    """Greedy frames of the runtime are the most likely ones to the trained network as well."""
    import torch

    from samples.bundled_voice.dual_ar_net import DualAR
    from samples.bundled_voice.settings import SMOKE
    from samples.bundled_voice.stored import load

    config = read_config(bundle)
    builder = PromptBuilder.from_folder(bundle, config)
    prompt = builder.build("Good morning.", speaker="<|speaker:3|>")
    engine = Engine(load_dual_ar(bundle, mx.float32), compiled=False)
    asked = [Request(prompt, 6, Sampling(temperature=0), 0)]
    emitted = [e.codes for e in engine.generate(asked, rows=1) if e.codes is not None]
    frames = np.array(emitted, np.int64).reshape(-1, 10)
    assert len(frames)
    network = DualAR(SMOKE.config)
    network.load_state_dict(load(checkpoint / "model.safetensors"))
    before = prompt.columns.shape[1]
    ids = np.concatenate([prompt.columns[0], settings.FIRST_SEMANTIC + frames[:, 0]])
    codes = np.zeros((len(ids), 10), np.int64)
    codes[before:] = frames
    with torch.no_grad():
        hidden = network.slow(torch.from_numpy(ids)[None].long(), torch.from_numpy(codes)[None])[0]
        hidden = hidden[before - 1 : before - 1 + len(frames)]
        semantic = network.semantic_logits(hidden)
        semantic = semantic[:, settings.FIRST_SEMANTIC : settings.FIRST_SEMANTIC + 64]
        residual = network.fast(hidden, torch.from_numpy(frames))
    for logits, chosen in ((semantic, frames[:, :1]), (residual, frames[:, 1:])):
        scores = logits.reshape(-1, logits.shape[-1]).numpy()
        own = scores[np.arange(len(scores)), chosen.reshape(-1)]
        assert (scores.max(1) - own).max() < 2e-3  # the winner, or a tie with it
