"""Prefill, frame step and codec as exported MLX functions.

Two files, each with one copy of its weights and several traces of one function: MLX picks the
trace by the number and the shapes of the arrays it is given.

`lm.mlxfn`, with K_0 … K_n the KV caches of the slow AR's layers, [2, 1, heads, S, head_dim]:

    prefill   columns, slot, hole, K_0 … K_n                    -> hidden, K_0 … K_n
    frame     hidden, slot, hole, recent, frame, top_k, top_p,  -> emitted, hidden, slot, recent,
              temperature, noise_semantic, noise_codes, K…         frame, K…

`codec.mlxfn`:

    codec     codes, S_0 … S_m                                  -> samples, S_0 … S_m

Sampling noise and settings are inputs, so a file holds no randomness and no policy. Positions
beyond a cache's length must not be asked for: the app picks the length for prompt and frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from warble_mlx.codec import CodecDecoder
from warble_mlx.codec.convolution import gpu_forms
from warble_mlx.config import NUM_CODEBOOKS, ModelConfig, read_config
from warble_mlx.dual_ar import DualAR, last_position
from warble_mlx.engine import Engine, State
from warble_mlx.errors import CheckpointError
from warble_mlx.ios_export.manifest import Function, Tensor
from warble_mlx.ios_export.manifest import State as StateRecord
from warble_mlx.safetensors_file import read_header
from warble_mlx.sampling import Settings
from warble_mlx.weights import DECODER_FILE, load_dual_ar, load_strictly

LM_FILE = "lm.mlxfn"
CODEC_FILE = "codec.mlxfn"
PREFILL_LENGTHS = (32, 128)  # columns a prefill reads at once; a prompt is left-padded to 32
CACHE_LENGTHS = (512, 1024, 2048)
FIRST_FRAMES = 1  # the shortest way to first sound
CHUNK_FRAMES = 7  # keeps every axis of the codec below AXIS_LIMIT
AXIS_LIMIT = 16_384
CODEC_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}

Arrays = Sequence[mx.array]


class Loaded(NamedTuple):
    """A bundle's modules as they are exported."""

    config: ModelConfig
    model: DualAR
    engine: Engine
    codec: CodecDecoder  # weights in the bundle's own dtype
    dtype: mx.Dtype


def load_for_export(bundle: Path, dtype: mx.Dtype) -> Loaded:
    """Transformers with packed weights kept packed and activations in `dtype`, and the codec with
    its weights as they are stored."""
    config = read_config(bundle)
    model = load_dual_ar(bundle, dtype, traced=True)
    codec = CodecDecoder(config)
    kinds = {entry.dtype for entry in read_header(bundle / DECODER_FILE).entries.values()}
    if len(kinds) != 1 or not kinds <= CODEC_DTYPES.keys():
        raise CheckpointError(
            f"{bundle / DECODER_FILE} mixes {', '.join(sorted(kinds))}: convert the model again"
        )
    load_strictly(codec, bundle / DECODER_FILE, CODEC_DTYPES[kinds.pop()], {})
    codec.quantizer.post_module.limit_positions(config.max_seq_len)
    return Loaded(config, model, Engine(model, compiled=False), codec, dtype)


def cache_lengths(config: ModelConfig) -> tuple[int, ...]:
    """Cache lengths that are exported: the context's own is the largest."""
    longest = config.max_seq_len
    return (*(n for n in CACHE_LENGTHS if n < longest), longest)


# ---------------------------------------------------------------------- the functions


