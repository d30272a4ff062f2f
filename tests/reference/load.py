"""Checkpoints in the published layout: model.safetensors (or shards) and the codec's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reference.codec import Codec
from reference.transformer import DualAR
from warble_mlx.config import ModelConfig, read_config
from warble_mlx.safetensors_file import read_header

Weights = dict[str, Tensor]

DERIVED = ("freqs_cis", "causal_mask")
# Magnitude and direction of a weight-normed convolution, in the newer and in the older form.
WEIGHT_NORM = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


def read_safetensors(path: Path) -> Weights:
    """All tensors of a file."""
    header = read_header(path)
    found = {}
    for name, entry in header.entries.items():
        tensor = torch.from_numpy(header.read(name))
        found[name] = tensor.view(torch.bfloat16) if entry.dtype == "BF16" else tensor
    return found


def read_model(folder: Path) -> Weights:
    """Tensors of the two transformers."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {
        name: tensor
        for shard in shards
        for name, tensor in read_safetensors(folder / shard).items()
    }


def codec_file(folder: Path, config: ModelConfig) -> Path | None:
    """The file that holds the codec, None if the checkpoint comes without one."""
    for name in (config.codec_filename, "codec.pth", "codec.safetensors"):
        if (folder / name).is_file():
            return folder / name
    return None


def read_codec(path: Path) -> Weights:
    """Tensors of a codec file, under their own names and with weight norm folded."""
    if path.suffix == ".safetensors":
        stored = read_safetensors(path)
    else:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        stored = stored.get("state_dict", stored)
    if any("generator." in name for name in stored):
        stored = {n.replace("generator.", ""): t for n, t in stored.items() if "generator." in n}
    return fold({name: t for name, t in stored.items() if not name.endswith(DERIVED)})


def fold(stored: Mapping[str, Tensor]) -> Weights:
    """Replace magnitude g and direction v by weight = g v / |v|, the norm over all dimensions but
    the first."""
    folded = dict(stored)
    for magnitude, direction in WEIGHT_NORM:
        for name in [n for n in stored if n.endswith(direction)]:
            stem = name.removesuffix(direction)
            v, g = folded.pop(name).float(), folded.pop(stem + magnitude).float()
            norm = v.flatten(1).norm(dim=1).reshape(g.shape)
            folded[stem + ".weight"] = v * (g / norm)
    return folded


def dual_ar(config: ModelConfig, weights: Weights, dtype: torch.dtype, device: str) -> DualAR:
    """A ready model; every parameter must be there, and nothing else."""
    with torch.device("meta"):
        model = DualAR(config)
    placed = {name: t.to(device, dtype) for name, t in weights.items()}
    model.load_state_dict(placed, strict=True, assign=True)
    model.requires_grad_(False)
    model.prepare()
    return model


def load_dual_ar(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DualAR:
    """The transformers of a checkpoint folder."""
    return dual_ar(read_config(folder), read_model(folder), dtype, device)


def load_codec(folder: Path, device: str = "cpu") -> Codec | None:
    """The codec of a checkpoint folder in float32, None if there is none."""
    config = read_config(folder)
    path = codec_file(folder, config)
    if path is None:
        return None
    return Codec(config, {n: t.to(device, torch.float32) for n, t in read_codec(path).items()})
