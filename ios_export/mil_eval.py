"""Runs a Core ML program without Core ML: the operations of its specification, one by one.

An evaluator for checks, on any machine: it reads the saved package (not the converter's objects),
takes weights from its blob file with coremltools' own reader, computes in float32 and rounds every
value to the type that the program declares for it, which is what "fp16" means to this model. It
tells nothing about Apple's kernels, placement or compilation, and takes no shortcut: an operation
it does not know, or a shape other than the declared one, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from warble_mlx.errors import CheckpointError
from warble_mlx.ios_export.coreml_file import read_spec
from warble_mlx.ios_export.mil_ops import OPERATIONS

# Number of a type in the specification -> torch's type, and the blob reader's name for it.
_TYPES: Mapping[int, tuple[torch.dtype, str]] = {
    1: (torch.bool, ""),
    10: (torch.float16, "fp16"),
    11: (torch.float32, "float"),
    21: (torch.int8, "int8"),
    22: (torch.int16, "int16"),
    23: (torch.int32, "int32"),
    31: (torch.uint8, "uint8"),
    32: (torch.int32, "uint16"),
    35: (torch.uint8, "uint4"),
}
_STRING = 2
_CONSTANT = ("const", "constexpr_blockwise_shift_scale")


class Program:
    """One function of a package. Calling it runs it; `state` is kept between calls.

    peak: largest magnitude of each 16-bit value so far, by the operation that made it.
    """

    def __init__(self, package: Path, function: str | None = None) -> None:
        self.package = package
        self.spec = read_spec(package)
        functions = self.spec.mlProgram.functions
        name = function or self.spec.description.defaultFunctionName or next(iter(functions))
        if name not in functions:
            raise CheckpointError(f"{package} has no function {name}: it has {list(functions)}")
        chosen = functions[name]
        self.function = name
        self.block = chosen.block_specializations[chosen.opset]
        self.inputs = [i.name for i in chosen.inputs]
        self.state: dict[str, torch.Tensor] = {}
        self.peak: dict[str, float] = {}
        self._constants: dict[str, Any] = {}
        self._readers: dict[str, Any] = {}
        self._last_uses = _last_uses(self.block.operations)
        for described in self._descriptions():
            for record in described.state:
                shape = tuple(record.type.stateType.arrayType.shape)
                self.state[record.name] = torch.zeros(shape, dtype=torch.float16)

    def _descriptions(self) -> list[Any]:
        described = self.spec.description
        own = [f for f in described.functions if f.name == self.function]
        return own or [described]

    def __call__(
        self, *, also: Sequence[str] = (), **given: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, for inputs by name, and the values named in `also`, which are computed
        on the way."""
        missing = set(self.inputs) - set(given) - set(self.state)
        if missing:
            raise CheckpointError(f"{self.package}: {self.function} lacks {sorted(missing)}")
        values: dict[str, Any] = {**given, **{name: name for name in self.state}}
        wanted = {*self.block.outputs, *also}
        for operation, done in zip(self.block.operations, self._last_uses, strict=True):
            self._run(operation, values)
            for name in done - wanted:
                values.pop(name, None)
        return {name: values[name] for name in wanted}

    def constants_of(self, kind: str) -> dict[str, dict[str, torch.Tensor]]:
        """Arguments of every operation of a kind that takes constants alone, by its output."""
        constants = {o.outputs[0].name: o for o in self.block.operations if o.type == "const"}

        def read(argument: Any) -> Any:
            if argument.WhichOneof("binding") == "value":
                return self._value(argument.value)
            return self._value(constants[argument.name].attributes["val"])

        return {
            operation.outputs[0].name: {
                name: read(bound.arguments[0]) for name, bound in operation.inputs.items()
            }
            for operation in self.block.operations
            if operation.type == kind
        }

    def _run(self, operation: Any, values: dict[str, Any]) -> None:
        outputs = [output.name for output in operation.outputs]
        if operation.type in _CONSTANT and outputs[0] in self._constants:
            values[outputs[0]] = self._constants[outputs[0]]
            return
        results = self._results(operation, values)
        for output, result in zip(operation.outputs, results, strict=True):
            if torch.is_tensor(result):
                result = self._as_declared(operation, output, result)
            values[output.name] = result
            if operation.type in _CONSTANT:
                self._constants[output.name] = result

    def _results(self, operation: Any, values: dict[str, Any]) -> list[Any]:
        if operation.type == "const":
            return [self._value(operation.attributes["val"])]
        arguments: dict[str, Any] = {}
        for name, bound in operation.inputs.items():
            found = [
                values[a.name] if a.WhichOneof("binding") == "name" else self._value(a.value)
                for a in bound.arguments
            ]
            arguments[name] = found if name == "values" else found[0]
        if operation.type == "read_state":
            return [self.state[arguments["input"]]]
        if operation.type in ("write_state", "coreml_update_state"):
            name = str(arguments.get("input", arguments.get("state")))
            value = arguments["data"] if "data" in arguments else arguments["value"]
            self.state[name] = value.to(torch.float16)
            return [self.state[name]][: len(operation.outputs)]
        compute: Callable[..., Any] | None = OPERATIONS.get(operation.type)
        if compute is None:
            raise CheckpointError(
                f"{self.package}: the operation {operation.type} is not known to the evaluator:"
                " another version of coremltools may write what version 9 does not"
            )
        result = compute(**arguments)
        return list(result) if isinstance(result, tuple) else [result]

    def _as_declared(self, operation: Any, output: Any, result: torch.Tensor) -> torch.Tensor:
        declared = output.type.tensorType
        shape = [
            d.constant.size if d.WhichOneof("dimension") == "constant" else -1
            for d in declared.dimensions
        ]
        fits = len(shape) == result.dim() and all(
            wanted in (-1, size) for wanted, size in zip(shape, result.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.package}: {operation.type} {output.name} gives {tuple(result.shape)},"
                f" declared is {shape}"
            )
        rounded = result.to(_TYPES[declared.dataType][0])
        if rounded.dtype == torch.float16 and rounded.numel():
            peak = float(rounded.float().abs().max())
            key = f"{operation.type} {output.name}"
            # What is not a number must stay one: max() of Python would drop it.
            before = self.peak.get(key, 0.0)
            self.peak[key] = peak if not peak <= before else before
        return rounded

    def _value(self, value: Any) -> Any:
        kind = value.type.tensorType
        shape = [d.constant.size for d in kind.dimensions]
        if value.WhichOneof("value") == "blobFileValue":
            return self._blob(value.blobFileValue, kind.dataType, shape)
        tensor = value.immediateValue.tensor
        field = tensor.WhichOneof("value")
        if kind.dataType == _STRING:
            found = list(tensor.strings.values)
            return found if shape else found[0]
        if field == "bytes":
            numpy_type = {10: np.float16, 21: np.int8, 22: np.int16, 31: np.uint8, 32: np.uint16}
            array = np.frombuffer(tensor.bytes.values, numpy_type[kind.dataType])
        else:
            array = np.array(list(getattr(tensor, field).values) if field else [])
        flat = torch.from_numpy(np.ascontiguousarray(array.astype(_numpy_of(kind.dataType))))
        return flat.to(_TYPES[kind.dataType][0]).reshape(shape)

    def _blob(self, place: Any, kind: int, shape: list[int]) -> torch.Tensor:
        from coremltools import libmilstoragepython

        file = self.package / "Data/com.apple.CoreML" / place.fileName.replace("@model_path/", "")
        reader = self._readers.get(str(file))
        if reader is None:
            reader = self._readers[str(file)] = libmilstoragepython._BlobStorageReader(str(file))
        torch_type, name = _TYPES[kind]
        array = np.array(getattr(reader, f"read_{name}_data")(place.offset))
        if name == "fp16":
            array = array.view(np.float16)
        elif name == "uint4" and array.size != int(np.prod(shape)):
            pairs = array.view(np.uint8)  # two values a byte, the low half first
            array = np.stack([pairs & 15, pairs >> 4], -1).ravel()[: int(np.prod(shape))]
        return torch.from_numpy(np.ascontiguousarray(array)).to(torch_type).reshape(shape)


def _last_uses(operations: Sequence[Any]) -> list[set[str]]:
    """Names that nobody asks for behind each of the operations."""
    seen: set[str] = set()
    found = []
    for operation in reversed(operations):
        used = {a.name for bound in operation.inputs.values() for a in bound.arguments}
        used |= {output.name for output in operation.outputs}
        found.append(used - seen)
        seen |= used
    return found[::-1]


def _numpy_of(kind: int) -> type[np.generic]:
    return {1: np.bool_, 10: np.float16, 11: np.float32}.get(kind, np.int64)
