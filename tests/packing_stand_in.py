"""mlx-lm's `quantize_model` in a few lines, so that tests need not install a language model stack.

What it does is held against the real one where that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.nn as nn
import pytest

Predicate = Callable[[str, nn.Module], "bool | dict[str, Any]"]


def quantize_model(
    model: nn.Module,
    config: dict[str, Any],
    group_size: int,
    bits: int,
    mode: str = "affine",
    quant_predicate: Predicate | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Pack what the predicate names, and record it in the config's block."""
    block: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        own = quant_predicate(path, module) if quant_predicate else True
        if isinstance(own, dict):
            block[path] = own
        return own

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=chosen)
    return model, {**config, "quantization": block}


def install(monkeypatch: pytest.MonkeyPatch, function: Any = quantize_model) -> None:
    """Make `from mlx_lm.utils import quantize_model` give `function`."""
    package, utils = ModuleType("mlx_lm"), ModuleType("mlx_lm.utils")
    utils.quantize_model = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_lm", package)
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", utils)
