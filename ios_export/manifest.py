"""The contract between the exporter and an app: `manifest.json`, typed.

The JSON schema beside this file is generated from these structures; a test keeps the two equal.
Everything an app needs to know stands here, so that it never has to guess a shape, a token id or
a default. Bytes are bytes, rates are in Hz, paths are relative to the manifest and use `/`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from warble_mlx.errors import CheckpointError

MANIFEST = "manifest.json"
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")

Result = Literal["pass", "fail", "unverified"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of the manifest: a field that is not known here is an error."""


class Tensor(Record, frozen=True, kw_only=True):
    """An input or output of a function, in the order in which it is passed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    about: str = ""


class State(Record, frozen=True, kw_only=True):
    """Tensors that a function takes and gives back; they start as zeros of these shapes."""

    name: str
    tensors: tuple[Tensor, ...]


class Function(Record, frozen=True, kw_only=True):
    """One function of a file. `inputs` then the states' tensors are what it takes, `outputs` then
    the states' tensors what it gives."""

    name: str
    file: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    states: tuple[State, ...] = ()
    longest_axis: int
    about: str = ""


class File(Record, frozen=True, kw_only=True):
    """A file of the folder. `role` says what it is for; optional ones may be left out of an app."""

    path: str
    bytes: int
    sha256: str
    role: str
    optional: bool = False


class Check(Record, frozen=True, kw_only=True):
    """One thing that was looked at. `where` is the machine or method; what only a device can tell
    is "unverified", never "pass"."""

    name: str
    result: Result
    where: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    note: str = ""


class Requires(Record, frozen=True, kw_only=True):
    """What an app needs to use a part."""

    ios: str
    mlx_swift: str = ""
    increased_memory_limit: bool = False


class MemoryEstimate(Record, frozen=True, kw_only=True):
    """Bytes while speaking, computed from the exported files; a projection, not a measurement."""

    weights: int
    mapped: int
    caches: int
    working: int
    total: int
    note: str


class Part(Record, frozen=True, kw_only=True):
    """One way into an app. `made_from` tells which bundle and options it belongs to."""

    name: str
    about: str
    made_from: str
    seconds: float
    peak_rss_bytes: int
    requires: Requires
    files: tuple[File, ...]
    functions: tuple[Function, ...] = ()
    memory: MemoryEstimate
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of all files that an app needs."""
        return sum(f.bytes for f in self.files if not f.optional)


class Model(Record, frozen=True, kw_only=True):
    """Where the weights come from."""

    name: str
    source: str
    revision: str | None
    licence: str


class CreatedBy(Record, frozen=True, kw_only=True):
    """Versions of what wrote the folder."""

    warble_mlx: str
    mlx: str
    coremltools: str = ""
    torch: str = ""


class Audio(Record, frozen=True, kw_only=True):
    """What comes out: mono float samples in -1..1."""

    sample_rate: int
    samples_per_frame: int
    frame_rate_hz: float


class Tokens(Record, frozen=True, kw_only=True):
    """Special ids, and the pieces of a prompt. Each piece is tokenised on its own."""

    semantic_begin: int
    semantic_end: int
    eos: int
    pad: int
    codebooks: int
    codebook_size: int
    system: tuple[int, ...]
    plain: tuple[int, ...]
    clone: tuple[int, ...]
    speech: tuple[int, ...]
    end: tuple[int, ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]
    byte_ids: tuple[int, ...]  # 256 if text is tokenised byte by byte, else none


class Sampling(Record, frozen=True, kw_only=True):
    """How a token is chosen, in this order, and the model's defaults."""

    order: tuple[str, ...]
    top_k: int
    top_p: float
    temperature: float
    min_temperature: float
    rescue_window: int
    rescue_top_p: float
    rescue_temperature: float
    max_frames: int
    max_text_characters: int | None


class Quantization(Record, frozen=True, kw_only=True):
    """How the Linears of the transformer blocks are packed."""

    bits: int
    group_size: int
    mode: str
    linears: int
    kept: tuple[str, ...]


class VoiceEntry(Record, frozen=True, kw_only=True):
    """A voice: text token in front of the text, or a file of prompt columns int32 [11, P]."""

    name: str
    default: bool
    description: str = ""
    language: str = ""
    token_ids: tuple[int, ...] = ()
    file: str = ""


class Bandwidth(Record, frozen=True, kw_only=True):
    """Weights read per second of speech against an assumed memory bandwidth; a projection."""

    device: str
    assumed_bytes_per_s: float
    bytes_per_frame: int
    bytes_per_s_of_speech: float
    real_time_factor_floor: float
    note: str


class Manifest(Record, frozen=True, kw_only=True):
    """The whole of manifest.json."""

    schema: Literal["warble-ios/1"]
    model: Model
    created_by: CreatedBy
    audio: Audio
    dimensions: dict[str, int | float]
    tokens: Tokens
    sampling: Sampling
    quantization: Quantization | None
    voices: tuple[VoiceEntry, ...]
    files: tuple[File, ...]
    parts: tuple[Part, ...]
    bandwidth: Bandwidth

    def part(self, name: str) -> Part | None:
        """The part of this name, if it is there."""
        return next((p for p in self.parts if p.name == name), None)

    @property
    def all_files(self) -> tuple[File, ...]:
        """The shared files, then those of every part."""
        return (*self.files, *(f for p in self.parts for f in p.files))


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder`/manifest.json.

    Raises CheckpointError if it is missing, no JSON, of another schema, or names a path that
    leads out of the folder or is listed twice.
    """
    path = folder / MANIFEST
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}. Give a folder that `warble export-ios` has written"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}. Export the folder again") from error
    seen = set()
    for file in found.all_files:
        parts = PurePosixPath(file.path).parts
        if file.path.startswith("/") or ".." in parts or "\\" in file.path or not parts:
            raise CheckpointError(f"{path}: {file.path!r} leads out of the folder")
        if file.path in seen:
            raise CheckpointError(f"{path}: {file.path!r} is listed twice")
        seen.add(file.path)
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder`/manifest.json, whole or not at all."""
    partial = folder / f".{MANIFEST}.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    partial.replace(folder / MANIFEST)


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of manifest.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "manifest.json of warble export-ios",
        **msgspec.json.schema(Manifest),
    }
