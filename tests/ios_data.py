"""Bundles that the export tests share, and a job on one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten

from warble_mlx.bench.synthetic import PUBLISHED, random_codec, random_dual_ar
from warble_mlx.config import ModelConfig, read_config, read_config_json
from warble_mlx.hub import bundled_folder
from warble_mlx.ios_export.job import Job, Options
from warble_mlx.quant.policy import DEFAULT_POLICY, POLICIES
from warble_mlx.weights import DECODER_FILE, MODEL_FILE


def job_on(bundle: Path, **options: object) -> Job:
    """An export job with nothing built yet."""
    chosen = Options(**options)  # type: ignore[arg-type]
    return Job(bundle, read_config(bundle), read_config_json(bundle), chosen)


def four_bit_bundle(folder: Path, source: Path | None = None) -> Path:
    """A copy of a bundle, the bundled one if none is given, with its block Linears in 4 bits."""
    source = source or bundled_folder()
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != MODEL_FILE:
            shutil.copyfile(path, folder / path.name)
    packs = POLICIES[DEFAULT_POLICY]
    written = {}
    for name, weight in unpacked_weights(source).items():
        path = name.removesuffix(".weight")
        if not packs(path):
            written[name] = weight
            continue
        packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
        written |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
    mx.save_safetensors(str(folder / MODEL_FILE), written, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def unpacked_weights(bundle: Path) -> dict[str, mx.array]:
    """The transformers' tensors of a bundle, packed ones as the bfloat16 weights they stand for."""
    stored = mx.load(str(bundle / MODEL_FILE))
    assert isinstance(stored, dict)
    packing = read_config_json(bundle).get("quantization", {})
    found = {}
    for name, tensor in stored.items():
        path, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if kind == "weight" and f"{path}.scales" in stored:  # a bias lies beside, unpacked
            scales, biases = stored[f"{path}.scales"], stored[f"{path}.biases"]
            size, bits = packing["group_size"], packing["bits"]
            tensor = mx.dequantize(tensor, scales, biases, group_size=size, bits=bits)
        found[name] = tensor
    return found


def unpacked_bundle(folder: Path) -> Path:
    """The bundled voice pack with all weights in 16 bits, as a source for quantising."""
    source = bundled_folder()
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != MODEL_FILE:
            shutil.copyfile(path, folder / path.name)
    weights = unpacked_weights(source)
    mx.save_safetensors(str(folder / MODEL_FILE), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def full_four_bit_bundle(folder: Path, tokenizer: Path) -> Path:
    """A bundle of the published size with random weights, block Linears in 4 bits."""
    folder.mkdir(parents=True)
    packs = POLICIES[DEFAULT_POLICY]
    written: dict[str, mx.array] = {}
    for name, weight in stored_tensors(random_dual_ar(PUBLISHED)):
        path = name.removesuffix(".weight")
        if packs(path) and name.endswith(".weight"):
            packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
            written |= {name: packed, f"{path}.scales": scales, f"{path}.biases": biases}
        else:
            written[name] = weight
        mx.eval(written)
    mx.save_safetensors(str(folder / MODEL_FILE), written, metadata={"format": "mlx"})
    codec = {name: w.astype(mx.float16) for name, w in calm_codec(PUBLISHED)}
    mx.save_safetensors(str(folder / DECODER_FILE), codec, metadata={"format": "mlx"})
    config = msgspec.to_builtins(PUBLISHED)
    config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def calm_codec(config: ModelConfig) -> Iterator[tuple[str, mx.array]]:
    """A random codec decoder's tensors, its branches and its last layer scaled so that samples stay
    inside ±1: a saturated tanh would hide every difference. Biases are not zero, or silence before
    the start would be no different from zero latents."""
    for number, (name, weight) in enumerate(stored_tensors(random_codec(config))):
        if name.endswith(".bias"):
            weight = 0.05 * mx.random.normal(weight.shape, key=mx.random.key(number))
        if re.search(r"block\.3\.conv\.weight|pwconv2\.weight|\.(wo|w2)\.weight", name):
            weight = 0.2 * weight
        elif name.startswith("decoder.model.6.conv.weight"):
            weight = 0.1 * weight
        yield name, weight


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """A module's tensors under a bundle's names: w1 and w3 are one matrix in memory only."""
    found = tree_flatten(module.parameters())
    assert isinstance(found, list)
    for name, weight in found:
        if ".w13." in name:
            for part, own in zip(("w1", "w3"), mx.split(weight, 2), strict=True):
                yield name.replace("w13", part), own
        else:
            yield name, weight
