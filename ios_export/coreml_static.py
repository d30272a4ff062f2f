"""What can be told of a Core ML package by reading it: operations, sizes, types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warble_mlx.ios_export.checks import at_most, equal
from warble_mlx.ios_export.coreml_file import read_spec
from warble_mlx.ios_export.manifest import Check, Function, State, Tensor
from warble_mlx.ios_export.mil_ops import OPERATIONS

AXIS_LIMIT = 16_384  # of the Neural Engine
RANK_LIMIT = 5
WIDE_LIMIT = 1_000_000  # bytes of a constant in 32 bits; larger ones are tables left wide unseen
STATE_OPERATIONS = ("read_state", "write_state", "coreml_update_state")
KNOWN_OPERATIONS = frozenset({*OPERATIONS, "const", *STATE_OPERATIONS})
SPECIFICATION = 9  # Core ML of iOS 18: states and several functions
_FLOAT32, _FLOAT64 = 11, 12
_DTYPES = {65568: "float32", 65552: "float16", 131104: "int32"}


def package_checks(package: Path) -> Iterator[Check]:
    """Static limits of every function of a package."""
    spec = read_spec(package)
    name = package.name
    yield at_most(f"specification of {name}", spec.specificationVersion, SPECIFICATION)
    unknown: set[str] = set()
    longest = rank = wide = double = 0
    for operation in _operations(spec):
        if operation.type not in KNOWN_OPERATIONS:
            unknown.add(operation.type)
        for output in operation.outputs:
            kind = output.type.tensorType
            shape = [d.constant.size for d in kind.dimensions]
            double += kind.dataType == _FLOAT64
            if operation.type == "const" or operation.type.startswith("constexpr"):
                large = kind.dataType == _FLOAT32 and 4 * math.prod(shape) > WIDE_LIMIT
                wide += large
                continue
            longest = max(longest, *shape, 0)
            rank = max(rank, len(shape))
    yield equal(f"unknown operations in {name}", len(unknown), 0, note=", ".join(sorted(unknown)))
    yield at_most(f"longest axis in {name}", longest, AXIS_LIMIT)
    yield at_most(f"highest rank in {name}", rank, RANK_LIMIT)
    yield equal(f"large float32 constants in {name}", wide, 0)
    yield equal(f"float64 values in {name}", double, 0)


def _operations(spec: Any) -> Iterator[Any]:
    for function in spec.mlProgram.functions.values():
        yield from function.block_specializations[function.opset].operations


def operation_count(package: Path, kind: str) -> int:
    """How many operations of a kind all functions of a package have."""
    return sum(operation.type == kind for operation in _operations(read_spec(package)))


def functions_of(package: Path, about: dict[str, str]) -> list[Function]:
    """Inputs, outputs and states of a package's functions, as the manifest lists them."""
    spec = read_spec(package)
    described = spec.description.functions or [spec.description]
    found = []
    for description in described:
        name = getattr(description, "name", "") or "main"
        states = tuple(
            Tensor(name=s.name, shape=tuple(s.type.stateType.arrayType.shape), dtype="float16")
            for s in description.state
        )
        function = spec.mlProgram.functions[name]
        block = function.block_specializations[function.opset]
        longest = max(
            (
                d.constant.size
                for operation in block.operations
                if operation.type != "const"
                for output in operation.outputs
                for d in output.type.tensorType.dimensions
            ),
            default=0,
        )
        found.append(
            Function(
                name=name,
                file=package.name,
                inputs=tuple(_tensor(i) for i in description.input),
                outputs=tuple(_tensor(o) for o in description.output),
                states=(State(name="state", tensors=states),) if states else (),
                longest_axis=longest,
                about=about.get(name, ""),
            )
        )
    return found


def _tensor(feature: Any) -> Tensor:
    kind = feature.type.multiArrayType
    return Tensor(
        name=feature.name, shape=tuple(kind.shape), dtype=_DTYPES.get(kind.dataType, "unknown")
    )
