"""The codec on a small synthetic checkpoint: any split gives the same, and nothing grows."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from codec_models import load_decoder, load_encoder, small_config, write_small_codec
from golden_data import assert_close, assert_same_codes
from products import counted

from warble_mlx.codec import CodecDecoder, CodecEncoder, convolution
from warble_mlx.codec.convolution import gpu_forms
from warble_mlx.codec.encoder import PADDING_CODE
from warble_mlx.errors import WarbleError

FRAMES = 70  # well past the window of 8
FRAME = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_codec(tmp_path_factory.mktemp("small_codec"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> CodecDecoder:
    return load_decoder(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> CodecEncoder:
    return load_encoder(folder)


def some_codes(rows: int = 1, frames: int = FRAMES) -> mx.array:
    rng = np.random.default_rng(5)
    return mx.array(rng.integers(0, 32, (rows, 10, frames)).astype(np.int32))


def some_samples(rows: int, length: int) -> mx.array:
    rng = np.random.default_rng(6)
    return mx.array(rng.uniform(-0.5, 0.5, (rows, length)).astype(np.float32))


@pytest.fixture(scope="module")
def whole(decoder: CodecDecoder) -> np.ndarray:
    return np.array(decoder.decode(some_codes(), chunk_frames=FRAMES))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, None])
def test_chunks_give_the_samples_of_one_piece(
    decoder: CodecDecoder, whole: np.ndarray, chunk: int | None
) -> None:
    assert whole.shape == (1, FRAMES * FRAME)
    assert np.std(whole) > 1e-3
    assert_close(decoder.decode(some_codes(), chunk), whole, 1e-5, f"chunks of {chunk}")


@pytest.mark.parametrize("forms", [nullcontext, gpu_forms])
@pytest.mark.parametrize("chunks", [[1] * FRAMES, [4] + [16] * ((FRAMES - 4) // 16)])
def test_streaming_multiplies_no_more_than_one_piece(
    decoder: CodecDecoder, chunks: list[int], forms: Callable[[], AbstractContextManager[None]]
) -> None:
    """Nothing is computed twice. Attention in chunks even skips keys that no query sees."""
    chunks = [*chunks, FRAMES - sum(chunks)]

    def products(sizes: list[int]) -> int:
        state, at = decoder.initial_state(1), 0
        with counted() as tally, forms():
            for size in filter(None, sizes):
                _, state = decoder.step(some_codes()[..., at : at + size], state)
                at += size
        return tally.total

    whole = products([FRAMES])
    assert whole > 1e6
    # The last convolution has six more rows per chunk on a CPU (`_project_then_shift`).
    assert products(chunks) < whole * (1 + 0.002 * len(chunks) / FRAMES)


@pytest.mark.parametrize("seed", range(3))
def test_random_splits_give_the_samples_of_one_piece(
    decoder: CodecDecoder, whole: np.ndarray, seed: int
) -> None:
    rng = random.Random(seed)
    codes, state, first, pieces = some_codes(), decoder.initial_state(), 0, []
    while first < FRAMES:
        count = rng.randint(0, 11)
        samples, state = decoder.step(codes[..., first : first + count], state)
        first += min(count, FRAMES - first)
        pieces.append(np.array(samples))
    assert_close(np.concatenate(pieces, axis=1), whole, 1e-5, f"split {seed}")


def test_a_prefix_of_the_codes_gives_a_prefix_of_the_samples(
    decoder: CodecDecoder, whole: np.ndarray
) -> None:
    start = decoder.decode(some_codes()[..., :13])
    assert_close(start, whole[:, : 13 * FRAME], 1e-5, "prefix")


def test_rows_of_a_batch_do_not_meet(decoder: CodecDecoder) -> None:
    codes = some_codes(rows=14, frames=5)
    together = np.array(decoder.decode(codes))
    for row in (0, 13):
        alone = decoder.decode(codes[row : row + 1])
        assert_close(together[row], np.array(alone)[0], 1e-5, f"row {row}")


def test_the_gpu_forms_give_the_same_samples(
    decoder: CodecDecoder, whole: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "on_cpu", lambda: False)
    assert_close(decoder.decode(some_codes()[..., :9]), whole[:, : 9 * FRAME], 1e-5, "GPU forms")


def test_the_state_keeps_its_shapes(decoder: CodecDecoder) -> None:
    state = decoder.initial_state(2)
    shapes = [(a.shape, a.dtype) for a in state]
    for count in (1, 9, 3, 24):
        _, state = decoder.step(some_codes(rows=2, frames=count), state)
        assert [(a.shape, a.dtype) for a in state] == shapes
    positions = [a for a in state if a.dtype == mx.int32]
    assert [a.tolist() for a in positions] == [[37, 37]]


def test_the_state_holds_no_more_memory_than_its_arrays(decoder: CodecDecoder) -> None:
    mx.eval(decoder.parameters())
    codes, state = some_codes(frames=12), decoder.initial_state()
    mx.eval(codes, state)
    del state
    before = mx.get_active_memory()
    samples, state = decoder.step(codes, decoder.initial_state())
    mx.eval(samples, state)
    del samples
    held = mx.get_active_memory() - before
    # MLX leaves up to 16 KiB of slack behind an array.
    assert held <= sum(a.nbytes for a in state) + len(state) * 20_000
    assert held < 2_500_000


@pytest.mark.usefixtures("on_the_cpu")
def test_memory_does_not_grow_with_the_length(decoder: CodecDecoder) -> None:
    peaks = []
    for frames in (24, 144):
        codes = some_codes(frames=frames)
        mx.eval(codes)
        mx.reset_peak_memory()
        decoder.decode(codes, chunk_frames=12)
        peaks.append(mx.get_peak_memory())
    samples = (144 - 24) * FRAME * 4
    assert peaks[1] - peaks[0] < 2 * samples + 500_000


def test_positions_are_absolute(decoder: CodecDecoder) -> None:
    codes, state = some_codes(frames=20), decoder.initial_state()
    _, state = decoder.step(codes, state)
    here, _ = decoder.step(codes, state)
    moved = tuple(a + 500 if a.dtype == mx.int32 else a for a in state)
    there, _ = decoder.step(codes, moved)
    assert np.abs(np.array(here - there)).max() > 1e-5


def test_the_step_can_be_exported(decoder: CodecDecoder, whole: np.ndarray, tmp_path: Path) -> None:
    file = str(tmp_path / "step.mlxfn")
    state = decoder.initial_state()

    def step(codes: mx.array, *state: mx.array) -> tuple[mx.array, ...]:
        samples, after = decoder.step(codes, state)
        return (samples, *after)

    mx.export_function(file, step, some_codes()[..., :4], *state)
    imported = mx.import_function(file)
    pieces = []
    for first in (0, 4, 8):
        samples, *state = imported(some_codes()[..., first : first + 4], *state)
        pieces.append(np.array(samples))
    wanted = whole[:, : 12 * FRAME]
    assert_close(np.concatenate(pieces, axis=1), wanted, 1e-5, "exported step")


def test_codes_are_clamped_into_their_books(decoder: CodecDecoder) -> None:
    rng = np.random.default_rng(7)
    wild = rng.integers(-3, 100, (1, 10, 6)).astype(np.int32)
    tame = np.clip(wild, 0, np.array([63] + [31] * 9)[None, :, None])
    assert (wild != tame).any()
    got, wanted = (np.array(decoder.decode(mx.array(c))) for c in (wild, tame))
    assert np.array_equal(got, wanted)
    high = tame.copy()
    high[0, 0, 0], high[0, 1, 0] = 63, 31
    low = high.copy()
    low[0, 0, 0] = 31
    assert not np.array_equal(decoder.decode(mx.array(high)), decoder.decode(mx.array(low)))


@pytest.mark.parametrize("dtype", [mx.int16, mx.int64, mx.uint16])
def test_any_integer_type_of_codes(decoder: CodecDecoder, dtype: mx.Dtype) -> None:
    codes = some_codes(frames=3)
    assert np.array_equal(decoder.decode(codes.astype(dtype)), decoder.decode(codes))


def test_no_frames_give_no_samples(decoder: CodecDecoder) -> None:
    assert decoder.decode(some_codes(frames=0)).shape == (1, 0)
    state = decoder.initial_state()
    samples, after = decoder.step(some_codes(frames=0), state)
    assert samples.shape == (1, 0)
    assert after is state


def test_sixteen_bit_weights(folder: Path, whole: np.ndarray) -> None:
    half = load_decoder(folder, mx.float16)
    assert {a.dtype for a in half.initial_state()} == {mx.float16, mx.int32}
    samples = half.decode(some_codes()[..., :2])
    assert samples.dtype == mx.float32
    assert_close(samples, whole[:, : 2 * FRAME], 0.05, "float16")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (mx.zeros((10, 4), dtype=mx.int32), "batch axis"),
        (mx.zeros((1, 9, 4), dtype=mx.int32), r"\[batch, 10, frames\]"),
        (mx.zeros((1, 4, 10), dtype=mx.int32), "swap"),
        (mx.zeros((1, 10, 4)), "integers"),
    ],
)
def test_wrong_codes_are_refused(decoder: CodecDecoder, codes: mx.array, message: str) -> None:
    with pytest.raises(WarbleError, match=message):
        decoder.decode(codes)
    with pytest.raises(WarbleError, match=message):
        decoder.step(codes, decoder.initial_state())


def test_a_foreign_state_is_refused(decoder: CodecDecoder) -> None:
    state, codes = decoder.initial_state(), some_codes(frames=2)
    for wrong in (decoder.initial_state(2), state[:-1], (*state, state[0]), state[::-1]):
        with pytest.raises(WarbleError, match="initial_state"):
            decoder.step(codes, wrong)


def test_senseless_sizes_are_refused(decoder: CodecDecoder) -> None:
    with pytest.raises(WarbleError, match="chunk_frames"):
        decoder.decode(some_codes(), chunk_frames=0)
    with pytest.raises(WarbleError, match="0 rows"):
        decoder.initial_state(0)


def test_chunks_stay_below_the_convolution_limit() -> None:
    for rows in range(1, 16):
        frames = convolution.chunk_frames_for(rows * FRAME)
        assert frames >= 1
        assert rows * (frames * FRAME + 54) < convolution.MAX_CONV_OUTPUTS


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_encoding_does_not_depend_on_the_chunks(
    encoder: CodecEncoder, decoder: CodecDecoder, chunk: int
) -> None:
    samples = some_samples(1, 12 * FRAME - 100)
    wanted, _ = encoder.encode(samples, decoder.quantizer)
    got, _ = encoder.encode(samples, decoder.quantizer, chunk_frames=chunk)
    assert wanted.shape == (1, 10, 12)
    assert len(np.unique(np.array(wanted))) > 10
    assert_same_codes(np.array(got)[0], np.array(wanted)[0], f"chunks of {chunk}")


def test_a_padded_batch_encodes_like_its_rows(encoder: CodecEncoder, decoder: CodecDecoder) -> None:
    samples = some_samples(2, 6 * FRAME + 1)
    lengths = [6 * FRAME + 1, 3 * FRAME]
    codes, frames = encoder.encode(samples, decoder.quantizer, lengths)
    assert frames == [7, 3]
    assert codes.dtype == mx.int32
    for row, (length, count) in enumerate(zip(lengths, frames, strict=True)):
        alone, _ = encoder.encode(samples[row : row + 1, :length], decoder.quantizer)
        assert_same_codes(np.array(codes)[row, :, :count], np.array(alone)[0], f"row {row}")
        assert (np.array(codes)[row, :, count:] == PADDING_CODE).all()


def test_samples_after_a_rows_end_are_not_heard(
    encoder: CodecEncoder, decoder: CodecDecoder
) -> None:
    samples = np.array(some_samples(1, 2 * FRAME))
    samples[:, 3000:] = 1
    silent = samples.copy()
    silent[:, 3000:] = 0
    loud, _ = encoder.encode(mx.array(samples), decoder.quantizer, [3000])
    quiet, _ = encoder.encode(mx.array(silent), decoder.quantizer, [3000])
    other, _ = encoder.encode(mx.array(samples), decoder.quantizer)
    assert np.array_equal(loud, quiet)
    assert not np.array_equal(loud, other)


@pytest.mark.parametrize(
    ("samples", "lengths", "message"),
    [
        (mx.zeros((4096,)), None, "batch axis"),
        (mx.zeros((0, 4096)), None, "batch axis"),
        (mx.zeros((1, 4096), dtype=mx.int16), None, "float32"),
        (mx.zeros((1, 0)), None, "lengths"),
        (mx.zeros((2, 4096)), [4096], "lengths"),
        (mx.zeros((2, 4096)), [4096, 4097], "lengths"),
    ],
)
def test_wrong_samples_are_refused(
    encoder: CodecEncoder,
    decoder: CodecDecoder,
    samples: mx.array,
    lengths: list[int] | None,
    message: str,
) -> None:
    with pytest.raises(WarbleError, match=message):
        encoder.encode(samples, decoder.quantizer, lengths)


def test_an_encoder_without_transformers_has_none() -> None:
    bare = CodecEncoder(small_config(codec_encoder_transformer_layers=[0, 0, 0, 0]))
    assert [len(block.block) for block in bare.encoder.block[1:5]] == [5, 5, 5, 5]
