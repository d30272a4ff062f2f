"""A bundle's transformer weights as constants of Core ML programs, packed ones on their own grid.

MLX unpacks a value as ``scale * integer + bias``; Core ML as ``scale * (integer - offset)``.
Integers and scales are taken over as they are, and ``offset = -bias / scale`` is rounded to 16
bits, which costs no more than rounding the bias would (`grid_error` measures it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import Header, read_header, to_float32
from warble_mlx.weights import MODEL_FILE, quantisation_of

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Rows = npt.NDArray[np.int64]

LEAST = 2.0**-10  # groups of smaller values have scales that float16 holds with fewer digits


class Grid(NamedTuple):
    """A packed matrix [out, in] as Core ML holds it."""

    integers: npt.NDArray[np.uint8]  # [out, in], below 2 ** bits
    scales: Halves  # [out, in / group]
    offsets: Halves  # [out, in / group]
    bits: int


class Exact(NamedTuple):
    """The same matrix as the bundle holds it: value = scale * integer + bias."""

    integers: npt.NDArray[np.uint8]
    scales: Floats
    biases: Floats
    bits: int


class Store:
    """Tensors of a bundle's transformers by the bundle's names."""

    def __init__(self, bundle: Path, raw_config: dict[str, Any]) -> None:
        self.header: Header = read_header(bundle / MODEL_FILE)
        self.packed = sorted(
            name.removesuffix(".scales") for name in self.header.entries if name.endswith(".scales")
        )
        self._settings = quantisation_of(raw_config, self.packed, self.header.path)

    def bits(self, path: str) -> int | None:
        """Bits of the packed Linear at `path`; None for everything else."""
        return int(self._settings[path]["bits"]) if path in self._settings else None

    def plain(self, name: str) -> Floats:
        """A tensor that is not packed, widened."""
        return to_float32(self.header.read(name), self.header.entries[name].dtype)

    def rows(self, name: str, begin: int, end: int) -> Floats:
        """Some rows of a table, widened."""
        return to_float32(self.header.read(name)[begin:end], self.header.entries[name].dtype)

    def exact(self, path: str) -> Exact:
        """The packed Linear at `path`. Raises CheckpointError for a mode without scale and bias."""
        settings = self._settings[path]
        bits, group = settings["bits"], settings["group_size"]
        if settings.get("mode", "affine") != "affine":
            raise CheckpointError(
                f"{path} is packed in mode {settings['mode']}, which Core ML has no form for:"
                " quantise with --mode affine, or leave out the part coreml"
            )
        weight = mx.array(self.header.read(f"{path}.weight"))
        scales, biases = self.plain(f"{path}.scales"), self.plain(f"{path}.biases")
        with mx.stream(mx.cpu):
            integers = mx.dequantize(
                weight,
                mx.ones(scales.shape),
                mx.zeros(scales.shape),
                group_size=group,
                bits=bits,
            )
        return Exact(np.array(integers).astype(np.uint8), scales, biases, bits)

    def grid(self, path: str) -> Grid:
        """The packed Linear at `path` as Core ML holds it."""
        found = self.exact(path)
        scales = found.scales.astype(np.float16)
        held = np.where(found.scales == 0, np.float32(1), found.scales)
        with np.errstate(over="ignore"):
            offsets = (-found.biases / held).astype(np.float16)
        return Grid(found.integers, scales, offsets, found.bits)


def held_bits(bits: int) -> int:
    """Bits that Core ML gives an integer of so many."""
    return 4 if bits <= 4 else 8


def grid_error(grid: Grid, exact: Exact) -> float:
    """The largest difference of two unpacked matrices, in roundings of the group's largest value to
    16 bits; infinite where integers or scales are not the same."""
    same = np.array_equal(grid.integers, exact.integers)
    if not same or not np.array_equal(grid.scales, exact.scales.astype(np.float16)):
        return np.inf
    group = exact.integers.shape[1] // exact.scales.shape[1]

    def spread(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        return np.repeat(values.astype(np.float64), group, axis=1)

    found = spread(grid.scales) * (grid.integers - spread(grid.offsets))
    wanted = spread(exact.scales) * exact.integers + spread(exact.biases)
    other_end = exact.scales * np.float32(2**exact.bits - 1) + exact.biases
    extent = np.maximum(np.abs(exact.biases), np.abs(other_end))
    rounding = 2.0**-11 * np.maximum(spread(extent), LEAST)
    return float(np.max(np.abs(found - wanted) / rounding))
