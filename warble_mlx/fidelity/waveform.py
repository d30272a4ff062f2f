"""What storing the codec in fewer bits does to the samples, on real speech tokens.

Arithmetic is float32 throughout, as in the runtime: only what the file keeps differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from warble_mlx.codec import CodecDecoder
from warble_mlx.config import ModelConfig, read_config
from warble_mlx.fidelity.streams import TokenStream
from warble_mlx.quant.affine import unpacked
from warble_mlx.quant.policy import Packing
from warble_mlx.weights import DECODER_FILE, joined_gates, load_strictly

Store = Callable[[str, mx.array], tuple[mx.array, int]]
"""A tensor's name and value to what a file would give back, float32, and the bytes it takes."""

STREAMS = 8  # of all; a minute of speech is plenty
EIGHT_BITS = Packing(8, 64, "affine")


class WaveformDifference(msgspec.Struct, frozen=True):
    """Of samples within -1 … 1. `snr_db` is None where nothing differs."""

    snr_db: float | None
    largest: float
    seconds: float


class StoredCodec(msgspec.Struct, frozen=True):
    """One way to store the decoder."""

    name: str
    nbytes: int
    difference: WaveformDifference


def decode(decoder: CodecDecoder, streams: Sequence[TokenStream]) -> list[npt.NDArray[np.float32]]:
    """Samples of each stream."""
    return [np.array(decoder.decode(mx.array(s.codes)[None])[0]) for s in streams]


def difference(
    reference: Sequence[npt.NDArray[np.float32]],
    own: Sequence[npt.NDArray[np.float32]],
    sample_rate: int,
) -> WaveformDifference:
    """Signal-to-noise ratio over all samples, and the largest single difference."""
    signal, other = np.concatenate(reference), np.concatenate(own)
    error = other.astype(np.float64) - signal
    noise = float(np.square(error).sum())
    power = float(np.square(signal.astype(np.float64)).sum())
    ratio = 10 * math.log10(power / noise) if noise and power else None
    return WaveformDifference(ratio, float(np.abs(error).max()), len(signal) / sample_rate)


def compare_decoders(
    reference: Path, bundle: Path, streams: Sequence[TokenStream]
) -> WaveformDifference:
    """The decoders of two bundles, each as it is stored, on the same codes."""
    chosen = [stream for stream in streams if stream.frames][:STREAMS]
    rate = read_config(reference).codec_sample_rate
    first, second = (decode(_stored(folder), chosen) for folder in (reference, bundle))
    return difference(first, second, rate)


def storage_choices(folder: Path, streams: Sequence[TokenStream]) -> list[StoredCodec]:
    """The decoder of a bundle stored in several ways, each against the file as it is."""
    chosen = [stream for stream in streams if stream.frames][:STREAMS]
    config = read_config(folder)
    loaded = mx.load(str(folder / DECODER_FILE))
    assert isinstance(loaded, dict)
    original = decode(_stored(folder), chosen)
    found = []
    for name, store in CHOICES.items():
        kept = {key: store(key, value) for key, value in loaded.items()}
        decoder = _with(config, folder, {key: value for key, (value, _) in kept.items()})
        found.append(
            StoredCodec(
                name,
                sum(nbytes for _, nbytes in kept.values()),
                difference(original, decode(decoder, chosen), config.codec_sample_rate),
            )
        )
    return found


def _stored(folder: Path) -> CodecDecoder:
    decoder = CodecDecoder(read_config(folder))
    load_strictly(decoder, folder / DECODER_FILE, mx.float32, {})
    return decoder


def _with(config: ModelConfig, folder: Path, weights: Mapping[str, mx.array]) -> CodecDecoder:
    """The decoder with other values, under the file's names."""
    decoder = _stored(folder)
    joined = joined_gates(dict(weights), folder / DECODER_FILE)
    decoder.load_weights(list(joined.items()), strict=True)
    mx.eval(decoder.parameters())
    return decoder


def _cast(dtype: mx.Dtype) -> Store:
    def store(_: str, value: mx.array) -> tuple[mx.array, int]:
        return value.astype(dtype).astype(mx.float32), value.size * dtype.size

    return store


def _packed_linears(rest: mx.Dtype) -> Store:
    """The transformers' Linears in 8 bits, everything else in `rest`."""
    plain = _cast(rest)

    def store(name: str, value: mx.array) -> tuple[mx.array, int]:
        linear = value.ndim == 2 and (".attention." in name or ".feed_forward." in name)
        if not linear or value.shape[-1] % EIGHT_BITS.group_size:
            return plain(name, value)
        parts = mx.quantize(value.astype(rest), **EIGHT_BITS._asdict())
        return unpacked(parts, EIGHT_BITS), sum(part.nbytes for part in parts)

    return store


CHOICES: Mapping[str, Store] = {
    "float32": _cast(mx.float32),
    "float16": _cast(mx.float16),
    "bfloat16": _cast(mx.bfloat16),
    "float16, transformer Linears in 8 bits": _packed_linears(mx.float16),
}
