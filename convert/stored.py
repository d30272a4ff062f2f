"""One tensor of a source file, whatever the file's kind: shape and dtype now, values on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warble_mlx.safetensors_file import Array, Header, Shape


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` is a safetensors dtype name; `read` gives the raw form (bfloat16 as uint16)."""

    shape: Shape
    dtype: str
    read: Callable[[], Array]


def stored_tensors(header: Header) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file."""

    def reader(name: str) -> Callable[[], Array]:
        return lambda: header.read(name)

    return {
        name: StoredTensor(entry.shape, entry.dtype, reader(name))
        for name, entry in header.entries.items()
    }
