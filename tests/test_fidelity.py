"""The comparison of a bundle with its source: teacher forcing, sums, lengths, samples, sweep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import packing_stand_in
import pytest
import synthetic

from warble_mlx import cli
from warble_mlx.convert import convert
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.errors import MissingExtraError, TextError, WarbleError
from warble_mlx.fidelity import chart, waveform
from warble_mlx.fidelity.compare import (
    bytes_per_frame,
    compare,
    open_float32,
    spoken_streams,
    stored_packings,
)
from warble_mlx.fidelity.divergence import Reference, _book_sums, log_softmax
from warble_mlx.fidelity.forced import Forced, fast_scores, forced, slow_hidden
from warble_mlx.fidelity.free_running import compare_lengths
from warble_mlx.fidelity.report import (
    fidelity_markdown,
    format_codec,
    format_fidelity,
    format_sweep,
    to_json,
)
from warble_mlx.fidelity.streams import TokenStream, generate, read_texts
from warble_mlx.fidelity.sweep import sweep
from warble_mlx.fidelity.texts import CALIBRATION, EVALUATION
from warble_mlx.prompt import Prompt
from warble_mlx.quant import Packing, quantize
from warble_mlx.text import speakable

TEXTS = ["Hi there.", "Good day."]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, converted, allowed 12 frames per text."""
    folder = tmp_path_factory.mktemp("small")
    source = synthetic.write_source(folder / "source")
    convert(source, folder / "bundle")
    config = json.loads((folder / "bundle" / "config.json").read_text())
    config["generation"] |= {"max_new_tokens": 12}
    synthetic.write_json(folder / "bundle" / "config.json", config)
    return folder / "bundle"


@pytest.fixture
def packed(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packing_stand_in.install(monkeypatch)
    quantize(bundle, tmp_path / "packed", check=False)
    return tmp_path / "packed"


def prompt_of(model: DualAR, length: int, seed: int) -> Prompt:
    columns = np.zeros((11, length), np.int32)
    columns[0] = np.random.default_rng(seed).integers(0, 200, length)
    return Prompt(columns[:, :5], columns[:, 5:])


# ------------------------------------------------------------------------ teacher forcing


def scores(model: DualAR, given: Forced) -> tuple[mx.array, mx.array]:
    hidden = slow_hidden(model, given)
    codes = fast_scores(model, hidden[given.framed], given.codes)
    return model.semantic_logits(model.norm(hidden)), codes


def test_the_forced_scores_choose_what_the_frame_step_chose(tiny_dual_ar: DualAR) -> None:
    """Streams of different lengths in one padded pass, against the cached step by step run."""
    config = tiny_dual_ar.config
    engine = Engine(tiny_dual_ar, compiled=False)
    asked = [
        Request(prompt_of(tiny_dual_ar, length, length), frames, Sampling(0.0), 0)
        for length, frames in ((20, 6), (9, 9))
    ]
    streams = generate(engine, asked)
    given = forced(streams, config.semantic_begin_id, config.codebook_size)
    semantic, codes = scores(tiny_dual_ar, given)
    assert np.array_equal(np.array(semantic.argmax(-1)), np.array(given.semantic))
    wanted = np.concatenate([stream.codes.T for stream in streams])
    assert np.array_equal(np.array(codes.argmax(-1)), wanted[:, 1:])
    assert np.array_equal(np.array(given.codes), wanted)


def test_padding_changes_nothing(tiny_dual_ar: DualAR) -> None:
    rng = np.random.default_rng(0)
    config = tiny_dual_ar.config
    short, long = (
        TokenStream(
            prompt_of(tiny_dual_ar, prompt, prompt).columns,
            rng.integers(0, config.codebook_size, (10, frames)).astype(np.int32),
            ended,
        )
        for prompt, frames, ended in ((8, 4, True), (30, 11, False))
    )
    together = scores(
        tiny_dual_ar, forced([short, long], config.semantic_begin_id, config.codebook_size)
    )
    alone = scores(tiny_dual_ar, forced([short], config.semantic_begin_id, config.codebook_size))
    assert together[0].shape[0] == 5 + 11
    assert alone[1].shape == (4, 9, config.codebook_size)
    assert np.abs(np.array(together[0][:5] - alone[0])).max() < 1e-4
    assert np.abs(np.array(together[1][:4] - alone[1])).max() < 1e-4


def test_the_end_is_a_step_without_a_frame() -> None:
    stream = TokenStream(np.zeros((11, 3), np.int32), np.arange(20).reshape(10, 2), True)
    given = forced([stream], 100, 64)
    assert given.columns.shape == (1, 11, 5)
    assert np.array(given.columns)[0, :, 4].tolist() == [101, *range(1, 20, 2)]
    assert np.array(given.steps).tolist() == [2, 3, 4]
    assert np.array(given.semantic).tolist() == [0, 1, 64]
    assert np.array(given.framed).tolist() == [0, 1]
    cut = forced([TokenStream(stream.prompt, stream.codes, False)], 100, 64)
    assert cut.columns.shape == (1, 11, 4)
    assert np.array(cut.semantic).tolist() == [0, 1]


# ------------------------------------------------------------------------ figures


def test_sums_of_a_codebook_by_hand() -> None:
    first = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32)
    second = np.array([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], np.float32)
    p, q = (log_softmax(mx.array(np.log(x))) for x in (first, second))
    kl, same, own, reference = (v.item() for v in _book_sums(p, q, mx.array([0, 2])))
    assert kl == pytest.approx((first * np.log(first / second)).sum(), rel=1e-5)
    assert same == 1
    assert own == pytest.approx(-math.log(0.25) - math.log(0.1), rel=1e-5)
    assert reference == pytest.approx(-math.log(0.5) - math.log(0.1), rel=1e-5)


