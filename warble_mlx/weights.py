"""Bundle files to loaded modules: strict, and quantised exactly where the file says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from warble_mlx.config import read_config, read_config_json
from warble_mlx.dual_ar import DualAR
from warble_mlx.errors import CheckpointError
from warble_mlx.packed_check import check_packed_products
from warble_mlx.safetensors_file import read_header

MODEL_FILE = "model.safetensors"
DECODER_FILE = "codec_decoder.safetensors"
ENCODER_FILE = "codec_encoder.safetensors"

Weights = dict[str, mx.array]


def load_dual_ar(
    folder: Path, dtype: mx.Dtype, *, dequantize: bool = False, traced: bool = False
) -> DualAR:
    """The two transformers of a bundle, ready for `Engine`.

    Activations, norms and Linears take `dtype`; embedding tables stay as stored. Quantised
    Linears stay quantised unless `dequantize`. `traced`: what they compute is meant for another
    device, so packed products are checked in float32 here; a CPU errs more in 16 bits.

    Raises CheckpointError when a tensor is missing, left over or of another shape, and when
    products of packed weights come out wrong on this device.
    """
    config = read_config(folder)
    model = DualAR(config)
    path = folder / MODEL_FILE
    load_strictly(model, path, dtype, read_config_json(folder), dequantize=dequantize)
    check_packed_products(model, mx.float32 if traced else dtype)
    model.prepare(dtype)
    return model


def load_strictly(
    module: nn.Module,
    path: Path,
    dtype: mx.Dtype,
    config: dict[str, Any],
    *,
    dequantize: bool = False,
) -> None:
    """Fill every parameter of `module` from one safetensors file and leave no tensor over."""
    read_header(path)  # says what is wrong with a damaged file before MLX maps it
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    weights: Weights = loaded
    quantised = sorted(name.removesuffix(".scales") for name in weights if name.endswith(".scales"))
    settings = quantisation_of(config, quantised, path)
    if dequantize:
        for name in quantised:
            # In the scales' own 16 bits the products would be rounded; the kernels do not.
            scales, biases = weights.pop(f"{name}.scales"), weights.pop(f"{name}.biases", None)
            if biases is not None:  # affine; the other modes have packed scales
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            plain = mx.dequantize(weights[f"{name}.weight"], scales, biases, **settings[name])
            weights[f"{name}.weight"] = plain.astype(dtype)
        settings = {}
    weights = joined_gates(weights, path)
    settings = {name.replace(".w1", ".w13"): s for name, s in settings.items()}
    if settings:
        nn.quantize(module, class_predicate=lambda name, _: settings.get(name, False))
    _check(module, weights, path)
    cast = {name: _cast(name, w, dtype, settings) for name, w in weights.items()}
    module.load_weights(list(cast.items()), strict=True)
    mx.eval(module.parameters())


def _cast(name: str, weight: mx.array, dtype: mx.Dtype, quantised: dict[str, Any]) -> mx.array:
    table = name.endswith("embeddings.weight")
    if table or weight.dtype == mx.uint32 or not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return weight.astype(dtype)


def quantisation_of(
    config: dict[str, Any], names: list[str], path: Path
) -> dict[str, dict[str, Any]]:
    """Bits, group size and mode of each quantised Linear, from the config's block."""
    block = config.get("quantization")
    if not names:
        return {}
    if not isinstance(block, dict):
        raise CheckpointError(
            f'{path} holds packed weights, but config.json has no "quantization" block that tells'
            " their bits and group size: convert the model again"
        )
    shared = {k: block[k] for k in ("group_size", "bits", "mode") if k in block}
    settings = {}
    for name in names:
        own = block.get(name, True)
        if own is False:
            raise CheckpointError(
                f"{path} holds packed weights for {name}, but config.json says it is not quantised"
            )
        settings[name] = {**shared, **own} if isinstance(own, dict) else dict(shared)
    return settings


def joined_gates(weights: Weights, path: Path) -> Weights:
    """Join each feed_forward.w1 and .w3 by rows: one matrix product instead of two.

    Exact for packed weights too, since groups run along the input dimension.
    """
    joined = {}
    for name, weight in weights.items():
        if ".feed_forward.w3." in name:
            continue
        if ".feed_forward.w1." in name:
            other = weights.get(name.replace(".w1.", ".w3."))
            if other is None or other.shape != weight.shape:
                raise CheckpointError(f"{path}: {name} has no w3 of the same shape beside it")
            name, weight = name.replace(".w1.", ".w13."), mx.concatenate([weight, other])
        joined[name] = weight
    return joined


def _check(module: nn.Module, weights: Weights, path: Path) -> None:
    wanted = dict(tree_flatten(module.parameters()))
    problems = []
    for title, names in (
        ("missing", sorted(wanted.keys() - weights.keys())),
        ("unexpected", sorted(weights.keys() - wanted.keys())),
        ("of another shape", sorted(
            n for n in wanted.keys() & weights.keys() if wanted[n].shape != weights[n].shape
        )),
    ):  # fmt: skip
        if names:
            problems.append(f"{len(names)} {title} ({', '.join(names[:5])})")
    if problems:
        raise CheckpointError(f"{path} does not fit its config.json: {'; '.join(problems)}")
