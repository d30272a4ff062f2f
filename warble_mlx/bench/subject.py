"""What is measured: a bundle, or a model made in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.backend import default_dtype, on_gpu
from warble_mlx.bench.generation import SpeechTimes, stream
from warble_mlx.bench.synthetic import GEOMETRIES, SEED, Size, random_codec, runnable
from warble_mlx.config import ModelConfig
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.errors import WarbleError
from warble_mlx.prompt import Prompt
from warble_mlx.quant.policy import Packing, packing

# Long enough for 150 frames, seven seconds, of unhurried speech.
TEXT = (
    "Measure the time that a frame takes, then count what it has to read: one of the two tells"
    " what to change, and the other one tells when to stop."
)
PREFIX_COLUMNS = 20  # of a synthetic prompt; as long as the instruction before the text
PROMPT_COLUMNS = 64


@dataclass(frozen=True)
class Subject:
    """A loaded model and the ways to run it. `request` takes a seed and a number of frames."""

    name: str
    fingerprint: str  # SHA-256 of the weights file, or of what a synthetic model follows from
    config: ModelConfig
    dtype: str
    stored: Packing | None  # how the blocks' Linears are packed, None: 16 bits
    packed: bool  # they are packed in memory, too
    compiled: bool
    engine: Engine
    request: Callable[[int, int], Request]
    speak: Callable[[int, int], SpeechTimes]


def dtype_named(name: str | None) -> tuple[str, mx.Dtype]:
    """A dtype and its name; this device's default if none is given."""
    known = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
    name = name or default_dtype()
    if name not in known:
        raise WarbleError(f"dtype {name!r} is not one of {', '.join(known)}")
    return name, known[name]


def synthetic_subject(
    size: Size = "full",
    *,
    bits: int = 16,
    dtype: str | None = None,
    prompt_columns: int = PROMPT_COLUMNS,
) -> Subject:
    """A model of the published geometry, or of a tiny one, with random weights and a codec.

    bits: 16, or 4 or 8 for the transformer blocks' Linears. On a CPU these are unpacked again, as
    the runtime does. prompt_columns: length of the prompt, which decides on the cache's length.
    """
    if size not in GEOMETRIES:
        raise WarbleError(f"size {size!r} is not one of {', '.join(GEOMETRIES)}")
    if prompt_columns <= PREFIX_COLUMNS:
        raise WarbleError(f"a prompt needs more than {PREFIX_COLUMNS} columns")
    gpu = on_gpu()
    name, activations = dtype_named(dtype)
    config = GEOMETRIES[size]
    stored = None if bits == 16 else packing(bits)
    engine = Engine(runnable(config, activations, stored, packed=gpu), compiled=gpu)
    decoder = random_codec(config)
    prompt = synthetic_prompt(config, prompt_columns)

    def request(seed: int, frames: int) -> Request:
        return Request(prompt, frames, Sampling(), seed)

    recipe = [SEED, size, bits, msgspec.to_builtins(config)]
    return Subject(
        name=f"synthetic {size}, {bits}-bit",
        fingerprint=hashlib.sha256(msgspec.json.encode(recipe)).hexdigest(),
        config=config,
        dtype=name,
        stored=stored,
        packed=gpu and stored is not None,
        compiled=gpu,
        engine=engine,
        request=request,
        speak=lambda seed, frames: stream(engine, decoder, request(seed, frames)),
    )


def synthetic_prompt(config: ModelConfig, columns: int = PROMPT_COLUMNS) -> Prompt:
    """Columns of random text ids, the same each time."""
    ids = np.random.default_rng(SEED).integers(0, config.eos_token_id, columns)
    packed = np.zeros((config.num_codebooks + 1, columns), np.int32)
    packed[0] = ids
    return Prompt(packed[:, :PREFIX_COLUMNS], packed[:, PREFIX_COLUMNS:])


def bundle_subject(
    model: str | Path | None = None, *, dtype: str | None = None, offline: bool = False
) -> Subject:
    """A bundle, loaded as `warble_mlx.load` does; it says `TEXT` with its default voice.

    It ends when it likes, so that a run may have fewer frames than it is allowed.
    """
    from warble_mlx.prompt import PromptBuilder
    from warble_mlx.speech import load
    from warble_mlx.weights import MODEL_FILE

    warble = load(model, dtype=dtype, offline=offline)
    config, voice, decoder = warble.config, warble.default_voice, warble._decoder
    prompt = PromptBuilder.from_folder(warble.folder, config).build(
        TEXT, speaker=voice.token if voice else ""
    )

    def request(seed: int, frames: int) -> Request:
        return Request(prompt, frames, warble.defaults, seed)

    stored = stored_packing(warble.folder)
    gpu = on_gpu()
    return Subject(
        name=warble.name,
        fingerprint=sha256_of(warble.folder / MODEL_FILE),
        config=config,
        dtype=warble.dtype,
        stored=stored,
        packed=gpu and stored is not None,
        compiled=gpu,
        engine=warble.engine,
        request=request,
        speak=lambda seed, frames: stream(warble.engine, decoder, request(seed, frames)),
    )


def stored_packing(folder: Path) -> Packing | None:
    """The default packing in a bundle's config; single Linears may differ from it."""
    from warble_mlx.config import read_config_json

    block = read_config_json(folder).get("quantization")
    if not isinstance(block, dict):
        return None
    return packing(block.get("bits"), block.get("group_size"), block.get("mode", "affine"))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