def test_a_model_is_equal_to_itself_and_not_to_another(tiny_dual_ar: DualAR) -> None:
    rng = np.random.default_rng(0)
    size = tiny_dual_ar.config.codebook_size
    streams = [
        TokenStream(
            prompt_of(tiny_dual_ar, 8, i).columns,
            rng.integers(0, size, (10, 3 + i)).astype(np.int32),
            bool(i % 2),
        )
        for i in range(10)
    ]
    known = Reference(tiny_dual_ar, streams)
    same = known.compare(tiny_dual_ar)
    assert same.frames == sum(3 + i for i in range(10))
    assert same.steps == same.frames + 5
    assert len(same.books) == 10
    for book in same.books:
        assert abs(book.kl) < 1e-5
        assert book.agreement == 1
        assert book.perplexity == pytest.approx(book.reference_perplexity)
    output = tiny_dual_ar.fast_output
    before = output.weight
    output.weight = before * 2
    try:
        other = known.compare(tiny_dual_ar)
    finally:
        output.weight = before
    assert other.semantic_kl < 1e-5
    assert other.fast_kl > 1e-3
    assert other.fast_agreement == 1, "the same order of scores"


def test_lengths_and_ends() -> None:
    def stream(frames: int, ended: bool) -> TokenStream:
        return TokenStream(np.zeros((11, 1), np.int32), np.zeros((10, frames), np.int32), ended)

    reference = [stream(10, True), stream(20, True), stream(30, False)]
    own = [stream(12, True), stream(19, True), stream(30, True)]
    found = compare_lengths(reference, own)
    assert (found.utterances, found.ended, found.reference_ended) == (3, 3, 2)
    assert found.mean_shift == 0.5
    assert found.mean_absolute_shift == 1.5
    assert found.length_ratio == pytest.approx(61 / 60)
    assert compare_lengths([stream(5, False)], [stream(5, True)]).mean_shift is None


def test_difference_of_samples() -> None:
    signal = [np.full(100, 0.5, np.float32)]
    found = waveform.difference(signal, [signal[0] + np.float32(0.005)], 50)
    assert found.snr_db == pytest.approx(40, abs=0.01)
    assert found.largest == pytest.approx(0.005, rel=1e-4)
    assert found.seconds == 2
    assert waveform.difference(signal, signal, 50).snr_db is None


