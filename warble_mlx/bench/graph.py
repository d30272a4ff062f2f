"""How many primitives one frame hands to the device: the step's graph is built, not run, and
walked.

MLX writes an unevaluated graph as dot; its rectangles are primitives. Views only describe memory
anew and dispatch nothing (a Reshape, Flatten or Contiguous of a transposed array copies, which the
graph does not tell, so the count is a little low). A fused group is one primitive. Some primitives
take several kernels on a device (a Concatenate one per input, a large Sort a few); on CUDA
`cuda_graphs` counts the kernels themselves.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.engine import Engine, Request, State, _controls

VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Copy",
        "Depends",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    }
)
FUSED = "Compiled"
_PRIMITIVE = re.compile(r'label ="([^"]*)", shape=rectangle')


class Primitives(msgspec.Struct, frozen=True):
    """Primitives of one frame by name, views included; fused groups are called `Compiled`."""

    by_name: dict[str, int]

    @property
    def dispatched(self) -> int:
        """Those that are no views."""
        return sum(count for name, count in self.by_name.items() if name not in VIEWS)

    @property
    def views(self) -> int:
        """Those that dispatch nothing."""
        return sum(self.by_name.values()) - self.dispatched


def primitives(outputs: Sequence[mx.array]) -> Primitives:
    """Count what evaluating `outputs` would run. They must not have been evaluated."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    names = _PRIMITIVE.findall(text.getvalue())
    counts = Counter(FUSED if name.startswith(FUSED) else name for name in names)
    return Primitives(dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


@contextmanager
def without_fusion() -> Iterator[None]:
    """Inside the block nothing is compiled, neither by us nor by MLX's own layers."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def step_outputs(engine: Engine, state: State, request: Request) -> list[mx.array]:
    """What a frame step after `state` returns, unevaluated; one row.

    The loop's own functions: a rewritten step cannot be timed one way and counted another.
    """
    if request.sampling.greedy:
        emitted, after = engine._greedy_step(state)
    else:
        emitted, after = engine._sampled_step(state, *_controls([request]))
    new = State(*after)
    return [emitted, *new[:-1], *new.caches]


def step_primitives(engine: Engine, request: Request) -> Primitives:
    """Primitives of a frame step as `engine` dispatches it.

    One row; more rows take the same ones and each a few more for its random numbers.
    """
    state = engine.prefill(request.prompt)
    mx.eval(state)
    return primitives(step_outputs(engine, state, request))


def unfused_primitives(engine: Engine, request: Request) -> Primitives:
    """The same with every fusion switched off."""
    with without_fusion():
        return step_primitives(Engine(engine.model, compiled=False), request)


def cache_slots(engine: Engine, request: Request) -> int:
    """Length of the KV cache that the last frame of `request` attends over."""
    begin = np.array(engine.prefill(request.prompt).slot)
    return engine._cache_length(int(begin[0]) + request.max_frames)
