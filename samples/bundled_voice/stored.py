"""Weights between the stages: safetensors, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save(tensors: dict[str, Tensor], path: Path, kind: torch.dtype | None = None) -> None:
    """Write contiguous copies, converted to `kind` if given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    ready = {
        name: value.detach().cpu().to(kind or value.dtype).contiguous()
        for name, value in tensors.items()
    }
    save_file(ready, str(temporary), metadata={"format": "pt"})
    temporary.replace(path)


def load(path: Path) -> dict[str, Tensor]:
    """Tensors of a file that `save` wrote, floating point ones as float32."""
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in load_file(str(path)).items()
    }
