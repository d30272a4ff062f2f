"""Read the 8-bit ONNX export of Kokoro-82M into plain float tensors.

The export keeps the module path of every layer in its node names, so a weight is filed under
`<module path>.weight` whatever its initialiser is called. Weight norm is folded in the export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Stored = dict[str, "np.ndarray[Any, Any]"]

_MATRIX_ENDINGS = ("MatMul_quant", "Gemm_MatMul_quant")
_PREDICTOR = ("F0", "N", "F0_proj", "N_proj", "shared", "lstm", "duration_proj")


def read_onnx(path: Path) -> Tensors:
    """All weights of the export as float32 tensors, in PyTorch's layouts and module names."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    stored: Stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    weights: Stored = {}
    for name, value in stored.items():
        if name.endswith((".bias", ".weight", ".gamma", ".beta")) or ".alpha" in name:
            weights[module_path(name)] = value
        elif name.endswith("embeddings.weight_quantized") or name.endswith(
            "embedding.weight_quantized"
        ):
            weights[module_path(name.removesuffix("_quantized"))] = dequantised(stored, name, None)
    for node in graph.node:
        where, _, last = node.name.strip("/").replace("/", ".").rpartition(".")
        target = module_path(where) + ".weight"
        kept = [name for name in node.input if name in stored]
        if node.op_type == "ConvInteger":
            weights[target] = dequantised(stored, node.input[1], node.input[3])
        elif node.op_type == "MatMulInteger" and last in _MATRIX_ENDINGS and kept:
            if not where.rpartition("_")[2].isdigit():  # ALBERT calls one layer twelve times
                weights[target] = dequantised(stored, node.input[1], node.input[3]).T
        elif node.op_type == "MatMul" and kept:
            weights[target] = stored[kept[0]].T
        elif node.op_type in ("Conv", "ConvTranspose") and "stft" not in where:
            weights[target] = stored[kept[0]]
        elif node.op_type == "DynamicQuantizeLSTM":
            weights.update(lstm(stored, module_path(where), list(node.input)))
    return {
        name: torch.from_numpy(np.array(value, dtype=np.float32))
        for name, value in sorted(weights.items())
    }


def module_path(name: str) -> str:
    """The path inside the model, without what the export wraps around it."""
    name = name.removeprefix("encoder.").replace("decoder.decoder.", "decoder.", 1)
    parts = name.split(".")
    if parts[0] in _PREDICTOR:
        parts.insert(0, "predictor")  # the export calls these without their parent
    if parts[:2] == ["text_encoder", "cnn"] and "cnn" in parts[3:]:
        del parts[3:5]  # text_encoder.cnn.0.cnn.0.0: the sequence names itself twice
    if parts[:3] == ["decoder", "asr_res", "asr_res"]:
        del parts[1]
    return ".".join(parts)


def dequantised(
    stored: Stored, name: str, zero_point: str | None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(value - zero point) x scale; the scale is one number or one per output channel."""
    scale = stored[name.removesuffix("_quantized") + "_scale"].astype(np.float32)
    zero = stored[zero_point].astype(np.float32) if zero_point else np.float32(0)
    result: np.ndarray[Any, np.dtype[np.float32]] = (stored[name].astype(np.float32) - zero) * scale
    return result


def lstm(stored: Stored, path: str, inputs: list[str]) -> Stored:
    """Two directions; ONNX orders the gates i o f c and PyTorch i f c o."""
    kernel, recurrent, bias = (stored[name] for name in inputs[1:4])
    scales = [stored[inputs[8]], stored[inputs[10]]]
    result: Stored = {}
    for direction, suffix in enumerate(("", "_reverse")):
        for label, value, scale in (("ih", kernel, scales[0]), ("hh", recurrent, scales[1])):
            matrix = value[direction].astype(np.float32).T * scale[direction]
            result[f"{path}.weight_{label}_l0{suffix}"] = reordered(matrix)
        for label, part in zip(("ih", "hh"), np.split(bias[direction], 2), strict=True):
            result[f"{path}.bias_{label}_l0{suffix}"] = reordered(part)
    return result


def reordered(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    into, out, forget, cell = np.split(value, 4)
    return np.concatenate([into, forget, cell, out])
