"""PyTorch modules to Core ML packages: 16-bit programs for iOS 18, several functions a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from warble_mlx.ios_export.coreml_file import quiet


class Input(NamedTuple):
    """An input of a function: name, shape, and whether it is int32 instead of float16."""

    name: str
    shape: tuple[int, ...]
    whole: bool = False


def write_program(program: Any, path: Path) -> None:
    """Save a program that is written already, as it stands: no pass of the converter changes it."""
    with quiet():
        import coremltools as ct

        model = ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        model.save(str(path))


def to_package(
    module: torch.nn.Module,
    inputs: Sequence[Input],
    outputs: Mapping[str, bool],
    path: Path,
    *,
    states: Sequence[str] = (),
) -> Any:
    """Trace `module`, convert it and save it as `path`; returns the converter's model.

    outputs: names, and whether each is int32. states: names of the buffers that are kept between
    calls, in float16.
    """
    with quiet():
        import coremltools as ct

        examples = tuple(
            torch.zeros(i.shape, dtype=torch.int32 if i.whole else torch.float32) for i in inputs
        )
        with torch.no_grad():
            traced = torch.jit.trace(module.eval(), examples, check_trace=False)
        for name in states:  # tracing has run the module once
            getattr(module, name).zero_()
        kept = [
            ct.StateType(
                wrapped_type=ct.TensorType(
                    shape=tuple(getattr(module, name).shape), dtype=np.float16
                ),
                name=name,
            )
            for name in states
        ]
        model = ct.convert(
            traced,
            inputs=[
                ct.TensorType(i.name, shape=i.shape, dtype=np.int32 if i.whole else np.float16)
                for i in inputs
            ],
            outputs=[
                ct.TensorType(name, dtype=np.int32 if whole else np.float16)
                for name, whole in outputs.items()
            ],
            states=kept or None,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
    model.save(str(path))
    return model


def join(packages: Mapping[str, Path], out: Path, default: str) -> None:
    """One package with the `main` function of each of `packages` under its name here. Weights that
    are the same are stored once."""
    with quiet():
        import coremltools as ct

        descriptor = ct.utils.MultiFunctionDescriptor()
        for name, path in packages.items():
            descriptor.add_function(str(path), "main", name)
        descriptor.default_function_name = default
        ct.utils.save_multifunction(descriptor, str(out))
