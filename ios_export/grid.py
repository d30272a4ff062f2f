"""One grid of packed weights in all formats: what a part holds, held against the bundle's tensors.

A packed Linear is its packed weights with their scales and biases. Each is reduced to one digest of
their bytes, so that a file of any layout can be compared with the bundle without holding both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from warble_mlx.ios_export.checks import equal
from warble_mlx.ios_export.drive import Run
from warble_mlx.ios_export.manifest import Check

SHOWN = 5  # names in a failed check's note
_FIELDS = ("weight", "scales", "biases")  # biases: of the affine mode alone


def stored_grid(
    path: Path, *, prefix: str = "", dtype: mx.Dtype | None = None, joined: bool = False
) -> dict[str, str]:
    """Digest of every packed Linear of a safetensors file, by its path without `prefix`.

    dtype: the one that scales and biases are cast to first; None leaves them as stored.
    joined: w1 and w3 of a block count as one matrix, w1's rows first, under the name of w1.
    """
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    found = {}
    for name in sorted(packed):
        matrices = [name]
        if joined and name.endswith(".feed_forward.w3"):
            continue
        if joined and name.endswith(".feed_forward.w1"):
            matrices.append(name.removesuffix("w1") + "w3")
        arrays = [
            _cast(tensors[f"{matrix}.{field}"], dtype)
            for field in _FIELDS if f"{name}.{field}" in tensors
            for matrix in matrices
        ]  # fmt: skip
        found[name.removeprefix(prefix)] = _digest(arrays)
    return found


def function_grid(run: Run, arrays: Sequence[mx.array]) -> dict[str, str]:
    """Digest of every packed matrix that an imported function multiplies with when it is given
    `arrays`, by the name of its constant in that trace. They are read from the function's file.

    A matrix that is not a constant of the file has the digest ``computed``.
    """
    mx.eval(run(*arrays))  # constants that were not read yet cannot be traced
    constants: dict[str, mx.array] = {}
    matrices: dict[str, list[str]] = {}

    def look(event: Mapping[str, Any]) -> None:
        if event["type"] == "constants":
            constants.update(event["constants"])
        elif event["type"] == "primitive" and event["name"] == "QuantizedMatmul":
            names = [name for name, _, _ in event["inputs"][1:]]
            matrices["/".join(names)] = names

    mx.export_function(look, run, *arrays)
    return {
        key: _digest([constants[n] for n in names]) if constants.keys() >= set(names)
        else "computed"
        for key, names in matrices.items()
    }  # fmt: skip


def grid_check(what: str, bundle: Mapping[str, str], found: Collection[str]) -> Check:
    """How many of the bundle's packed Linears are not among the digests `found` in a part, and how
    many of those are not the bundle's. Which Linear uses which matrix is not compared."""
    present = set(found)
    missing = sorted(name for name, digest in bundle.items() if digest not in present)
    foreign = present - set(bundle.values())
    note = [f"lacks {name}" for name in missing[:SHOWN]]
    if foreign:
        note.append(f"has {len(foreign)} of other numbers")
    name = f"packed weights of {what} that are not the bundle's"
    return equal(name, len(missing) + len(foreign), 0, note=", ".join(note))


def _cast(array: mx.array, dtype: mx.Dtype | None) -> mx.array:
    if dtype is None or not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(dtype)


def _digest(arrays: Sequence[mx.array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.asarray(mx.contiguous(array).view(mx.uint8)).data)
    return digest.hexdigest()
