"""The part `mlx-swift`: the bundle as a Swift port of this architecture reads it.

Names are those of the published MLX layout, `model.` and `codec.` in front. What an app touches a
row at a time (the text and the codebook table) lies apart, uncompressed and aligned to memory
pages, so that it can be mapped and costs no memory; the rows of it that serve as output head are
copied into `head_semantic.weight`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from warble_mlx.config import ModelConfig, read_config
from warble_mlx.convert.companions import write_json
from warble_mlx.errors import CheckpointError
from warble_mlx.ios_export.checks import at_most, equal, unverified
from warble_mlx.ios_export.facts import block_linears, is_published, packed_paths
from warble_mlx.ios_export.grid import grid_check, stored_grid
from warble_mlx.ios_export.job import Built, Job
from warble_mlx.ios_export.manifest import Check, MemoryEstimate, Requires
from warble_mlx.quant.proof import PUBLISHED_LIMIT
from warble_mlx.safetensors_file import Array, Header, read_header, write_safetensors
from warble_mlx.weights import DECODER_FILE, MODEL_FILE

CODEC_FILE = "codec.safetensors"
EMBEDDINGS_FILE = "embeddings.safetensors"
TABLES = ("embeddings.weight", "codebook_embeddings.weight")
HEAD = "model.head_semantic.weight"
PAGE = 16_384  # bytes of a memory page on Apple silicon
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "voices.json",
              "generation_config.json")  # fmt: skip


def build(job: Job, folder: Path) -> Built:
    """Write config.json, the three weight files and the tokenizer, and compare every tensor."""
    source, codec = read_header(job.bundle / MODEL_FILE), read_header(job.bundle / DECODER_FILE)
    job.say("writing weights")
    _write_model(job.config, source, folder / MODEL_FILE)
    _write_prefixed(codec, "codec.", folder / CODEC_FILE)
    write_aligned(source, TABLES, "model.", folder / EMBEDDINGS_FILE)
    write_json(folder / "config.json", _config(job.raw_config))
    for name in COMPANIONS:
        if (job.bundle / name).is_file():
            shutil.copyfile(job.bundle / name, folder / name)
    job.say("comparing tensors")
    checks = [*source_checks(job, folder), *folder_checks(folder)]
    checks.append(unverified("loading in MLX-Swift", "no Swift compiler was used"))
    sizes = {p.name: p.stat().st_size for p in folder.iterdir()}
    mapped, working = sizes[EMBEDDINGS_FILE], 64_000_000
    slow, slots = job.config.slow, min(1024, job.config.max_seq_len)
    caches = 4 * slow.n_layer * slow.n_kv_head * slots * slow.head_dim
    weights = sizes[MODEL_FILE] + sizes[CODEC_FILE]
    return Built(
        about="Weights and config for an MLX-Swift port of this architecture",
        requires=Requires(ios="17.0", mlx_swift="0.31", increased_memory_limit=True),
        roles={
            "config.json": "dimensions and quantisation",
            MODEL_FILE: "transformers, heads",
            CODEC_FILE: "codec decoder",
            EMBEDDINGS_FILE: "tables to be mapped, read by row",
            **dict.fromkeys(COMPANIONS, "tokenizer and voices"),
        },
        checks=checks,
        memory=MemoryEstimate(
            weights=weights,
            mapped=mapped,
            caches=caches,
            working=working,
            total=weights + caches + working,
            note=f"projection; tables stay clean pages; caches of {slots} positions in 16 bits",
        ),
        notes=[
            f"{HEAD} holds the rows of the semantic tokens, then EOS: the only ones ever chosen.",
            f"Rows of {EMBEDDINGS_FILE} start at a page: map the file and widen bfloat16 by 16"
            " bits.",
        ],
    )


def _config(raw: dict[str, Any]) -> dict[str, Any]:
    """The bundle's config, with the files that a port has to read."""
    return raw | {
        "codec_filename": CODEC_FILE,
        "embeddings_filename": EMBEDDINGS_FILE,
        "head_tensor": HEAD,
    }


def _write_model(config: ModelConfig, source: Header, path: Path) -> None:
    declared = {
        f"model.{name}": (entry.dtype, entry.shape)
        for name, entry in source.entries.items()
        if name not in TABLES
    }
    table = source.entries[TABLES[0]]
    declared[HEAD] = (table.dtype, (config.head_rows, table.shape[1]))

    def produce(name: str) -> Array:
        if name == HEAD:
            return head_rows(config, source)
        return source.read(name.removeprefix("model."))

    write_safetensors(path, declared, produce)


