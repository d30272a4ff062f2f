"""What is in a bundle: dimensions, sizes, dtypes, voices, provenance. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warble_mlx.config import ModelConfig, read_config, read_config_json
from warble_mlx.convert.names import COMPONENTS, DECODER, ENCODER, FILES, MODEL, component_of
from warble_mlx.convert.report import table
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import Header, read_header
from warble_mlx.voices import VoiceList, read_voices

NEEDED = ("config.json", MODEL, DECODER, "tokenizer.json", "voices.json")
_SHORT = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class Part:
    """One component of one file. `dtypes` are short names, `4-bit` and the like for packed
    weights; `parameters` counts the packed ones by what they stand for."""

    name: str
    file: str
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class BundleDescription:
    """Everything that can be said about a bundle without loading its weights."""

    folder: Path
    config: ModelConfig
    parts: tuple[Part, ...]
    voices: VoiceList
    generation: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    provenance: Mapping[str, Any]

    @property
    def can_register_voices(self) -> bool:
        """Whether the codec's encoder is there."""
        return any(part.file == ENCODER for part in self.parts)


def describe_bundle(folder: Path) -> BundleDescription:
    """Read config.json, voices.json and the headers of the weights files of a bundle.

    Raises CheckpointError naming all missing files at once, or the one that is damaged.
    """
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is no complete bundle. Missing: {', '.join(missing)}")
    config, raw = read_config(folder), read_config_json(folder)
    quantization = raw.get("quantization")
    parts: list[Part] = []
    for file in FILES:
        if (folder / file).is_file():
            parts += _parts(read_header(folder / file), file, quantization or {})
    named = read_voices(folder)
    return BundleDescription(
        folder=folder,
        config=config,
        parts=tuple(parts),
        voices=named,
        generation=raw.get("generation", {}),
        quantization=quantization,
        provenance=raw.get("provenance", {}),
    )


def _parts(header: Header, file: str, quantization: Mapping[str, Any]) -> list[Part]:
    groups: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in header.entries.items():
        path, _, kind = name.rpartition(".")
        packed = kind == "weight" and f"{path}.scales" in header.entries
        parameters, dtype = entry.size, _SHORT.get(entry.dtype, entry.dtype.lower())
        if packed:
            bits = _bits(path, header, quantization)
            parameters, dtype = entry.size * 32 // bits, f"{bits}-bit"
        elif kind in ("scales", "biases") and f"{path}.scales" in header.entries:
            parameters, dtype = 0, ""
        groups.setdefault(component_of(name), []).append((parameters, entry.nbytes, dtype))
    order = [label for _, label in COMPONENTS]
    labels = sorted(groups, key=lambda label: order.index(label) if label in order else len(order))
    return [
        Part(
            name=label,
            file=file,
            tensors=len(groups[label]),
            parameters=sum(parameters for parameters, _, _ in groups[label]),
            nbytes=sum(nbytes for _, nbytes, _ in groups[label]),
            dtypes=tuple(sorted({dtype for _, _, dtype in groups[label] if dtype})),
        )
        for label in labels
    ]


def _bits(path: str, header: Header, quantization: Mapping[str, Any]) -> int:
    own = quantization.get(path)
    settings = own if isinstance(own, dict) else quantization
    bits = settings.get("bits", quantization.get("bits"))
    if not isinstance(bits, int) or bits < 1:
        raise CheckpointError(
            f"{header.path} holds packed weights for {path}, but config.json has no quantization"
            " block that tells their bits: convert the model again"
        )
    return bits


def format_description(bundle: BundleDescription) -> str:
    """The description as aligned text."""
    c, provenance = bundle.config, bundle.provenance
    origin = provenance.get("source", "unknown")
    if provenance.get("revision"):
        origin = f"{origin} at {provenance['revision']}"
    facts = [
        ("folder", str(bundle.folder)),
        ("source", f"{origin}, converted by {provenance.get('converter', 'unknown')}"),
        ("slow AR", f"{c.n_layer} layers, width {c.dim}, {c.n_head}/{c.n_local_heads} heads"),
        ("fast AR", f"{c.n_fast_layer} layers, width {c.fast.dim}"),
        ("codec", f"{c.codec_sample_rate} Hz, {c.frame_rate_hz:.2f} frames per second"),
        ("context", f"{c.max_seq_len} positions"),
        ("voices", ", ".join(voice.name for voice in bundle.voices.voices) or "none named"),
        ("registering", "possible" if bundle.can_register_voices else f"no, without {ENCODER}"),
    ]
    quantizer = provenance.get("quantizer")
    if isinstance(quantizer, Mapping):
        how = f"{quantizer.get('policy', 'unknown policy')}, {quantizer.get('method', 'unknown')}"
        facts.insert(2, ("quantised", how))
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {value}" for name, value in facts]
    return "\n".join([*lines, "", *size_table(bundle.parts)])


def size_table(parts: Sequence[Part]) -> list[str]:
    """Lines of a table of components: dtype, parameters, megabytes."""
    rows = [("component", "dtype", "parameters", "MB")]
    rows += [
        (part.name, "/".join(part.dtypes), f"{part.parameters:,}", f"{part.nbytes / 1e6:,.1f}")
        for part in parts
    ]
    parameters = sum(part.parameters for part in parts)
    nbytes = sum(part.nbytes for part in parts)
    return table([*rows, ("all", "", f"{parameters:,}", f"{nbytes / 1e6:,.1f}")])