def test_ways_to_store_a_codec(bundle: Path) -> None:
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, 32, 6) for _ in range(10)]).astype(np.int32)
    streams = [TokenStream(np.zeros((11, 1), np.int32), codes, True)]
    found = {c.name: c for c in waveform.storage_choices(bundle, streams)}
    stored = (bundle / "codec_decoder.safetensors").stat().st_size
    assert found["float32"].difference.snr_db is None
    assert found["float16"].difference.snr_db is None, "that is how it is stored"
    assert found["float16"].nbytes == pytest.approx(stored, rel=0.03)  # without the header
    assert found["float32"].nbytes == 2 * found["float16"].nbytes
    assert 20 < found["bfloat16"].difference.snr_db < 70
    packed = found["float16, transformer Linears in 8 bits"]
    assert packed.nbytes < found["float16"].nbytes
    assert packed.difference.snr_db is not None
    assert "float16, transformer Linears in 8 bits" in format_codec(list(found.values()))


# ------------------------------------------------------------------------ reports


def test_compare_two_bundles(bundle: Path, packed: Path, tmp_path: Path) -> None:
    found = compare(bundle, packed, TEXTS)
    assert found.texts == 2
    assert found.divergence.frames == 24
    assert found.divergence.semantic_kl > 1e-5
    assert found.divergence.fast_kl > 1e-5
    assert found.free_running.utterances == 2
    assert found.waveform.snr_db is None
    assert found.bytes_per_frame < found.reference_bytes_per_frame
    assert found.model_bytes == (packed / "model.safetensors").stat().st_size
    text, card = format_fidelity(found), fidelity_markdown(found)
    for shown in (f"{found.divergence.books[3].kl:.4f}", "length ratio", "the same samples"):
        assert shown in text
        assert shown in card
    assert json.loads(to_json({"a": found}))["a"]["divergence"]["books"][9]["kl"] > 0
    chart.draw(found, tmp_path / "books.png")
    assert (tmp_path / "books.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_goes_into_the_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing_stand_in.install(monkeypatch)
    out = tmp_path / "out"
    result = quantize(bundle, out, bits=8, calibration=TEXTS, report=["Yes."], check=False)
    assert result.fidelity is not None
    kept = json.loads((out / "fidelity.json").read_text())
    assert (kept["bundle"], kept["reference"]) == ("out", "bundle")
    assert kept["divergence"]["steps"] == result.fidelity.divergence.steps
    assert "## What the quantisation costs" in (out / "README.md").read_text()
    quantizer = json.loads((out / "config.json").read_text())["provenance"]["quantizer"]
    assert quantizer["method"] == "GPTQ on generated token streams"
    assert quantizer["texts"] == 2
    assert 0 < quantizer["frames"] <= 24
    assert len(quantizer["texts_sha256"]) == 64
    assert stored_packings(out)["layers.0.attention.wo"] == Packing(8, 64, "affine")


def test_different_models_are_not_compared(bundle: Path, tmp_path: Path) -> None:
    source = synthetic.write_source(tmp_path / "source", n_layer=1)
    convert(source, tmp_path / "other")
    with pytest.raises(WarbleError, match="n_layer is 2 in the one and 1 in the other"):
        compare(bundle, tmp_path / "other", TEXTS)


def test_bytes_per_frame_follow_the_stored_packing(bundle: Path, packed: Path) -> None:
    config = open_float32(bundle).config
    none, four = (bytes_per_frame(config, stored_packings(p)) for p in (bundle, packed))
    per_block = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128
    weights = per_block * (2 + 9 * 2)  # two slow layers once, two fast ones nine times
    assert none - four == weights * 16 // 8 - weights * 9 // 16


def test_sweep(bundle: Path, packed: Path, tmp_path: Path) -> None:
    packings = [Packing(8, 64, "affine"), Packing(4, 64, "affine"), Packing(4, 128, "affine")]
    found = sweep(bundle, TEXTS, packings=packings, calibration=TEXTS[:1])
    kinds = [(row.packing.bits, row.component, row.learned) for row in found.rows]
    assert kinds == [
        (8, "both", False), (8, "slow", False), (8, "fast", False),
        (4, "both", False), (4, "slow", False), (4, "fast", False),
        (4, "both", True), (4, "slow", True), (4, "fast", True),
    ]  # fmt: skip
    rows = dict(zip(kinds, found.rows, strict=True))
    eight, four = rows[8, "both", False], rows[4, "both", False]
    assert eight.divergence.fast_kl < four.divergence.fast_kl
    assert eight.bytes_per_frame > four.bytes_per_frame
    assert rows[4, "fast", False].divergence.semantic_kl < 1e-6
    assert rows[4, "slow", False].divergence.semantic_kl == pytest.approx(
        four.divergence.semantic_kl, rel=1e-4
    )
    assert rows[4, "both", True].bytes_per_frame == four.bytes_per_frame
    assert "affine 4 g64, learned" in format_sweep(found)
    chart.draw(found, tmp_path / "sweep.svg")
    assert "<svg" in (tmp_path / "sweep.svg").read_text()
    # In memory as from a file.
    from_file = Reference(open_float32(bundle).engine.model, spoken_streams(bundle, TEXTS)).compare(
        open_float32(packed).engine.model
    )
    assert from_file.fast_kl == pytest.approx(four.divergence.fast_kl, rel=1e-3)


def test_what_a_sweep_refuses(bundle: Path, packed: Path) -> None:
    with pytest.raises(WarbleError, match="is quantised already"):
        sweep(packed, TEXTS)
    with pytest.raises(WarbleError, match="no packing of the sweep fits"):
        sweep(bundle, TEXTS, packings=[Packing(4, 128, "affine")])


def test_a_chart_without_matplotlib(
    bundle: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare(bundle, packed, TEXTS[:1])
    with pytest.raises(WarbleError, match=r"x\.bmpx cannot be drawn"):
        chart.draw(found, tmp_path / "x.bmpx")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"warble-mlx\[bench\]"):
        chart.draw(found, tmp_path / "x.png")


# ------------------------------------------------------------------------ texts and command line


def test_the_packages_texts_can_be_spoken_and_do_not_overlap() -> None:
    assert not set(CALIBRATION) & set(EVALUATION)
    heldout = (Path(__file__).parent / "ear" / "heldout.txt").read_text().splitlines()
    assert not {*CALIBRATION, *EVALUATION} & set(heldout)
    for text in (*CALIBRATION, *EVALUATION):
        assert speakable(text) == text
        assert len(text) < 170


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("One.\n\n  Two.  \n")
    assert read_texts(path) == ["One.", "Two."]
    path.write_text("\n \n")
    with pytest.raises(TextError, match="holds no text: give one sentence per line"):
        read_texts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TextError, match="cannot be read: it is not UTF-8"):
        read_texts(path)
    with pytest.raises(TextError, match="cannot be read: No such file"):
        read_texts(tmp_path / "absent.txt")


def test_the_command(
    bundle: Path, packed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts, out, picture = tmp_path / "t.txt", tmp_path / "out.json", tmp_path / "c.png"
    texts.write_text("Hi there.\n")
    args = ["fidelity", str(bundle), str(packed), "--codec", "--text", str(texts)]
    assert cli.main([*args, "--json", str(out), "--chart", str(picture)]) == 0
    shown = capfd.readouterr().out
    assert "packed against bundle: 1 texts, 12 frames of the reference" in shown
    assert "codec decoder stored as" in shown
    document = json.loads(out.read_text())
    assert document.keys() == {"comparison", "codec"}
    assert picture.stat().st_size > 1000
    assert cli.main([*args, "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["comparison"] == document["comparison"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give BUNDLE, or --sweep, or --codec"),
        (["--codec", "--calibrate", "builtin"], "--calibrate belongs to --sweep"),
        (["--codec", "--chart", "x.png"], "--chart needs BUNDLE or --sweep"),
    ],
)
def test_wishes_that_contradict_each_other(
    bundle: Path, capfd: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    assert cli.main(["fidelity", str(bundle), *args]) == 2
    assert says in capfd.readouterr().err