def head_rows(config: ModelConfig, source: Header) -> Array:
    """Raw rows of the text table that can be chosen: semantic tokens, then EOS."""
    table = source.read(TABLES[0])
    semantic = table[config.semantic_begin_id : config.semantic_end_id + 1]
    return np.concatenate([semantic, table[config.eos_token_id : config.eos_token_id + 1]])


def _write_prefixed(source: Header, prefix: str, path: Path) -> None:
    declared = {prefix + name: (e.dtype, e.shape) for name, e in source.entries.items()}
    write_safetensors(path, declared, lambda name: source.read(name.removeprefix(prefix)))


def write_aligned(source: Header, names: tuple[str, ...], prefix: str, path: Path) -> None:
    """Write tensors so that each begins at a page of the file.

    The format wants tensors without gaps, so zeros between them are tensors too (`padding.i`), and
    the header is filled up with spaces, which its readers skip.
    """
    layout: dict[str, Any] = {}
    at = 0
    for index, name in enumerate(names):
        gap = -at % PAGE
        if gap:
            layout[f"padding.{index}"] = {
                "dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]
            }  # fmt: skip
            at += gap
        entry = source.entries[name]
        end = at + entry.nbytes
        layout[prefix + name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    text = msgspec.json.encode({"__metadata__": {"format": "mlx"}, **layout})
    text += b" " * (-(len(text) + 8) % PAGE)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, where in layout.items():
                begin, end = where["data_offsets"]
                file.seek(8 + len(text) + begin)
                if name.startswith("padding."):
                    file.write(bytes(end - begin))
                else:
                    file.write(source.read(name.removeprefix(prefix)).data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def source_checks(job: Job, folder: Path) -> Iterator[Check]:
    """Every tensor of the bundle is there, bit for bit, and the policy was kept."""
    files = {
        "model.": [read_header(folder / MODEL_FILE), read_header(folder / EMBEDDINGS_FILE)],
        "codec.": [read_header(folder / CODEC_FILE)],
    }
    for prefix, source in (
        ("model.", read_header(job.bundle / MODEL_FILE)),
        ("codec.", read_header(job.bundle / DECODER_FILE)),
    ):
        differing = [
            name
            for name in source.entries
            if not any(_same(source, name, written, prefix + name) for written in files[prefix])
        ]
        yield equal(
            f"tensors of {source.path.name} that differ",
            len(differing),
            0,
            note=", ".join(differing[:5]),
        )
    written = read_header(folder / MODEL_FILE)
    wanted = head_rows(job.config, read_header(job.bundle / MODEL_FILE))
    yield equal("rows of the head that differ", int((written.read(HEAD) != wanted).any(1).sum()), 0)
    packed = packed_paths(job.bundle)
    if packed:
        stray = set(packed) ^ set(block_linears(job.bundle))
        yield equal("Linears packed against the policy", len(stray), 0, note=", ".join(stray))
        found = stored_grid(folder / MODEL_FILE, prefix="model.")
        yield grid_check(MODEL_FILE, stored_grid(job.bundle / MODEL_FILE), found.values())


def _same(source: Header, name: str, written: Header, as_name: str) -> bool:
    entry, found = source.entries[name], written.entries.get(as_name)
    if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
        return False
    return bool(np.array_equal(source.read(name), written.read(as_name)))


def folder_checks(folder: Path) -> Iterator[Check]:
    """What the folder says about itself: alignment, quantisation block, tokenizer, size."""
    tables = read_header(folder / EMBEDDINGS_FILE)
    misaligned = [
        name
        for name, entry in tables.entries.items()
        if name.startswith("model.") and (tables.data_start + entry.data_offsets[0]) % PAGE
    ]
    yield equal("tables that do not start at a page", len(misaligned), 0)
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    names = read_header(folder / MODEL_FILE).entries
    packed = [n for n in names if n.endswith(".scales")]
    told = isinstance(config.get("quantization"), dict)
    yield equal("packed weights are told by config.json", told, bool(packed))
    yield equal("tokenizer.json", (folder / "tokenizer.json").is_file(), 1)
    if packed and is_published(read_config(folder)):
        total = sum(p.stat().st_size for p in folder.iterdir())
        yield at_most("size of the folder", total, PUBLISHED_LIMIT, "bytes")
