"""A bundle against the one that it was made from: everything that the report shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import msgspec

from warble_mlx import __version__
from warble_mlx.bench.cost import frame_reads, total_bytes
from warble_mlx.bench.synthetic import layout
from warble_mlx.config import ModelConfig, read_config_json
from warble_mlx.errors import WarbleError
from warble_mlx.fidelity.divergence import Divergence, Reference
from warble_mlx.fidelity.free_running import FreeRunning, compare_lengths
from warble_mlx.fidelity.streams import TokenStream, digest, generate, requests_for
from warble_mlx.fidelity.waveform import WaveformDifference, compare_decoders
from warble_mlx.quant.policy import Packing, packing
from warble_mlx.safetensors_file import read_header
from warble_mlx.speech import Warble
from warble_mlx.weights import MODEL_FILE, quantisation_of

SEED = 1001  # not one of the calibration's
SLOTS = 256  # of the cache when bytes are counted, the length most sentences need

Progress = Callable[[str], None]


class Fidelity(msgspec.Struct, frozen=True):
    """What a bundle costs in quality, and what it saves."""

    reference: str
    bundle: str
    texts: int
    texts_sha256: str
    divergence: Divergence
    free_running: FreeRunning
    waveform: WaveformDifference
    bytes_per_frame: int
    reference_bytes_per_frame: int
    model_bytes: int
    reference_model_bytes: int
    version: str = __version__


def compare(
    reference: Path,
    bundle: Path,
    texts: Sequence[str],
    *,
    seed: int = SEED,
    name: str | None = None,
    progress: Progress | None = None,
) -> Fidelity:
    """Compare two bundles on the token streams that the first makes of `texts`.

    name: what the second is called in the report, if not by its folder.

    Computed in float32 from unpacked weights, so that it is the weights that differ and not the
    kernels. Raises WarbleError if the two are not the same kind of model.
    """
    tell = progress or _silent
    first, second = open_float32(reference), open_float32(bundle)
    check_comparable(first.config, second.config)
    asked = requests_for(first, texts, seed)
    tell(f"the reference speaks {len(texts)} texts")
    spoken = generate(first.engine, asked)
    streams = with_frames(spoken)
    tell("both read them")
    divergence = Reference(first.engine.model, streams).compare(second.engine.model)
    tell("the bundle speaks them")
    free = compare_lengths(spoken, generate(second.engine, asked))
    tell("both codecs play them")
    return Fidelity(
        reference=reference.name,
        bundle=name or bundle.name,
        texts=len(texts),
        texts_sha256=digest(texts),
        divergence=divergence,
        free_running=free,
        waveform=compare_decoders(reference, bundle, streams),
        bytes_per_frame=bytes_per_frame(first.config, stored_packings(bundle)),
        reference_bytes_per_frame=bytes_per_frame(first.config, stored_packings(reference)),
        model_bytes=(bundle / MODEL_FILE).stat().st_size,
        reference_model_bytes=(reference / MODEL_FILE).stat().st_size,
    )


def open_float32(folder: Path) -> Warble:
    """A bundle with all its weights unpacked to float32."""
    return Warble(folder, folder.name, dtype="float32", dequantize=True)


def spoken_streams(folder: Path, texts: Sequence[str], seed: int = SEED) -> list[TokenStream]:
    """What a bundle makes of texts."""
    warble = open_float32(folder)
    return with_frames(generate(warble.engine, requests_for(warble, texts, seed)))


def with_frames(streams: Sequence[TokenStream]) -> list[TokenStream]:
    """The streams that hold anything; raises WarbleError if none does."""
    found = [stream for stream in streams if stream.frames]
    if not found:
        raise WarbleError(
            "the reference made no frame of any text, so there is nothing to compare: is it a"
            " trained model?"
        )
    return found


def check_comparable(first: ModelConfig, second: ModelConfig) -> None:
    """Raise WarbleError unless both models have the same dimensions."""
    differing = [n for n in first.__struct_fields__ if getattr(first, n) != getattr(second, n)]
    if differing:
        name = differing[0]
        raise WarbleError(
            f"the two are different models: {name} is {getattr(first, name)} in the one and"
            f" {getattr(second, name)} in the other. Give a bundle and what it was made from"
        )


def stored_packings(folder: Path) -> dict[str, Packing]:
    """How each packed Linear of a bundle is packed, by path; empty for a 16-bit one."""
    path = folder / MODEL_FILE
    names = [n.removesuffix(".scales") for n in read_header(path).entries if n.endswith(".scales")]
    found = quantisation_of(read_config_json(folder), names, path)
    return {
        name: packing(own.get("bits"), own.get("group_size"), own.get("mode", "affine"))
        for name, own in found.items()
    }


def bytes_per_frame(config: ModelConfig, packings: Mapping[str, Packing]) -> int:
    """What a frame step reads from memory with the Linears packed so, activations in bfloat16."""
    return total_bytes(frame_reads(layout(config, packings), SLOTS, mx.bfloat16))


def _silent(_: str) -> None:
    return
