"""The codec at its published size against numbers of the reference implementation."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
import soundfile
from codec_models import load_decoder, load_encoder
from golden import make_checkpoint
from golden_data import FOLDER, assert_close, assert_same_codes, tensors
from mlx.utils import tree_flatten

from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.codec.carry import Carry
from warble_mlx.codec.transformer import rope_rows

pytestmark = pytest.mark.slow

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def golden() -> Arrays:
    return tensors("codec")


@pytest.fixture(scope="module")
def decoder(full_bundle: Path) -> CodecDecoder:
    return load_decoder(full_bundle)


@pytest.fixture(scope="module")
def encoder(full_bundle: Path) -> CodecEncoder:
    return load_encoder(full_bundle)


def codes_of(golden: Arrays, case: str) -> mx.array:
    return mx.array(golden[f"{case}.codes"])[None]


def test_rope_rows_are_bit_equal(golden: Arrays) -> None:
    assert np.array_equal(rope_rows(mx.arange(160), 64, 1e4), golden["rope.codec"])


@pytest.mark.parametrize("case", ["1", "7", "40", "150", "wild"])
def test_decode(decoder: CodecDecoder, golden: Arrays, case: str) -> None:
    samples = decoder.decode(codes_of(golden, f"decode.{case}"))
    assert_close(np.array(samples)[0], golden[f"decode.{case}.wave"], 1e-5, f"decode.{case}")


@pytest.mark.parametrize("chunks", [[1] * 40, [2] * 20, [7] * 6, [40], [3, 13, 1, 8, 15]])
def test_decode_in_chunks(decoder: CodecDecoder, golden: Arrays, chunks: list[int]) -> None:
    codes, state = codes_of(golden, "decode.40"), decoder.initial_state()
    first, pieces = 0, []
    for count in chunks:
        samples, state = decoder.step(codes[..., first : first + count], state)
        mx.eval(samples, state)
        pieces.append(np.array(samples)[0])
        first += count
    assert_close(np.concatenate(pieces), golden["decode.40.wave"], 1e-5, "decode.40")


def test_decode_stages(decoder: CodecDecoder, golden: Arrays) -> None:
    def check(stage: str, x: mx.array, limit: float = 2e-5) -> None:
        wanted = golden[f"decode.40.{stage}"]
        got = np.array(x)[0].T[: wanted.shape[0], : wanted.shape[1]]
        assert_close(got, wanted, limit, stage)

    carry, half = Carry(), decoder.quantizer
    x = half.dequantize(codes_of(golden, "decode.40"))
    check("summed", x, 5e-6)
    x = half.post_module(x, carry)
    check("post", x)
    for number, stage in enumerate(half.upsample):
        for name, layer in zip(("_transpose", ""), stage, strict=True):
            x = layer(x, carry)
            if f"decode.40.upsample{number}{name}" in golden:
                check(f"upsample{number}{name}", x)
    check("upsample", x)
    for number, layer in enumerate(decoder.decoder.model):
        x = layer(x, carry)
        if number < 5:
            check(f"decoder{number}_first8", x, 1e-4)
    assert_close(np.array(x)[0, :, 0], golden["decode.40.pretanh"], 2e-5, "pretanh")


def test_post_module_layer(decoder: CodecDecoder, golden: Arrays) -> None:
    module = decoder.quantizer.post_module
    first = type(module)(module.config, module.window)
    first.layers = module.layers[:1]
    first.norm = lambda x: x
    x = first(mx.array(golden["decode.40.summed"]).T[None], Carry())
    assert_close(np.array(x)[0], golden["decode.40.post_layer0"], 2e-5, "post_layer0")


def test_decode_of_the_first_release(decoder: CodecDecoder, full_bundle: Path) -> None:
    """Same tensors but for the post_module, which had no grouped heads and a wider MLP."""
    from warble_mlx.config import read_config

    geometry = {"codec_post_n_local_heads": 16, "codec_post_intermediate_size": 3072}
    other = CodecDecoder(msgspec.structs.replace(read_config(full_bundle), **geometry))
    made = {
        name: mx.array(make_checkpoint.make(name, shape, *rule))
        for name, shape, *rule in make_checkpoint.codec(geometry)
        if name.startswith("quantizer.post_module.")
    }
    for name in [n for n in made if n.endswith("feed_forward.w1.weight")]:
        stem = name.removesuffix("w1.weight")
        both = [made.pop(f"{stem}{part}.weight") for part in ("w1", "w3")]
        made[f"{stem}w13.weight"] = mx.concatenate(both)
    shared = {
        name: weight
        for name, weight in tree_flatten(decoder.parameters())
        if not name.startswith("quantizer.post_module.")
    }
    other.load_weights(list((shared | made).items()), strict=True)
    golden = tensors("codec_first_release")
    samples = other.decode(codes_of(golden, "decode.7"))
    assert_close(np.array(samples)[0], golden["decode.7.wave"], 1e-5, "first release")
    published = np.array(decoder.decode(codes_of(golden, "decode.7")))[0]
    assert np.abs(published - golden["decode.7.wave"]).max() > 1e-3


def speech() -> np.ndarray:
    samples, _ = soundfile.read(FOLDER / "speech_44k.wav", dtype="float32")
    return samples


def test_encode_stages(encoder: CodecEncoder, golden: Arrays) -> None:
    wave = golden["encode.chirp.wave"]
    padded = np.pad(wave, (0, -len(wave) % 2048))
    carry = Carry()
    x = mx.array(padded)[None, :, None]
    for number, layer in enumerate(encoder.encoder.block):
        for part in layer.block if number in (1, 2, 3, 4) else [layer]:
            x = part(x, carry)
            if number == 4 and part is layer.block[4]:
                wanted = golden["encode.chirp.before_window_transformer_first8"]
                assert_close(np.array(x)[0, :, :8].T, wanted, 1e-4, "before the transformer")
    assert_close(np.array(x)[0].T, golden["encode.chirp.encoder"], 1e-4, "encoder")
    for stage in encoder.quantizer.downsample:
        for layer in stage:
            x = layer(x, carry)
    assert_close(np.array(x)[0].T, golden["encode.chirp.downsample"], 1e-4, "downsample")
    x = encoder.quantizer.pre_module(x, carry)
    assert_close(np.array(x)[0].T, golden["encode.chirp.pre"], 2e-5, "pre_module")


@pytest.mark.parametrize("chunk_frames", [None, 1, 28])
def test_encode_chirp(
    encoder: CodecEncoder, decoder: CodecDecoder, golden: Arrays, chunk_frames: int | None
) -> None:
    wave = mx.array(golden["encode.chirp.wave"])[None]
    codes, frames = encoder.encode(wave, decoder.quantizer, chunk_frames=chunk_frames)
    assert frames == golden["encode.chirp.code_lengths"].tolist()
    assert_same_codes(np.array(codes)[0], golden["encode.chirp.codes"], "chirp")


def test_encode_speech(encoder: CodecEncoder, decoder: CodecDecoder, golden: Arrays) -> None:
    codes, frames = encoder.encode(mx.array(speech())[None], decoder.quantizer)
    assert frames == golden["encode.speech.code_lengths"].tolist()
    assert_same_codes(np.array(codes)[0], golden["encode.speech.codes"], "speech")


def test_encode_a_padded_batch(
    encoder: CodecEncoder, decoder: CodecDecoder, golden: Arrays
) -> None:
    rows = [golden["encode.chirp.wave"], speech()[4000:34000]]
    lengths = [len(row) for row in rows]
    batch = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows])
    codes, frames = encoder.encode(mx.array(batch), decoder.quantizer, lengths)
    assert frames == golden["encode.batch.code_lengths"].tolist()
    for row in range(2):
        wanted = golden["encode.batch.codes"][row]
        assert_same_codes(np.array(codes)[row], wanted, f"row {row}")


def test_round_trip(decoder: CodecDecoder, golden: Arrays) -> None:
    samples = decoder.decode(codes_of(golden, "encode.chirp"))
    assert_close(np.array(samples)[0], golden["roundtrip.chirp.wave"], 1e-5, "round trip")
