"""A bundle's DualAR file as a tree of plain MLX modules, one per tensor owner.

It knows nothing of arktts: paths are the file's names. This is what any MLX tool sees, and what
mlx-lm's quantiser walks over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Branch(nn.Module):
    """A module that only holds others."""


class Owner(nn.Module):
    """Tensors that no tool quantises (norms)."""


def modules_of(weights: Mapping[str, mx.array]) -> nn.Module:
    """The tree for tensors named `path.parameter`; numbers in a path become list indices.

    Matrices under `layers.` or `…_layers.` and the fast output are Linears, other matrices are
    embeddings, everything else is kept as it is.
    """
    owners: dict[str, dict[str, mx.array]] = {}
    for name, weight in weights.items():
        path, _, parameter = name.rpartition(".")
        owners.setdefault(path, {})[parameter] = weight
    tree: dict[str, Any] = {}
    for path, own in owners.items():
        node = tree
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = _owner(path, own)
    return _branch(tree)


def _owner(path: str, own: dict[str, mx.array]) -> nn.Module:
    matrix = own["weight"].ndim == 2
    module: nn.Module
    if matrix and not path.endswith("embeddings"):
        rows, columns = own["weight"].shape
        module = nn.Linear(columns, rows, bias="bias" in own)
    elif matrix:
        module = nn.Embedding(*own["weight"].shape)
    else:
        module = Owner()
    for name, weight in own.items():
        module[name] = weight
    return module


def _branch(tree: dict[str, Any]) -> nn.Module:
    branch = Branch()
    for name, below in tree.items():
        branch[name] = _node(below)
    return branch


def _node(below: Any) -> Any:
    if isinstance(below, nn.Module):
        return below
    if all(key.isdigit() for key in below):
        return [_node(below[key]) for key in sorted(below, key=int)]
    return _branch(below)
