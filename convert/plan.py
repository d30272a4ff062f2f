"""What goes where: every tensor of the model matched with what the source stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from warble_mlx.config import ModelConfig, parse_config
from warble_mlx.convert.geometry import check_layer_counts, codec_fields
from warble_mlx.convert.names import (
    DECODER,
    MODEL,
    TIED_HEAD,
    TIED_HEAD_REASON,
    Spec,
    expected_tensors,
)
from warble_mlx.convert.source import Dropped, Source
from warble_mlx.convert.stored import StoredTensor
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import FLOATS, Shape, itemsize

Pieces = tuple[StoredTensor, ...]
SHOWN = 5  # names per kind of error

# Both ways of storing weight norm: magnitude, direction.
_PAIRS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


@dataclass(frozen=True)
class Planned:
    """One tensor of the bundle: what it is, what it is made of, and the dtype it gets."""

    spec: Spec
    pieces: Pieces
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the bundle."""
        return math.prod(self.spec.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Plan:
    """The whole conversion, checked: dimensions, tensors by name, and what is left out."""

    config: ModelConfig
    tensors: Mapping[str, Planned]
    dropped: tuple[Dropped, ...]

    def layouts(self) -> dict[str, dict[str, tuple[str, Shape]]]:
        """Dtype and shape of every tensor, by file of the bundle."""
        found: dict[str, dict[str, tuple[str, Shape]]] = {}
        for name, planned in self.tensors.items():
            file = found.setdefault(planned.spec.file, {})
            file[name] = (planned.dtype, planned.spec.shape)
        return found


def make_plan(source: Source, codec_dtype: str) -> Plan:
    """Match the source's tensors with the model's.

    `codec_dtype` is the safetensors name of the codec's dtype; the DualAR is bfloat16.

    Raises CheckpointError naming every kind of misfit: missing, unexpected, of another shape,
    not floating point, and config fields that contradict the tensors.
    """
    stored = dict(source.tensors)
    dropped = list(source.dropped)
    folded = _folded_shapes(stored)
    where = str(source.folder / "config.json")
    fields = codec_fields(folded, source.config, where)
    config = _written_out(parse_config(msgspec.json.encode({**source.config, **fields}), where))
    check_layer_counts(folded, config, where)
    expected = expected_tensors(config, encoder=source.encoder)
    head = stored.pop(TIED_HEAD, None)
    if head:
        _check_tied(head, stored.get("embeddings.weight"))
        dropped.append(Dropped(TIED_HEAD, TIED_HEAD_REASON))
    pieces = {name: found for name in expected if (found := _take(stored, name, expected[name]))}
    _report_misfits(source, expected, pieces, stored)
    planned = {
        name: Planned(spec, pieces[name], "BF16" if spec.file == MODEL else codec_dtype)
        for name, spec in expected.items()
    }
    return Plan(config, planned, tuple(dropped))


def _written_out(config: ModelConfig) -> ModelConfig:
    """The same model with the fast AR's own dimensions and the bundle's codec file filled in."""
    fast = config.fast
    return msgspec.structs.replace(
        config,
        fast_dim=fast.dim,
        fast_n_head=fast.n_head,
        fast_n_local_heads=fast.n_kv_head,
        fast_head_dim=fast.head_dim,
        fast_intermediate_size=fast.ffn,
        codec_filename=DECODER,
    )


def _folded_shapes(stored: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    shapes = {}
    for name, tensor in stored.items():
        for _, direction in _PAIRS:
            if name.endswith(direction):
                name = f"{name.removesuffix(direction)}.weight"
        shapes[name] = tensor.shape
    return shapes


def _take(stored: dict[str, StoredTensor], name: str, spec: Spec) -> Pieces | None:
    """Remove from `stored` what makes up tensor `name`: itself, or a whole weight-norm pair."""
    if name in stored:
        return (stored.pop(name),)
    if spec.normed:
        stem = name.removesuffix(".weight")
        for pair in _PAIRS:
            names = [stem + suffix for suffix in pair]
            if all(part in stored for part in names):
                return tuple(stored.pop(part) for part in names)
    return None


def _check_tied(head: StoredTensor, embeddings: StoredTensor | None) -> None:
    if embeddings is None:
        return  # missed by name later
    same = (head.shape, head.dtype) == (embeddings.shape, embeddings.dtype)
    if not same or not np.array_equal(head.read(), embeddings.read()):
        raise CheckpointError(
            f"{TIED_HEAD} differs from embeddings.weight, but this graph has one table for both:"
            " the checkpoint was trained with an untied head and cannot be converted"
        )


def _report_misfits(
    source: Source,
    expected: Mapping[str, Spec],
    pieces: Mapping[str, Pieces],
    left: Mapping[str, StoredTensor],
) -> None:
    missing = [
        f"{name} (config.json sets {spec.because})" if spec.because else name
        for name, spec in expected.items()
        if name not in pieces
    ]
    shapes, integers = [], []
    for name, parts in pieces.items():
        spec = expected[name]
        want = spec.shape if source.channels_last else spec.pytorch_shape
        if parts[-1].shape != want:
            shapes.append(f"{name} is {list(parts[-1].shape)}, not {list(want)}")
        elif len(parts) == 2 and parts[0].shape != (want[0], 1, 1):
            shapes.append(f"magnitude of {name} is {list(parts[0].shape)}, not [{want[0]}, 1, 1]")
        integers += [f"{name} is {part.dtype}" for part in parts if part.dtype not in FLOATS]
    kinds: dict[str, list[str]] = {
        "missing": missing,
        "unexpected": sorted(left),
        "of the wrong shape": shapes,
        "not floating point": integers,
    }
    said = [f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names]
    if said:
        raise CheckpointError(
            f"the tensors of {source.folder} are not those of its config.json. {'; '.join(said)}"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
