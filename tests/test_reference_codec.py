"""The PyTorch reference engine's codec, and its reading of every codec layout."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import synthetic
from golden_data import FOLDER, assert_close, assert_same_codes, tensors

torch = pytest.importorskip("torch", reason="the reference engine needs PyTorch")

from reference.bundle import load_bundle_codec  # noqa: E402
from reference.codec import Codec  # noqa: E402
from reference.load import fold, load_codec, read_codec  # noqa: E402

BUNDLED = Path(__file__).parent.parent / "warble_mlx" / "bundled"
LIMIT = 1e-5


def decoded(codec: Codec, codes: np.ndarray) -> np.ndarray:
    return codec.decode(torch.from_numpy(codes).long()[None])[0].numpy()


@pytest.mark.skipif(not (FOLDER / "bundled").is_dir(), reason="no golden data of the bundled voice")
def test_the_bundled_voice() -> None:
    """A trained codec still gives what it gave when the golden data was made; the runtime is held
    to the same waveforms by test_bundled_golden."""
    codec = load_bundle_codec(BUNDLED)
    files = sorted((FOLDER / "bundled").glob("*.npz"))
    assert files
    with np.load(files[0]) as golden:
        wave = decoded(codec, golden["codes"].astype(np.int64))
        assert_close(wave, golden["waveform"], LIMIT, files[0].name)


def test_decoding_is_causal(tmp_path: Path) -> None:
    codec = load_codec(synthetic.write_source(tmp_path / "source"))
    codes = np.random.default_rng(0).integers(0, 80, (10, 12))  # some outside their books
    whole = decoded(codec, codes)
    assert whole.shape == (12 * 2048,)
    assert_close(decoded(codec, codes[:, :5]), whole[: 5 * 2048], LIMIT, "prefix")


def test_every_tensor_is_used(tmp_path: Path) -> None:
    codec = load_codec(synthetic.write_source(tmp_path / "source"))
    samples = torch.from_numpy(
        np.random.default_rng(0).normal(0, 0.1, (2, 5000)).astype(np.float32)
    )
    encoded = codec.encode(samples, [5000, 2000])
    assert encoded.lengths == [3, 1]
    assert encoded.codes.shape == (2, 10, 3)
    assert (encoded.codes[1, :, 1:] == -1).all()
    assert (encoded.margins >= 0).all()
    codec.decode(encoded.codes[:1])
    assert not codec.unread


def test_weight_norm_has_two_forms() -> None:
    stored = synthetic.codec(synthetic.config())
    wanted = synthetic.folded(stored)
    old = synthetic.renamed(stored, synthetic.NEW_FORM, synthetic.OLD_FORM)
    for form in (stored, old):
        found = fold({name: torch.from_numpy(value) for name, value in form.items()})
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_close(found[name], value, 1e-6, name)


@pytest.mark.parametrize("wrap", ["none", "state_dict", "generator"])
def test_pickled_codecs(tmp_path: Path, wrap: str) -> None:
    from golden.make_checkpoint import write_codec_pth

    stored = synthetic.codec(synthetic.config())
    write_codec_pth(tmp_path / "codec.pth", stored, wrap)
    found = read_codec(tmp_path / "codec.pth")
    wanted = synthetic.folded(stored)
    assert found.keys() == wanted.keys()
    assert_close(
        found["decoder.model.0.conv.weight"], wanted["decoder.model.0.conv.weight"], 1e-6, ""
    )


@pytest.fixture(scope="module")
def full_codec(full_source: Path) -> Codec:
    torch.set_num_threads(2)
    found = load_codec(full_source)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1", "7", "40", "wild"])
def test_full_size_decoding(full_codec: Codec, case: str) -> None:
    golden = tensors("codec")
    wave = decoded(full_codec, golden[f"decode.{case}.codes"])
    assert_close(wave, golden[f"decode.{case}.wave"], LIMIT, case)


@pytest.mark.slow
@torch.no_grad()
def test_full_size_stages(full_codec: Codec) -> None:
    golden = tensors("codec")
    summed = full_codec.dequantise(torch.from_numpy(golden["decode.40.codes"]).long()[None])
    assert_close(summed[0], golden["decode.40.summed"], LIMIT, "summed")
    assert_close(full_codec.latents(summed)[0], golden["decode.40.upsample"], 1e-4, "latents")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chirp", "speech"])
def test_full_size_encoding(full_codec: Codec, case: str) -> None:
    golden = tensors("codec")
    if case == "speech":
        with wave.open(str(FOLDER / "speech_44k.wav")) as file:
            raw = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        samples = raw.astype(np.float32) / 32768
    else:
        samples = golden["encode.chirp.wave"]
    encoded = full_codec.encode(torch.from_numpy(samples)[None])
    assert_same_codes(encoded.codes[0].numpy(), golden[f"encode.{case}.codes"], case)
    assert_close(encoded.margins[0], golden[f"encode.{case}.margin"], 1e-4, "margins")


@pytest.mark.slow
def test_full_size_encoding_of_a_batch(full_codec: Codec) -> None:
    golden = tensors("codec")
    chirp = golden["encode.chirp.wave"]
    with wave.open(str(FOLDER / "speech_44k.wav")) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    speech = raw.astype(np.float32)[4000:34000] / 32768
    samples = np.zeros((2, max(len(chirp), len(speech))), np.float32)
    samples[0, : len(chirp)], samples[1, : len(speech)] = chirp, speech
    encoded = full_codec.encode(torch.from_numpy(samples), [len(chirp), len(speech)])
    assert encoded.lengths == golden["encode.batch.code_lengths"].tolist()
    assert np.array_equal(encoded.codes.numpy(), golden["encode.batch.codes"])
