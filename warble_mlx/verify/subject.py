"""The bundle that is held against a dump, loaded as the product loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from warble_mlx.backend import on_gpu
from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.config import ModelConfig, read_config, read_config_json
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine
from warble_mlx.prompt import PromptBuilder
from warble_mlx.safetensors_file import read_header
from warble_mlx.weights import DECODER_FILE, ENCODER_FILE, load_dual_ar, load_strictly

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Subject:
    """Parts that are None are not there; their rungs are skipped."""

    config: ModelConfig
    model: DualAR
    engine: Engine
    decoder: CodecDecoder | None = None
    encoder: CodecEncoder | None = None
    codec_dtype: str | None = None  # in which the codec is stored
    prompts: PromptBuilder | None = None
    packed: bool = False  # the transformers' Linears are quantised
    compiled: bool = False  # the engine's frame step is


def load_subject(folder: Path, dtype: str) -> Subject:
    """Load a bundle, or a published checkpoint's transformers, for computing in `dtype`.

    As in the runtime the frame step is compiled on a GPU only, and packed weights are unpacked on
    a CPU. Raises CheckpointError.
    """
    config = read_config(folder)
    gpu = on_gpu()
    kinds = {"float32": mx.float32, "bfloat16": mx.bfloat16}
    model = load_dual_ar(folder, kinds[dtype], dequantize=not gpu)
    decoder, encoder, stored = None, None, None
    if (folder / DECODER_FILE).is_file():
        decoder = CodecDecoder(config)
        load_strictly(decoder, folder / DECODER_FILE, mx.float32, {})
        kinds_stored = {
            entry.dtype for entry in read_header(folder / DECODER_FILE).entries.values()
        }
        stored = _NAMES[min(kinds_stored - {"F32"}, default="F32")]
    if decoder is not None and (folder / ENCODER_FILE).is_file():
        encoder = CodecEncoder(config)
        load_strictly(encoder, folder / ENCODER_FILE, mx.float32, {})
    prompts = None
    if (folder / "tokenizer.json").is_file():
        prompts = PromptBuilder.from_folder(folder, config)
    return Subject(
        config=config,
        model=model,
        engine=Engine(model, compiled=gpu),
        decoder=decoder,
        encoder=encoder,
        codec_dtype=stored,
        prompts=prompts,
        packed="quantization" in read_config_json(folder),
        compiled=gpu,
    )
