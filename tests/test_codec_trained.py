"""The codec with trained weights, where the folder that WARBLE_SHARED names has them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from codec_models import load_decoder, load_encoder
from golden_data import assert_close, assert_same_codes

from warble_mlx.codec import CodecDecoder

CLIPS = ("g0_1", "g31_2", "g36_5")


@pytest.fixture(scope="module")
def source() -> Path:
    shared = os.environ.get("WARBLE_SHARED")
    if not shared or not (Path(shared) / "tiny" / "golden").is_dir():
        pytest.skip("WARBLE_SHARED does not name a folder with tiny/golden")
    return Path(shared) / "tiny"


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from warble_mlx.convert import convert

    out = tmp_path_factory.mktemp("trained") / "bundle"
    convert(source, out, codec_dtype="float32")
    return out


@pytest.fixture(scope="module")
def decoder(bundle: Path) -> CodecDecoder:
    return load_decoder(bundle)


@pytest.mark.parametrize("clip", CLIPS)
def test_decode(source: Path, decoder: CodecDecoder, clip: str) -> None:
    wanted = np.load(source / "golden" / f"{clip}.npz")
    samples = decoder.decode(mx.array(wanted["codes"].astype(np.int32))[None])
    assert_close(np.array(samples)[0], wanted["waveform"], 1e-5, clip)


@pytest.mark.parametrize("split", [1, 2, 7, 64, 999, "random"])
def test_decode_in_chunks(source: Path, decoder: CodecDecoder, split: int | str) -> None:
    wanted = np.load(source / "golden" / f"{CLIPS[0]}.npz")
    codes = mx.array(wanted["codes"].astype(np.int32))[None]
    rng, state, first, pieces = random.Random(8), decoder.initial_state(), 0, []
    while first < codes.shape[2]:
        count = split if isinstance(split, int) else rng.randint(1, 11)
        samples, state = decoder.step(codes[..., first : first + count], state)
        pieces.append(np.array(samples)[0])
        first += count
    assert_close(np.concatenate(pieces), wanted["waveform"], 1e-5, f"split {split}")


def test_encode(source: Path, bundle: Path, decoder: CodecDecoder) -> None:
    wanted = np.load(source / "golden" / "encode.npz")
    encoder = load_encoder(bundle)
    codes, frames = encoder.encode(mx.array(wanted["waveform"])[None], decoder.quantizer)
    assert frames == [22]
    assert_same_codes(np.array(codes)[0], wanted["codes"].astype(np.int32), "encode")
