"""Apply a packing policy to a bundle: check, pack, write, prove, rename."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from warble_mlx.config import read_config, read_config_json
from warble_mlx.convert.card import licence_lines, model_card
from warble_mlx.convert.companions import write_json
from warble_mlx.convert.names import DECODER, MODEL
from warble_mlx.convert.report import Component
from warble_mlx.errors import CheckpointError, MissingExtraError
from warble_mlx.inspect_bundle import describe_bundle
from warble_mlx.quant.modules import modules_of
from warble_mlx.quant.policy import DEFAULT_POLICY, LayerException, Packing, packing, plan
from warble_mlx.safetensors_file import read_header
from warble_mlx.staging import staged_folder

PUBLISHED_LIMIT = 909_000_000  # bytes of weights and tokenizer that a 4-bit build may have
PUBLISHED_PARAMETERS = 601_159_424  # of the DualAR; smaller models are under the limit anyway


@dataclass(frozen=True)
class Quantised:
    """What was done: the packing of each Linear, and bytes per file of the speaking model."""

    out: Path
    layers: dict[str, Packing]
    nbytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Everything needed to speak: transformers, codec decoder, tokenizer."""
        return sum(self.nbytes.values())


def quantize(
    bundle: Path,
    out: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    policy: str = DEFAULT_POLICY,
    exceptions: Sequence[LayerException] = (),
    force: bool = False,
) -> Quantised:
    """Quantise the DualAR of `bundle` into the new folder `out`.

    Packing is mlx-lm's `quantize_model`, so that the config block is the one that MLX tools read;
    modules that stay as they are appear in it as false. The codec is copied.

    Raises WarbleError before anything is written for what cannot work, CheckpointError when the
    written bundle does not hold what it should; `out` then does not appear.
    """
    default = packing(bits, group_size, mode)
    read_config(bundle)
    config = read_config_json(bundle)
    header = read_header(bundle / MODEL)
    if "quantization" in config or any(name.endswith(".scales") for name in header.entries):
        raise CheckpointError(f"{bundle} is quantised already: give the bundle it was made from")
    shapes = {
        name.removesuffix(".weight"): entry.shape
        for name, entry in header.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2
    }
    layers = plan(shapes, default, policy, exceptions)
    with staged_folder(out, source=bundle, force=force) as stage:
        _copy_rest(bundle, stage)
        _pack(bundle, stage, config, layers, default)
        _write_card(bundle, stage, default)
        result = Quantised(out, layers, _sizes(stage))
        _prove(bundle, stage, result)
    return result


def _copy_rest(bundle: Path, stage: Path) -> None:
    for path in sorted(bundle.iterdir()):
        if path.name in (MODEL, "config.json", "README.md") or not path.is_file():
            continue
        shutil.copyfile(path, stage / path.name)


def _pack(
    bundle: Path, stage: Path, config: dict[str, Any], layers: dict[str, Packing], default: Packing
) -> None:
    try:
        from mlx_lm.utils import quantize_model
    except ImportError as error:
        raise MissingExtraError("Quantising", "mlx-lm", "quant") from error
    weights = mx.load(str(bundle / MODEL))
    assert isinstance(weights, dict)
    tree = modules_of(weights)

    def chosen(path: str, _: nn.Module) -> bool | dict[str, Any]:
        own = layers.get(path)
        if own is None:
            return False
        return True if own == default else own._asdict()

    with contextlib.redirect_stdout(io.StringIO()):  # it prints a line; our stdout is data
        tree, config = quantize_model(
            tree, config, default.group_size, default.bits, default.mode, quant_predicate=chosen
        )
    kept = [
        path
        for path, module in tree.named_modules()
        if path not in layers and hasattr(module, "to_quantized")
    ]
    block = config["quantization"] | dict.fromkeys(sorted(kept), False)
    config["quantization"] = config["quantization_config"] = block
    mx.save_safetensors(
        str(stage / MODEL), dict(tree_flatten(tree.parameters())), metadata={"format": "mlx"}
    )
    write_json(stage / "config.json", config)


def _write_card(bundle: Path, stage: Path, default: Packing) -> None:
    described = describe_bundle(stage)
    parts = [Component(p.name, p.file, p.tensors, p.parameters, p.nbytes) for p in described.parts]
    card = model_card(
        source_id=described.provenance.get("source", "unknown"),
        revision=described.provenance.get("revision"),
        licence=licence_lines(bundle),
        components=parts,
        precision=(
            f"The Linears of the transformer blocks in {default.bits} bits ({default.mode}, groups"
            f" of {default.group_size}); embeddings, output heads and norms in bfloat16."
        ),
        extra_tags=("quantized", f"{default.bits}bit"),
    )
    (stage / "README.md").write_text(card, encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    return {name: os.path.getsize(folder / name) for name in (MODEL, DECODER, "tokenizer.json")}


def _prove(bundle: Path, stage: Path, result: Quantised) -> None:
    """Hold the written bundle against its source: what is packed, and that nothing else moved."""
    before, after = mx.load(str(bundle / MODEL)), mx.load(str(stage / MODEL))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    if packed != result.layers.keys():
        raise CheckpointError(
            f"{len(packed)} Linears came out packed, {len(result.layers)} should be"
        )
    for name, weight in before.items():
        if name.removesuffix(".weight") in packed:
            continue
        kept = after.get(name)
        if kept is None or kept.dtype != weight.dtype or not mx.array_equal(kept, weight):
            raise CheckpointError(f"{name} changed, although it is not quantised")
    parameters = sum(w.size for w in before.values())
    four_bits = all(p.bits <= 4 for p in result.layers.values())
    published = parameters == PUBLISHED_PARAMETERS
    if four_bits and published and result.total_bytes > PUBLISHED_LIMIT:
        raise CheckpointError(
            f"the bundle has {result.total_bytes / 1e6:,.0f} MB, over the limit of"
            f" {PUBLISHED_LIMIT / 1e6:,.0f} MB: store the codec at 16 bits (warble convert"
            " --codec-dtype float16)"
        )
