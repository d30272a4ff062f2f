"""Apply a packing policy to a bundle: check, pack, write, prove, let it speak, rename."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from warble_mlx import __version__
from warble_mlx.config import read_config, read_config_json
from warble_mlx.convert.companions import is_licence, write_json
from warble_mlx.convert.names import DECODER, ENCODER, MODEL
from warble_mlx.errors import MissingExtraError, WarbleError
from warble_mlx.fidelity.compare import Fidelity, compare
from warble_mlx.fidelity.report import FIDELITY_FILE, to_json
from warble_mlx.inspect_bundle import Part, describe_bundle
from warble_mlx.quant.affine import Packed
from warble_mlx.quant.calibration import Progress, calibrated, check_modes
from warble_mlx.quant.card import write_card
from warble_mlx.quant.modules import modules_of
from warble_mlx.quant.policy import DEFAULT_POLICY, LayerException, Packing, packing, plan
from warble_mlx.quant.proof import check_size, check_source, prove
from warble_mlx.safetensors_file import read_header
from warble_mlx.speech import Speech
from warble_mlx.speech_check import check_speaks
from warble_mlx.staging import staged_folder

ROUNDING = "rounding to nearest"
COPIED = (DECODER, ENCODER, "tokenizer.json", "voices.json")  # and licences; the rest is remade

Weights = dict[str, mx.array]
QuantizeModel = Callable[..., tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True)
class Quantised:
    """What was done: the packing of each Linear, sizes, and what the checks gave.

    nbytes are bytes per file of the speaking model. speech is the test sentence, fidelity the
    report, where they were asked for.
    """

    out: Path
    layers: Mapping[str, Packing]
    parts: tuple[Part, ...]
    nbytes: Mapping[str, int]
    speech: Speech | None
    fidelity: Fidelity | None

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
    calibration: Sequence[str] = (),
    report: Sequence[str] = (),
    check: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> Quantised:
    """Quantise the DualAR of `bundle` into the new folder `out`.

    Packing is mlx-lm's `quantize_model`, so that the config block is the one that MLX tools read;
    modules that stay as they are appear in it as false. The codec is copied. With `calibration`
    texts the rounding is learned from tokens that the bundle makes of them (mode affine), else it
    is to nearest; the provenance in config.json says which. With `report` texts, other ones, the
    result is compared with its source and the figures are put into the folder. `check` lets it
    speak a sentence.

    Raises WarbleError before anything is written for what cannot work, CheckpointError when the
    written bundle does not hold what it should or does not speak; `out` then does not appear.
    """
    default = packing(bits, group_size, mode)
    config, raw = read_config(bundle), read_config_json(bundle)
    header = read_header(bundle / MODEL)
    check_source(header, raw, config)
    shapes = {
        name.removesuffix(".weight"): entry.shape
        for name, entry in header.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2
    }
    layers = plan(shapes, default, policy, exceptions)
    if calibration:
        check_modes(layers)
        _check_apart(calibration, report)
    quantize_model = mlx_lm_packing()
    learned: dict[str, Packed] = {}
    facts: dict[str, Any] = {"method": ROUNDING}
    with staged_folder(out, source=bundle, force=force) as stage:
        _copy_rest(bundle, stage)
        if calibration:
            learned, facts = calibrated(bundle, layers, calibration, progress)
        block = _pack(bundle, stage, layers, default, learned, quantize_model)
        raw["quantization"] = raw["quantization_config"] = block
        raw["provenance"] = {
            **raw.get("provenance", {}),
            "quantizer": {"tool": f"warble-mlx {__version__}", "policy": policy, **facts},
        }
        write_json(stage / "config.json", raw)
        parameters = prove(bundle, stage, layers)
        nbytes = {f: os.path.getsize(stage / f) for f in (MODEL, DECODER, "tokenizer.json")}
        check_size(parameters, sum(nbytes.values()), layers)
        speech = check_speaks(stage, "the quantised model") if check else None
        found = None
        if report:
            found = compare(bundle, stage, report, name=out.name, progress=progress)
            (stage / FIDELITY_FILE).write_text(to_json(found), "utf-8")
        parts = describe_bundle(stage).parts
        write_card(bundle, stage, default, layers, facts["method"], found)
    return Quantised(out, layers, parts, nbytes, speech, found)


def _check_apart(calibration: Sequence[str], report: Sequence[str]) -> None:
    both = sorted(set(calibration) & set(report))
    if both:
        raise WarbleError(
            f"{len(both)} of the texts to measure on are those learned from ({both[0]!r}), which"
            " would flatter the result: give others"
        )


def _copy_rest(bundle: Path, stage: Path) -> None:
    for path in sorted(bundle.iterdir()):
        if path.is_file() and (path.name in COPIED or is_licence(path.name)):
            shutil.copyfile(path, stage / path.name)


def mlx_lm_packing() -> QuantizeModel:
    """mlx-lm's `quantize_model`. Raises MissingExtraError without it."""
    try:
        from mlx_lm.utils import quantize_model
    except ImportError as error:
        raise MissingExtraError("Quantising", "mlx-lm", "quant") from error
    found: QuantizeModel = quantize_model
    return found


def _pack(
    bundle: Path,
    stage: Path,
    layers: Mapping[str, Packing],
    default: Packing,
    learned: Mapping[str, Packed],
    quantize_model: QuantizeModel,
) -> dict[str, Any]:
    """Write the model file and return the config block."""
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
            tree, {}, default.group_size, default.bits, default.mode, quant_predicate=chosen
        )
    kept = [
        path
        for path, module in tree.named_modules()
        if path not in layers and hasattr(module, "to_quantized")
    ]
    parameters = tree_flatten(tree.parameters())
    assert isinstance(parameters, list)
    tensors = dict(parameters)
    for path, own in learned.items():
        for kind, value in own._asdict().items():
            tensors[f"{path}.{kind}"] = value
    mx.save_safetensors(str(stage / MODEL), tensors, metadata={"format": "mlx"})
    block: dict[str, Any] = config["quantization"] | dict.fromkeys(sorted(kept), False)
    return block
