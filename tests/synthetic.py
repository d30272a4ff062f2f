"""A small arktts checkpoint with a codec, in every layout that checkpoints are published in.

The arithmetic that turns one layout into another is written here a second time, plainly, so that
the converter is held against something that is not itself. Values come from the golden data's
generator: each follows from its tensor's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from golden import make_checkpoint

Arrays = dict[str, np.ndarray]

DIMENSIONS = {
    "dim": 64,
    "n_layer": 2,
    "n_fast_layer": 2,
    "n_head": 4,
    "n_local_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "codebook_size": 64,
    "max_seq_len": 256,
}
CODEC = {
    "codec_encoder_dim": 8,
    "codec_encoder_transformer_layers": [0, 0, 0, 1],
    "codec_encoder_window_size": 16,
    "codec_latent_dim": 128,
    "codec_decoder_dim": 64,
    "codec_codebook_dim": 8,
    "codec_semantic_codebook_size": 64,
    "codec_residual_codebook_size": 32,
    "codec_window_size": 8,
    "codec_pre_n_layer": 1,
    "codec_pre_n_head": 2,
    "codec_pre_n_local_heads": 2,
    "codec_pre_intermediate_size": 192,
    "codec_post_n_layer": 2,
    "codec_post_n_head": 2,
    "codec_post_n_local_heads": 1,
    "codec_post_intermediate_size": 128,
}
# Transposed convolutions; every other three-dimensional weight is a plain one.
TRANSPOSED = tuple(f"decoder.model.{i}.block.1.conv.weight" for i in (1, 2, 3, 4)) + tuple(
    f"quantizer.upsample.{i}.0.conv.weight" for i in (0, 1)
)
NEW_FORM = (".parametrizations.weight.original0", ".parametrizations.weight.original1")
OLD_FORM = (".weight_g", ".weight_v")


def config(**changes: Any) -> dict[str, Any]:
    """config.json of the small model, with changed fields; a change to None removes the field."""
    _, _, ids = make_checkpoint.tokenizer_files(None, DIMENSIONS["codebook_size"])
    fields = make_checkpoint.build_config(DIMENSIONS, ids, 1, 128)
    fields |= {"codec_filename": "codec.safetensors", **CODEC, **changes}
    return {name: value for name, value in fields.items() if value is not None}


def language_model(fields: Mapping[str, Any]) -> Arrays:
    """The DualAR's tensors, as bfloat16 bits."""
    defaults = {"fast_dim": fields["dim"], **fields}
    return {
        name: make_checkpoint.to_bf16(make_checkpoint.make(name, shape, *rule))
        for name, shape, *rule in make_checkpoint.language_model(defaults)
    }


def codec(fields: Mapping[str, Any]) -> Arrays:
    """The codec's tensors in float32 as published: channels first, weight norm unfolded."""
    return {
        name: make_checkpoint.make(name, shape, *rule)
        for name, shape, *rule in make_checkpoint.codec(fields)
    }


def folded(tensors: Arrays) -> Arrays:
    """Weight norm folded, channels first: each slice along the first axis gets the length that
    the magnitude gives. In float64."""
    found = {}
    for name, value in tensors.items():
        for magnitude, direction in (NEW_FORM, OLD_FORM):
            if name.endswith(direction):
                stem = name.removesuffix(direction)
                lengths = tensors[stem + magnitude].astype(np.float64).reshape(-1)
                rows = [
                    row / np.linalg.norm(row.ravel()) * length
                    for row, length in zip(value.astype(np.float64), lengths, strict=True)
                ]
                found[f"{stem}.weight"] = np.stack(rows).astype(np.float32)
        if not name.endswith((*NEW_FORM, *OLD_FORM)):
            found[name] = value
    return found


def channels_last(tensors: Arrays) -> Arrays:
    """The axes of the MLX layouts, from folded channels-first tensors."""

    def turned(name: str, value: np.ndarray) -> np.ndarray:
        if value.ndim != 3:
            return value
        if name in TRANSPOSED:
            value = np.swapaxes(value, 0, 1)
        return np.ascontiguousarray(np.swapaxes(value, 1, 2))

    return {name: turned(name, value) for name, value in tensors.items()}


def renamed(tensors: Arrays, old: tuple[str, str], new: tuple[str, str]) -> Arrays:
    """The same tensors with weight norm under the other form's names."""
    for before, after in zip(old, new, strict=True):
        tensors = {
            name.removesuffix(before) + after if name.endswith(before) else name: value
            for name, value in tensors.items()
        }
    return tensors


def write_companions(folder: Path, fields: Mapping[str, Any]) -> None:
    """config.json, tokenizer.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, _, _ = make_checkpoint.tokenizer_files(None, DIMENSIONS["codebook_size"])
    make_checkpoint.write_json(folder / "config.json", fields)
    make_checkpoint.write_json(folder / "tokenizer.json", tokenizer)
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9}
    write_json(folder / "generation_config.json", {**generation, "max_new_tokens": 300})


def write_json(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value), encoding="utf-8")


def write(path: Path, tensors: Arrays, made_for: str = "pt") -> None:
    """Write a safetensors file of one dtype: uint16 is taken for bfloat16 bits."""
    dtype = {"uint16": "BF16", "float32": "F32", "float16": "F16"}
    (kind,) = {value.dtype.name for value in tensors.values()}
    make_checkpoint.write_safetensors(path, tensors, dtype[kind], made_for)


def write_source(
    folder: Path,
    *,
    edit_model: Callable[[Arrays], Arrays] = dict,
    edit_codec: Callable[[Arrays], Arrays] = dict,
    **changes: Any,
) -> Path:
    """The small checkpoint in the published PyTorch layout, codec as safetensors.

    `changes` are config fields, which the tensors follow; the edits get the tensors before they
    are written and may return others.
    """
    fields = config(**changes)
    write_companions(folder, fields)
    write(folder / "model.safetensors", edit_model(language_model(fields)))
    write(folder / "codec.safetensors", edit_codec(codec(fields)))
    return folder


def write_mlx_source(folder: Path) -> Path:
    """The small checkpoint in the layout that others have published for MLX."""
    fields = config()
    write_companions(folder, fields)
    model = {f"model.{name}": value for name, value in language_model(fields).items()}
    tensors = channels_last(folded(codec(fields)))
    write(folder / "model.safetensors", model, "mlx")
    codec_tensors = {f"codec.{name}": value for name, value in tensors.items()}
    write(folder / "codec.safetensors", codec_tensors, "mlx")
    return folder
