"""Bundles of this package, read back into the published layout; quantised weights dequantised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.codec import Codec
from reference.load import Weights, read_safetensors
from warble_mlx.config import read_config, read_config_json

TRANSPOSED = re.compile(
    r"decoder\.model\.\d\.block\.1\.conv\.weight|quantizer\.upsample\.\d\.0\..*"
)


def read_bundle_model(folder: Path) -> Weights:
    """Tensors of the two transformers, quantised ones as float32."""
    stored = read_safetensors(folder / "model.safetensors")
    block = read_config_json(folder).get("quantization", {})
    for name in [n.removesuffix(".scales") for n in stored if n.endswith(".scales")]:
        own = block.get(name)
        settings = {**block, **own} if isinstance(own, dict) else block
        stored[f"{name}.weight"] = dequantised(
            stored[f"{name}.weight"],
            stored.pop(f"{name}.scales"),
            stored.pop(f"{name}.biases"),
            settings,
        )
    return stored


def dequantised(packed: Tensor, scales: Tensor, biases: Tensor, settings: dict[str, Any]) -> Tensor:
    """Weight [out, in] from packed words [out, in * bits / 32] (low bits first) and one scale and
    bias [out, in / group] per group: scale * q + bias, in float32."""
    bits, mode = settings["bits"], settings.get("mode", "affine")
    if mode != "affine" or bits not in (2, 4, 8):
        raise ValueError(
            f"{bits} bits in mode {mode} are not read here, only 2, 4 and 8 affine ones"
        )
    words = packed.view(torch.int32).long() & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    q = ((words[..., None] >> shifts) & (2**bits - 1)).flatten(1).float()
    groups = q.unflatten(1, (-1, settings["group_size"]))
    return (groups * scales.float()[..., None] + biases.float()[..., None]).flatten(1)


def load_bundle_codec(folder: Path, device: str = "cpu") -> Codec:
    """The codec's halves in float32, channels first; decoding only if there is no encoder."""
    stored = read_safetensors(folder / "codec_decoder.safetensors")
    if (folder / "codec_encoder.safetensors").is_file():
        stored |= read_safetensors(folder / "codec_encoder.safetensors")
    placed = {name: channels_first(name, t).to(device, torch.float32) for name, t in stored.items()}
    return Codec(read_config(folder), placed)


def channels_first(name: str, tensor: Tensor) -> Tensor:
    """[out, k, in] or (transposed convolutions) [out, k, in] as PyTorch's [out, in, k] or
    [in, out, k]; Snake's [1, 1, C] as [1, C, 1]."""
    if tensor.ndim != 3:
        return tensor
    order = (2, 0, 1) if TRANSPOSED.fullmatch(name) else (0, 2, 1)
    return tensor.permute(order).contiguous()
