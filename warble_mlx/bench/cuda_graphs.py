"""Kernels per frame on CUDA, from the graphs that MLX launches.

MLX collects kernels into CUDA graphs and, when MLX_SAVE_CUDA_GRAPHS_DOT_FILE holds a file name
prefix, writes each graph that it launches to `<prefix>_<n>.dot`, replayed ones too. In these
files an octagon is a kernel, and a rectangle whose label names a graph launches that child graph
(products and attention through NVIDIA's libraries come as such). Kernels started outside graphs
would not be seen; MLX has none unless MLX_USE_CUDA_GRAPHS is 0.

The variable is read once, before the first graph, so counting needs a process of its own; and
writing files is slow, so nothing is timed in it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import msgspec

from warble_mlx.errors import WarbleError

VARIABLE = "MLX_SAVE_CUDA_GRAPHS_DOT_FILE"
_NODE = re.compile(r'^"(?P<graph>graph_\d+)_node_\d+"\[(?P<attributes>.*?)\];', re.M | re.S)
_SHAPE = re.compile(r'shape="([^"]*)"')
_LABEL = re.compile(r'label="([^"]*)"', re.S)
_SYMBOL = re.compile(r"_Z\w+")
KERNEL_SHAPE = "octagon"
KERNEL_WORD = "KERNEL"  # in the long form of these files, in which every node is a record


class Launched(msgspec.Struct, frozen=True):
    """What a number of frames launched, per frame: kernels, other nodes by shape, graphs."""

    kernels: float
    other_nodes: dict[str, float]
    graphs: float
    by_kernel: dict[str, float]


def count_nodes(text: str) -> tuple[Counter[str], Counter[str]]:
    """Kernels by symbol and other nodes by shape of one saved graph.

    A child graph counts as often as it is launched.
    """
    graphs: dict[str, list[tuple[str, str]]] = {}
    for node in _NODE.finditer(text):
        drawn, named = _SHAPE.search(node["attributes"]), _LABEL.search(node["attributes"])
        if drawn and named:
            graphs.setdefault(node["graph"], []).append((drawn[1], _payload(named[1])))
    children = {label for nodes in graphs.values() for _, label in nodes if label in graphs}
    kernels: Counter[str] = Counter()
    others: Counter[str] = Counter()
    waiting = [name for name in graphs if name not in children]
    while waiting:
        for shape, label in graphs[waiting.pop()]:
            if label in graphs:
                waiting.append(label)
            elif shape == KERNEL_SHAPE or KERNEL_WORD in label:
                symbol = _SYMBOL.search(label)
                kernels[symbol[0] if symbol else label] += 1
            else:
                others[shape] += 1
    return kernels, others


def _payload(label: str) -> str:
    """A label without the node's number, which stands in a line of its own before the rest."""
    number, _, rest = label.replace("\\n", "\n").strip().partition("\n")
    return rest.strip() if number.isdigit() else label


def saving_to(folder: Path) -> Mapping[str, str]:
    """The environment in which a process saves its graphs into `folder`."""
    return {**os.environ, VARIABLE: str(folder / "graph")}


def launched_per_frame(generate: Callable[[int], object], short: int, long: int) -> Launched | None:
    """Per-frame counts of `generate(frames)`, or None where no graphs are saved.

    The difference of two runs of `short` and `long` frames, after a warm-up: prompts and what
    else happens once fall out. Runs in the process that `saving_to` was given to.
    """
    prefix = os.environ.get(VARIABLE, "")
    if not prefix:
        return None
    folder = Path(prefix).parent
    counted = []
    for frames in (short, short, long):
        _clear(folder)
        generate(frames)
        mx.synchronize()
        counted.append(_all_nodes(folder))
    (short_graphs, short_kernels, short_others), (graphs, kernels, others) = counted[1:]
    if not graphs:
        return None
    if not kernels:
        example = next(folder.glob("*.dot")).read_text(errors="replace")[:400]
        raise WarbleError(f"no kernel is recognised in the graphs that MLX saved: {example}")
    frames = long - short

    def per_frame(more: Counter[str], fewer: Counter[str]) -> dict[str, float]:
        names = sorted(more, key=lambda name: (fewer[name] - more[name], name))
        return {n: (more[n] - fewer[n]) / frames for n in names if more[n] != fewer[n]}

    return Launched(
        kernels=(kernels.total() - short_kernels.total()) / frames,
        other_nodes=per_frame(others, short_others),
        graphs=(graphs - short_graphs) / frames,
        by_kernel=per_frame(kernels, short_kernels),
    )


def _clear(folder: Path) -> None:
    for file in folder.glob("*.dot"):
        file.unlink()


def _all_nodes(folder: Path) -> tuple[int, Counter[str], Counter[str]]:
    kernels: Counter[str] = Counter()
    others: Counter[str] = Counter()
    files = list(folder.glob("*.dot"))
    for file in files:
        own, other = count_nodes(file.read_text(errors="replace"))
        kernels += own
        others += other
    return len(files), kernels, others
