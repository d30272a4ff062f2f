"""Codecs that tests load: files of the bundle layout into modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import synthetic

from warble_mlx.codec import CodecDecoder, CodecEncoder
from warble_mlx.config import ModelConfig, parse_config, read_config
from warble_mlx.weights import DECODER_FILE, ENCODER_FILE, load_strictly

ENCODER_PARTS = ("encoder.", "quantizer.downsample.", "quantizer.pre_module.")


def small_config(**changes: Any) -> ModelConfig:
    """The small synthetic checkpoint's config, window 8."""
    return parse_config(json.dumps(synthetic.config(**changes)), "small config")


def write_small_codec(folder: Path) -> Path:
    """Both codec files of the small synthetic checkpoint, in the bundle layout."""
    tensors = synthetic.channels_last(synthetic.folded(synthetic.codec(synthetic.config())))
    encoder = {n for n in tensors if n.startswith(ENCODER_PARTS) or ".in_proj." in n}
    halves = ((ENCODER_FILE, encoder), (DECODER_FILE, tensors.keys() - encoder))
    for file, names in halves:
        synthetic.write(folder / file, {name: tensors[name] for name in sorted(names)}, "mlx")
    synthetic.write_json(folder / "config.json", synthetic.config())
    return folder


def load_decoder(folder: Path, dtype: mx.Dtype = mx.float32) -> CodecDecoder:
    """The decoder of a bundle."""
    decoder = CodecDecoder(read_config(folder))
    load_strictly(decoder, folder / DECODER_FILE, dtype, {})
    return decoder


def load_encoder(folder: Path, dtype: mx.Dtype = mx.float32) -> CodecEncoder:
    """The encoder of a bundle."""
    encoder = CodecEncoder(read_config(folder))
    load_strictly(encoder, folder / ENCODER_FILE, dtype, {})
    return encoder
