"""Whole training steps as CUDA graphs.

A step is over a thousand kernels, and a launch costs more than most of them run: uncaptured, a
fast GPU waits for its CPU most of the time. Where capturing fails, or what is trained is not on
a GPU, the step runs as plain code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samples.bundled_voice.progress import log


class Step:
    """Calls `step` as a graph if it can. Inputs and results must be fixed tensors.

    `needs_tracks` are optimisers whose gradients are dropped before the capture, so that the
    graph owns the memory of its own.
    """

    def __init__(
        self,
        step: Callable[[], None],
        optimisers: Sequence[torch.optim.Optimizer],
        name: str,
        *,
        warm: int = 3,
        pool: tuple[int, int] | None = None,
    ) -> None:
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        groups = (group for optimiser in optimisers for group in optimiser.param_groups)
        if not all(weight.is_cuda for group in groups for weight in group["params"]):
            return
        try:
            began = time.monotonic()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warm):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            warmed = time.monotonic()
            for optimiser in optimisers:
                optimiser.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step()
            torch.cuda.synchronize()
            self.graph = graph
            log(
                f"captured {name}: warm {warmed - began:.1f} s, capture"
                f" {time.monotonic() - warmed:.1f} s,"
                f" {torch.cuda.memory_reserved() / 2**30:.1f} GiB"
            )
        except RuntimeError as error:
            torch.cuda.synchronize()
            log(f"NOT captured, runs uncaptured: {name}: {str(error)[:500]}")

    def __call__(self) -> None:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


def adam(
    groups: list[dict[str, object]], rate: float, betas: tuple[float, float], device: torch.device
) -> torch.optim.AdamW:
    """AdamW whose rate can change inside a graph."""
    if device.type == "cuda":
        tensor = torch.tensor(rate, device=device)
        return torch.optim.AdamW(groups, lr=tensor, betas=betas, fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=rate, betas=betas)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Averages:
    """A running average of parameters, kept beside them and updated inside the step."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], share: float) -> None:
        self.names = list(parameters)
        self.sources = [parameter.detach() for parameter in parameters.values()]
        self.values = [source.clone() for source in self.sources]
        self.share = share

    def update(self) -> None:
        torch._foreach_lerp_(self.values, self.sources, self.share)

    def restart(self) -> None:
        for value, source in zip(self.values, self.sources, strict=True):
            value.copy_(source)

    def state(self) -> dict[str, Tensor]:
        copies = (value.detach().cpu().clone() for value in self.values)
        return dict(zip(self.names, copies, strict=True))
