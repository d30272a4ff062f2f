"""What is inside an exported MLX function: its operations, its limits, and the device it runs on.

MLX writes the stream of every operation into the file, and when it reads the file the operations
go to a stream of that device: a function traced on a machine without a GPU would run on the CPU
of a phone for ever. So the device is rewritten in the file, and nothing else. Every operation is
stored as three int32 (stream index, device type, device index), the length of its name as uint64,
and the name; the number of places found must be the number of operations that were traced, or
nothing is written. Going back to the CPU gives the same bytes again, which is how a file for a
phone is run on a machine without a GPU.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from warble_mlx.errors import CheckpointError

Device = Literal["cpu", "gpu"]
_TYPE = {"cpu": 0, "gpu": 1}  # as MLX numbers them
_NAME = rb"[A-Z][A-Za-z0-9]*"
# A machine's first stream is that of its default device; a CPU's beside a GPU has a later index.
_STREAM = rb"[\0-\x3f]\0{3}([\0\1])\0{3}\0{4}"


@dataclass
class Scan:
    """Operations of one or more traces: how many of each, and the largest shapes they give."""

    operations: Counter[str] = field(default_factory=Counter)
    longest_axis: int = 0
    highest_rank: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)

    def add(self, function: Callable[..., Any], arrays: Sequence[mx.array]) -> Scan:
        """Trace `function` with `arrays` and count; returns the trace's own scan."""
        own = Scan()

        def look(event: Mapping[str, Any]) -> None:
            if event["type"] == "primitive":
                own.operations[event["name"]] += 1
                for _, shape, dtype in event["outputs"]:
                    own.longest_axis = max(own.longest_axis, *shape, 0)
                    own.highest_rank = max(own.highest_rank, len(shape))
                    own.dtypes[str(dtype).removeprefix("mlx.core.")] += 1

        mx.export_function(look, function, *arrays)
        self.operations += own.operations
        self.longest_axis = max(self.longest_axis, own.longest_axis)
        self.highest_rank = max(self.highest_rank, own.highest_rank)
        self.dtypes += own.dtypes
        return own


def devices_in(path: Path, operations: Mapping[str, int]) -> dict[Device, int]:
    """How many operations of a file run where. Raises CheckpointError unless all are found."""
    found: Counter[Device] = Counter()
    data = path.read_bytes()
    for _, device in _places(data, operations):
        found[device] += 1
    if sum(found.values()) != sum(operations.values()):
        raise CheckpointError(
            f"{path}: {sum(found.values())} operations were found, {sum(operations.values())}"
            " were traced: the file is damaged, or this MLX writes another format; export it again"
            " on a machine with a GPU"
        )
    return dict(found)


def retarget(path: Path, out: Path, operations: Mapping[str, int], device: Device) -> None:
    """Write a copy of `path` to `out` whose operations all run on `device`.

    Raises CheckpointError unless exactly the traced operations are found.
    """
    devices_in(path, operations)
    data = bytearray(path.read_bytes())
    for at, _ in list(_places(bytes(data), operations)):
        struct.pack_into("<i", data, at + 4, _TYPE[device])
    out.write_bytes(data)


def _places(data: bytes, operations: Mapping[str, int]) -> list[tuple[int, Device]]:
    """Offset and device of each operation's stream record."""
    names = {name.encode() for name in operations}
    found: list[tuple[int, Device]] = []
    for match in re.finditer(_STREAM + rb"([\1-\x40])\0{7}(?=" + _NAME + rb")", data):
        length = match[2][0]
        if data[match.end() : match.end() + length] in names:
            found.append((match.start(), "gpu" if match[1] == b"\1" else "cpu"))
    return found
