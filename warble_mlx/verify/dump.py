"""What another engine computed, in one file: the format that `warble verify` reads.

A dump is a safetensors file. Its metadata key `warble-dump` holds `DumpInfo` as JSON. Tensors are
float32 or int32, whatever the engine computed in. T prompt positions, S semantic choices of a case
(one more than its frames F if it ended by EOS), D = dim, C = codebook_size:

| name | shape | content |
|---|---|---|
| rope.slow, rope.fast, rope.codec | [positions, h / 2, 2] | cosine and sine |
| CASE.columns | [11, T] | packed prompt: text or semantic id, ten codes |
| CASE.embedding | [T, D] | |
| CASE.layer.I | [T, D] | output of slow layer I |
| CASE.normed | [S, D] | final norm, at every semantic choice |
| CASE.fast_input | [S, D] | what the fast AR is given; absent if it is `normed` |
| CASE.semantic_logits | [S, C + 1] | semantic tokens, then EOS |
| CASE.fast_logits | [F, 9, C] | of codes 1..9 |
| CASE.codes | [10, F] | |
| CASE.uniforms.semantic, .codes | [S, 2, C + 1], [S, 9, C] | sampled cases only: numbers drawn |
| codec.codes, .dequantised, .latents, .wave | [10, F], [F, L], [4 F, L], [2048 F] | decoding |
| codec.encode.wave, .codes, .margins | [N], [10, F], [10, F] | encoding |

Sampled cases hold no embedding and layers. Margins are differences of squared distances between the
two best entries of a book.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from warble_mlx.config import ModelConfig
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import read_header, write_safetensors
from warble_mlx.staging import staged_file

Array = npt.NDArray[Any]

FORMAT = "warble-dump-1"
METADATA_KEY = "warble-dump"
_KINDS: Mapping[str, str] = {"float32": "F32", "int32": "I32"}


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a sampled case."""

    top_k: int
    top_p: float
    temperature: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One utterance. `text` (and `reference_text`, whose codes stand in the columns) is what the
    prompt was built from, None if only its columns are known."""

    name: str
    finished: bool
    text: str | None = None
    reference_text: str | None = None
    sampled: Sampled | None = None


class DumpInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who made a dump, of what, and how."""

    format: str
    engine: str
    versions: dict[str, str]
    device: str
    dtype: str  # of weights and activations: float32 or bfloat16
    tf32: bool  # whether float32 products were allowed to be rounded
    checkpoint: dict[str, str]  # file name: SHA-256
    config: ModelConfig
    packed: bool  # the transformers' weights were quantised and taken as such
    codec_dtype: str | None  # in which the codec was stored, None without a codec
    cases: list[Case]


@dataclass(frozen=True)
class Dump:
    """A dump in memory."""

    info: DumpInfo
    tensors: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        """Tensor `name`; CheckpointError if the dump lacks it."""
        if name not in self.tensors:
            raise CheckpointError(
                f"the dump lacks {name}: make it again with this version's writer"
            )
        return self.tensors[name]

    def fast_input(self, case: str) -> Array:
        """What the fast AR was given at each semantic choice, [S, D]."""
        return self.tensors.get(f"{case}.fast_input", self[f"{case}.normed"])

    @property
    def has_codec(self) -> bool:
        """Whether a codec was run."""
        return self.info.codec_dtype is not None


def read_dump(path: Path) -> Dump:
    """Read a dump. Raises CheckpointError for damaged files and files of another kind."""
    if not path.is_file():
        raise CheckpointError(f"there is no dump {path}")
    header = read_header(path)
    raw = header.metadata.get(METADATA_KEY)
    if raw is None:
        raise CheckpointError(
            f"{path} is a safetensors file, but no dump of an engine: write one with"
            " `python -m reference.dump` or `python -m reference.published` in the tests folder"
        )
    try:
        info = msgspec.json.decode(raw, type=DumpInfo)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if info.format != FORMAT:
        raise CheckpointError(
            f"{path} has the format {info.format}, this version reads {FORMAT}: make it again"
        )
    return Dump(info, {name: header.read(name) for name in header.entries})


def write_dump(path: Path, dump: Dump) -> None:
    """Write a dump, which appears under its name once it is complete."""
    arrays = {name: np.ascontiguousarray(value) for name, value in dump.tensors.items()}
    spelled = {name: (_KINDS[a.dtype.name], a.shape) for name, a in arrays.items()}
    metadata = {METADATA_KEY: msgspec.json.encode(dump.info).decode()}
    with staged_file(path) as part:
        write_safetensors(part, spelled, arrays.__getitem__, metadata)
