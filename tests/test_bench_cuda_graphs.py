"""Counting kernels in the CUDA graphs that MLX saves, from files as the driver writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from warble_mlx.bench.cuda_graphs import VARIABLE, count_nodes, launched_per_frame, saving_to
from warble_mlx.errors import WarbleError


def node(graph: int, index: int, shape: str, label: str) -> str:
    return f'"graph_{graph}_node_{index}"[style="bold" shape="{shape}" label="{index}\n{label}\n"];'


def dot(*graphs: list[str]) -> str:
    clusters = (
        f'subgraph cluster_{n} {{\nlabel="graph_{n}" graph[style="dashed"];\n'
        + "\n".join(nodes)
        + f'\n"graph_{n}_node_0" -> "graph_{n}_node_1";\n}}'
        for n, nodes in enumerate(graphs, 1)
    )
    return "digraph dot {\n" + "\n".join(clusters) + "\n}\n"


ADD, MUL = "_ZN3mlx4core2cu3addEPf", "_ZN3mlx4core2cu3mulEPf"
FRAME = dot(
    [
        node(1, 0, "octagon", ADD),
        node(1, 1, "rectangle", "graph_2"),
        node(1, 2, "rectangle", "graph_2"),
        node(1, 3, "trapezium", "memset"),
    ],
    [node(2, 0, "octagon", MUL), node(2, 1, "octagon", ADD)],
)


def test_child_graphs_count_as_often_as_they_are_launched() -> None:
    kernels, others = count_nodes(FRAME)
    assert kernels == {ADD: 3, MUL: 2}
    assert others == {"trapezium": 1}


def test_the_long_form_is_read_too() -> None:
    long = (
        '"graph_1_node_0"[style="bold" shape="record" label="{KERNEL\n'
        f"| {{ID | 0 (topoId: 3) | {ADD}\\<\\<\\<1,128,0\\>\\>\\>}}\n| {{priority | 0}}\n"
        '}"];\n"graph_1_node_1"[style="solid" shape="record" label="{\nMEMCPY\n| {{ID | x}}}"];\n'
    )
    kernels, others = count_nodes(long)
    assert kernels == {ADD: 1}
    assert others == {"record": 1}


def writer(folder: Path, once: int, text: str = FRAME) -> Callable[[int], None]:
    """A model that saves two graphs per frame, and `once` for its prompt."""

    def generate(frames: int) -> None:
        for n in range(once + 2 * frames):
            (folder / f"graph_{n}.dot").write_text(text)

    return generate


def test_per_frame_is_the_difference_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, saving_to(tmp_path)[VARIABLE])
    found = launched_per_frame(writer(tmp_path, once=7), short=2, long=6)
    assert found is not None
    assert (found.kernels, found.graphs) == (10, 2)
    assert found.by_kernel == {ADD: 6, MUL: 4}
    assert found.other_nodes == {"trapezium": 2}


def test_nothing_is_known_without_saved_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert launched_per_frame(writer(tmp_path, once=0), 2, 6) is None
    monkeypatch.setenv(VARIABLE, saving_to(tmp_path / "elsewhere")[VARIABLE])
    assert launched_per_frame(writer(tmp_path, once=0), 2, 6) is None


def test_files_of_another_form_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, saving_to(tmp_path)[VARIABLE])
    with pytest.raises(WarbleError, match="digraph other"):
        launched_per_frame(writer(tmp_path, once=0, text="digraph other {}"), 2, 6)