class LanguageModel:
    """The function of `lm.mlxfn`, callable with the arrays of any of its traces."""

    def __init__(self, loaded: Loaded) -> None:
        self._model, self._engine = loaded.model, loaded.engine
        self._layers = loaded.config.n_layer

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        caches, given = list(arrays[-self._layers :]), arrays[: -self._layers]
        if len(given) == 3:
            return self._prefill(*given, caches=caches)
        return self._frame(given, caches)

    def _prefill(
        self, columns: mx.array, slot: mx.array, hole: mx.array, *, caches: list[mx.array]
    ) -> list[mx.array]:
        x = self._model.embed(columns)
        hidden, caches = self._model.advance(x, slot, hole, caches)
        return [last_position(hidden), *caches]

    def _frame(self, given: Arrays, caches: list[mx.array]) -> list[mx.array]:
        hidden, slot, hole, recent, frame, top_k, top_p, temperature, semantic, codes = given
        state = State(hidden, slot, hole, recent, frame, caches)
        settings = Settings(top_k, top_p, temperature)
        emitted, state = self._engine.frame_step(state, settings, (semantic, codes))
        kept = (state.hidden, state.slot, state.recent, state.frame)
        return [emitted, *kept, *state.caches]


class Codec:
    """The function of `codec.mlxfn`. Weights stay in 16 bits in the file; arithmetic is float32,
    as in the runtime, so every weight is widened where it is used."""

    def __init__(self, loaded: Loaded) -> None:
        self._codec = loaded.codec
        self._stored = loaded.codec.parameters()

    def __call__(self, *arrays: mx.array) -> list[mx.array]:
        codes, *state = arrays
        with self._widened():
            samples, state_after = self._codec.step(codes, tuple(state))
        return [samples, *state_after]

    def initial_state(self) -> list[mx.array]:
        """Zeros, one per array of the state."""
        with self._widened():
            return list(self._codec.initial_state())

    @contextmanager
    def _widened(self) -> Iterator[None]:
        self._codec.update(tree_map(lambda w: w.astype(mx.float32), self._stored))
        try:
            yield
        finally:
            self._codec.update(self._stored)


# ---------------------------------------------------------------------- inputs of each trace


def prefill_inputs(loaded: Loaded, length: int, slots: int) -> list[mx.array]:
    """Zeros of the shapes of a prefill trace."""
    columns = mx.zeros((1, NUM_CODEBOOKS + 1, length), mx.int32)
    slot, hole = mx.zeros((1,), mx.int32), mx.zeros((1, 2), mx.int32)
    return [columns, slot, hole, *loaded.model.empty_caches(1, slots)]


def frame_inputs(loaded: Loaded, slots: int) -> list[mx.array]:
    """Zeros of the shapes of a frame trace."""
    c = loaded.config
    return [
        mx.zeros((1, c.dim), loaded.dtype),
        mx.zeros((1,), mx.int32),
        mx.zeros((1, 2), mx.int32),
        mx.zeros((1, c.ras_window_size), mx.uint32),
        mx.zeros((1,), mx.int32),
        mx.zeros((1,), mx.int32),
        mx.zeros((1,)),
        mx.zeros((1,)),
        mx.zeros((2, 1, c.head_rows)),
        mx.zeros((c.num_codebooks - 1, 1, c.codebook_size)),
        *loaded.model.empty_caches(1, slots),
    ]


PREFILL_NAMES = {
    "columns": "text or semantic id, then ten codes (zero at text), pad ids on the left",
    "slot": "cache slot of the first column",
    "hole": "cache slots [begin, end) that hold padding",
}
FRAME_NAMES = {
    "hidden": "what prefill or the last frame gave",
    "slot": "next free cache slot",
    "hole": PREFILL_NAMES["hole"],
    "recent": "repetition window of semantic indices; 4294967295 is nothing",
    "frame": "frames emitted so far",
    "top_k": "1 is greedy",
    "top_p": "probability mass kept",
    "temperature": "at least 1e-5",
    "noise_semantic": "uniform in [0, 1): regular draw, then rescue draw",
    "noise_codes": "uniform in [0, 1), one row per book 1..9",
}
FRAME_OUTPUTS = {
    "emitted": "semantic index (codebook_size is EOS), then ten codes",
    "hidden": "",
    "slot": "",
    "recent": "",
    "frame": "",
}


