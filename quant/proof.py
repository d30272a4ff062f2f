"""What is checked about a source before, and about a quantised bundle before it appears."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from warble_mlx.config import ModelConfig
from warble_mlx.convert.names import MODEL, expected_tensors
from warble_mlx.errors import CheckpointError
from warble_mlx.quant.policy import Packing
from warble_mlx.safetensors_file import Header

PUBLISHED_LIMIT = 909_000_000  # bytes of weights and tokenizer that a 4-bit build may have
PUBLISHED_PARAMETERS = 601_159_424  # of the DualAR; smaller models are under the limit anyway
SHOWN = 5


def check_source(header: Header, raw: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise CheckpointError unless the transformers are unquantised and what the config says."""
    folder = header.path.parent
    if "quantization" in raw or any(name.endswith(".scales") for name in header.entries):
        raise CheckpointError(f"{folder} is quantised already: give the bundle it was made from")
    wanted = {
        name: spec.shape
        for name, spec in expected_tensors(config, encoder=False).items()
        if spec.file == MODEL
    }
    stored = {name: entry.shape for name, entry in header.entries.items()}
    problems = [
        f"{len(names)} {title} ({', '.join(sorted(names)[:SHOWN])})"
        for title, names in (
            ("missing", wanted.keys() - stored.keys()),
            ("unexpected", stored.keys() - wanted.keys()),
            ("of another shape", _differing(wanted, stored)),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{header.path} does not fit its config.json: {'; '.join(problems)}. Convert the model"
            " again"
        )


def _differing(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> Collection[str]:
    return [name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]]


def prove(bundle: Path, stage: Path, layers: Mapping[str, Packing]) -> int:
    """Hold the written model file against its source: what is packed, and that nothing else moved.

    Returns the number of parameters. Raises CheckpointError.
    """
    before, after = mx.load(str(bundle / MODEL)), mx.load(str(stage / MODEL))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    if packed != layers.keys():
        odd = sorted(packed ^ layers.keys())[:SHOWN]
        raise CheckpointError(
            f"{len(packed)} Linears came out packed, {len(layers)} should be: {', '.join(odd)}"
        )
    parts = {f"{path}.{kind}" for path in packed for kind in ("scales", "biases")}
    extra = sorted(after.keys() - before.keys() - parts)[:SHOWN]
    if extra:
        raise CheckpointError(f"tensors appeared that the source does not have: {', '.join(extra)}")
    parameters = sum(weight.size for weight in before.values())
    for name in list(before):
        # Read when compared, and let go: never two whole files in memory.
        weight, kept = before.pop(name), after.pop(name, None)
        if name.removesuffix(".weight") in packed:
            continue
        if kept is None or kept.dtype != weight.dtype or not mx.array_equal(kept, weight):
            raise CheckpointError(f"{name} changed, although it is not quantised")
    return parameters


def check_size(parameters: int, nbytes: int, layers: Mapping[str, Packing]) -> None:
    """Raise CheckpointError if a 4-bit build of the published model is over its limit."""
    four_bits = all(packing.bits <= 4 for packing in layers.values())
    if four_bits and parameters == PUBLISHED_PARAMETERS and nbytes > PUBLISHED_LIMIT:
        raise CheckpointError(
            f"the bundle has {nbytes / 1e6:,.0f} MB, over the limit of"
            f" {PUBLISHED_LIMIT / 1e6:,.0f} MB: store the codec at 16 bits (warble convert"
            " --codec-dtype float16)"
        )
