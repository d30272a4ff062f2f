"""`codec.pth`, read without running any code that is pickled in it. The only user of torch."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from warble_mlx.convert.stored import StoredTensor
from warble_mlx.errors import CheckpointError, MissingExtraError
from warble_mlx.safetensors_file import Array, reject_foreign

if TYPE_CHECKING:
    import torch


def read_pth(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a torch pickle, from the state dict inside if it has one.

    The file is mapped, not loaded, where its format allows. An entry that is no tensor of a known
    dtype gets a dtype name that no one expects, so it is an error unless it is dropped by name.

    Raises MissingExtraError without torch, CheckpointError for a damaged file or pickled code.
    """
    with path.open("rb") as file:
        reject_foreign(path, file.read(512), path.stat().st_size)
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(f"Reading {path.name}", "torch", "convert") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on pickle versions: the result is checked
            loaded: Any = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or holds pickled code, which is never run."
            " Give a file that has only tensors (a state dict)"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Fetch it again") from error
    if isinstance(loaded, Mapping) and "state_dict" in loaded:
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.float64: "F64", torch.bool: "BOOL", torch.int64: "I64"}
    return {
        str(name): StoredTensor(
            tuple(getattr(value, "shape", ())),
            names.get(getattr(value, "dtype", None), f"a Python {type(value).__name__}"),
            _Reader(value),
        )
        for name, value in loaded.items()
    }


class _Reader:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Array:
        import torch

        tensor = self.tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
            return bits
        values: Array = tensor.numpy()
        return values