def write_language_model(loaded: Loaded, folder: Path) -> list[Function]:
    """Write lm.mlxfn; returns what its traces take and give."""
    function = LanguageModel(loaded)
    functions = []
    with mx.exporter(str(folder / LM_FILE), function) as export:
        for slots in cache_lengths(loaded.config):
            for length in PREFILL_LENGTHS:
                if length > slots:
                    continue
                arrays = prefill_inputs(loaded, length, slots)
                export(*arrays)
                functions.append(_prefill_record(function, arrays, length, slots))
            arrays = frame_inputs(loaded, slots)
            export(*arrays)
            functions.append(_frame_record(function, arrays, slots))
    return functions


def write_codec(loaded: Loaded, folder: Path, *, for_gpu: bool) -> list[Function]:
    """Write codec.mlxfn, in the forms that suit a GPU or a CPU."""
    function = Codec(loaded)
    functions = []
    state = function.initial_state()
    with mx.exporter(str(folder / CODEC_FILE), function) as export:
        for name, frames in (("codec_first", FIRST_FRAMES), ("codec_stream", CHUNK_FRAMES)):
            arrays = [mx.zeros((1, NUM_CODEBOOKS, frames), mx.int32), *state]
            if for_gpu:
                with gpu_forms():
                    export(*arrays)
            else:
                export(*arrays)
            functions.append(_codec_record(name, arrays, loaded.config))
    return functions


# ---------------------------------------------------------------------- what the manifest says


def _tensor(name: str, array: mx.array, about: str = "") -> Tensor:
    kind = str(array.dtype).removeprefix("mlx.core.")
    return Tensor(name=name, shape=tuple(array.shape), dtype=kind, about=about)


def _caches(arrays: Arrays) -> StateRecord:
    return StateRecord(
        name="kv", tensors=tuple(_tensor(f"kv_{i}", cache) for i, cache in enumerate(arrays))
    )


def _named(names: dict[str, str], arrays: Arrays) -> tuple[Tensor, ...]:
    pairs = zip(names.items(), arrays, strict=True)
    return tuple(_tensor(name, array, about) for (name, about), array in pairs)


def _longest(arrays: Arrays, least: int = 0) -> int:
    return max(least, *(size for array in arrays for size in array.shape))


def _prefill_record(function: LanguageModel, arrays: Arrays, length: int, slots: int) -> Function:
    result = function(*arrays)  # lazy: only its shapes are read
    given = len(PREFILL_NAMES)
    return Function(
        name=f"prefill_{length}_{slots}",
        file=LM_FILE,
        inputs=_named(PREFILL_NAMES, arrays[:given]),
        outputs=(_tensor("hidden", result[0]),),
        states=(_caches(arrays[given:]),),
        longest_axis=_longest([*arrays, *result]),
        about=f"{length} prompt columns into caches of {slots} slots",
    )


def _frame_record(function: LanguageModel, arrays: Arrays, slots: int) -> Function:
    result = function(*arrays)
    given = len(FRAME_NAMES)
    return Function(
        name=f"frame_{slots}",
        file=LM_FILE,
        inputs=_named(FRAME_NAMES, arrays[:given]),
        outputs=_named(FRAME_OUTPUTS, result[: len(FRAME_OUTPUTS)]),
        states=(_caches(arrays[given:]),),
        longest_axis=_longest([*arrays, *result]),
        about=f"one frame with caches of {slots} slots",
    )


def _codec_record(name: str, arrays: Arrays, config: ModelConfig) -> Function:
    codes, *state = arrays
    frames = codes.shape[2]
    samples = frames * config.codec_frame_size
    carried = _longest(state[1:])  # at most this much context stands before the samples
    return Function(
        name=name,
        file=CODEC_FILE,
        inputs=(_tensor("codes", codes, "codes of the next frames, by codebook"),),
        outputs=(Tensor(name="samples", shape=(1, samples), dtype="float32", about="in -1..1"),),
        states=(
            StateRecord(
                name="codec", tensors=tuple(_tensor(f"s_{i}", s) for i, s in enumerate(state))
            ),
        ),
        longest_axis=max(samples + 54, carried),
        about=f"{frames} frames of {config.codec_frame_size} samples",
    )
