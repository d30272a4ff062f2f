"""Reading and writing `.safetensors` with nothing but numpy.

A file is looked at before anything is allocated: its header must be complete, and the tensors it
declares must fill the file exactly, so a cut-off download, a Git LFS pointer or a login page is
named as what it is. Tensors are read one at a time with plain reads (no memory map), so converting
a large file never holds more than one tensor.

Layout of the format: 8 bytes little-endian header length, a JSON header
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`, the data.

bfloat16 has no numpy type; its raw form here is the uint16 bit pattern.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from warble_mlx.errors import CheckpointError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_EXPONENT_BF16 = np.uint16(0x7F80)


def itemsize(dtype: str) -> int:
    """Bytes per element of a safetensors dtype name."""
    return np.dtype(_DTYPES[dtype]).itemsize


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file: dtype name, shape, and where its bytes lie behind the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.size * itemsize(self.dtype)


@dataclass(frozen=True)
class Header:
    """A file whose header was read and checked. `entries` maps names to `Entry`, in file order."""

    path: Path
    nbytes: int
    data_start: int
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    def read(self, name: str) -> Array:
        """Tensor `name` in its raw form (bfloat16 as uint16 bits)."""
        entry = self.entries[name]
        try:
            flat: Array = np.fromfile(
                self.path,
                dtype=np.dtype(_DTYPES[entry.dtype]).newbyteorder("<"),
                count=entry.size,
                offset=self.data_start + entry.data_offsets[0],
            )
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error
        if flat.size != entry.size:
            raise CheckpointError(f"{self.path} changed while {name} was read")
        return flat.reshape(entry.shape)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises CheckpointError, naming the file and what it really is, unless the file is complete and
    consistent. Allocates no more than the header itself, and that only if the file is as long.
    """
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
            reject_foreign(path, head, nbytes)
            length = int.from_bytes(head[:8], "little")
            if nbytes < 8 or length > MAX_HEADER_BYTES or head[8:9] not in (b"{", b""):
                raise CheckpointError(
                    f"{path} is not a safetensors file: its first 8 bytes announce a header of"
                    f" {length} bytes in a file of {nbytes}. Fetch it again"
                )
            if length > nbytes - 8:
                raise CheckpointError(
                    f"{path} is truncated: have {nbytes} of more than {length + 8} bytes."
                    " Fetch it again"
                )
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    metadata, entries = _parse_header(path, raw)
    _check_layout(path, entries, 8 + length, nbytes)
    return Header(path, nbytes, 8 + length, metadata, entries)


def reject_foreign(path: Path, head: bytes, nbytes: int) -> None:
    """Raise CheckpointError if the first bytes show that `path` holds no weights at all."""
    if nbytes == 0:
        raise CheckpointError(f"{path} is empty (0 bytes). Fetch it again")
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        whole = f" of {int(size[1])}" if size else ""
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the weights: have {nbytes}{whole} bytes. Fetch them"
            " with `git lfs pull` in the checkout, or download the model again"
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(
            f"{path} is a web page, not a weights file: the download was answered by a login or"
            " error page. Fetch it again"
        )


def _parse_header(path: Path, raw: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        # MLX writes null where there is no metadata.
        metadata = msgspec.json.decode(
            parts.pop("__metadata__", msgspec.Raw(b"null")), type=dict[str, str] | None
        )
        entries = {
            name: msgspec.json.decode(part, type=Entry, strict=True) for name, part in parts.items()
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is broken ({error}). Fetch it again"
        ) from error
    return metadata or {}, dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))


def _check_layout(path: Path, entries: Mapping[str, Entry], start: int, nbytes: int) -> None:
    at = 0
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has the unknown dtype {entry.dtype!r}")
        if end - begin != entry.nbytes:
            raise CheckpointError(
                f"{path} is damaged: {name} is {entry.dtype} {list(entry.shape)}, which is"
                f" {entry.nbytes} bytes, but its offsets span {end - begin}"
            )
        if begin != at:
            kind = "overlaps another tensor" if begin < at else "leaves a gap before it"
            raise CheckpointError(f"{path} is damaged: {name} {kind} (byte {begin}, not {at})")
        at = end
    if nbytes < start + at:
        raise CheckpointError(
            f"{path} is truncated: have {nbytes} of {start + at} bytes. Fetch it again"
        )
    if nbytes > start + at:
        raise CheckpointError(
            f"{path} is damaged: {nbytes - start - at} bytes follow the last tensor"
        )


def to_float32(raw: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Raw tensor of a float `dtype` as float32 (exact, except for F64)."""
    if dtype == "BF16":
        wide = raw.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return raw.astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """float32 values in the raw form of F32, F16 or BF16, rounded to nearest even.

    Overflow gives infinities, which the caller looks for. NaN stays NaN only by `is_finite`
    being asked first: rounding may carry a NaN's payload away.
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        half = ((bits >> 16) & np.uint32(1)) + np.uint32(0x7FFF)
        half += bits
        half >>= 16
        rounded: Array = half.astype(np.uint16)
        return rounded
    with np.errstate(over="ignore"):
        return values.astype(_DTYPES[dtype], copy=False)


def is_finite(raw: Array, dtype: str) -> bool:
    """Whether a raw tensor of a float `dtype` holds neither NaN nor infinity."""
    if dtype == "BF16":
        return not bool(((raw & _EXPONENT_BF16) == _EXPONENT_BF16).any())
    return bool(np.isfinite(raw).all())


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, Shape]],
    produce: Callable[[str], Array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file whose tensors `{name: (dtype, shape)}` come from `produce(name)` one by one.

    `produce` returns the raw form (see module docstring). Wide dtypes come first, then names in
    order, which keeps every tensor aligned to its item size. The default metadata is the mark that
    MLX tools look for, {"format": "mlx"}.

    Raises CheckpointError if the disk is full, ValueError if a tensor is not as declared.
    """
    order = sorted(tensors, key=lambda name: (-itemsize(tensors[name][0]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * itemsize(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                dtype, shape = tensors[name]
                values = np.ascontiguousarray(produce(name))
                if values.shape != shape or values.dtype != _DTYPES[dtype]:
                    raise ValueError(
                        f"{name} is {values.dtype} {values.shape}, declared {dtype} {shape}"
                    )
                file.write(values.data if values.size else b"")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
