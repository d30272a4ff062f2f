"""From a source folder to a bundle: read, map, write, check, rename."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warble_mlx import __version__
from warble_mlx.config import read_config
from warble_mlx.convert.card import licence_lines, model_card
from warble_mlx.convert.companions import (
    bundle_config,
    copy_licences,
    copy_tokenizer,
    write_json,
    write_voices,
)
from warble_mlx.convert.plan import Plan, make_plan
from warble_mlx.convert.report import Report, components_of
from warble_mlx.convert.source import Source, member, open_source
from warble_mlx.convert.transform import bundle_values
from warble_mlx.errors import CheckpointError
from warble_mlx.safetensors_file import Array, read_header, write_safetensors
from warble_mlx.staging import staged_folder

CODEC_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SPARE_BYTES = 20_000_000  # headers, tokenizer, licences
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "voices.json")

Progress = Callable[[str, int, int], None]
"""Called with the tensor just done, bytes done and bytes in all."""
Accept = Callable[[Path], object]
"""Called with a finished bundle that has not got its name yet; it raises if that is to go."""


def convert(
    source: Path,
    out: Path,
    *,
    codec_dtype: str = "float16",
    force: bool = False,
    source_id: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
    accept: Accept | None = None,
) -> Report:
    """Convert the checkpoint in folder `source` to a bundle in the new folder `out`.

    Read are the published PyTorch layout (codec as `.pth` or safetensors), fine-tunes of it, the
    MLX layout of others, and bundles, which are rewritten with another codec dtype. DualAR
    tensors become bfloat16, codec tensors `codec_dtype` (bfloat16, float16 or float32).
    `source_id` (a hub id) and `revision` go into the provenance; without them a bundle's own are
    kept, and any other source is called by its folder's name. `progress` is called after every
    tensor, `accept` at the end.

    The bundle appears whole or not at all. Raises CheckpointError, with nothing written, for
    everything that does not fit, MissingExtraError if a `.pth` needs torch, and whatever `accept`
    raises.
    """
    if codec_dtype not in CODEC_DTYPES:
        raise CheckpointError(
            f"codec dtype {codec_dtype!r} is not known. Give one of {', '.join(CODEC_DTYPES)}"
        )
    try:
        return _convert(source, out, codec_dtype, force, source_id, revision, progress, accept)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or out}: {error.strerror or error}; nothing was written"
        ) from error


def _convert(
    source: Path,
    out: Path,
    codec_dtype: str,
    force: bool,
    source_id: str | None,
    revision: str | None,
    progress: Progress | None,
    accept: Accept | None,
) -> Report:
    opened = open_source(source)
    plan = make_plan(opened, CODEC_DTYPES[codec_dtype])
    with staged_folder(out, source=source, force=force) as stage:
        _check_space(plan, stage)
        provenance = _provenance(opened, source_id, revision)
        _write_companions(opened, plan, stage, codec_dtype, provenance)
        _write_weights(opened, plan, stage, progress)
        check_bundle(plan, stage)
        if accept:
            accept(stage)
    return Report(
        out=out,
        components=components_of(plan),
        dropped=plan.dropped,
        provenance=provenance,
        notes=_notes(opened, codec_dtype),
    )


def _check_space(plan: Plan, stage: Path) -> None:
    need = sum(t.nbytes for t in plan.tensors.values()) + SPARE_BYTES
    free = shutil.disk_usage(stage).free
    if free < need:
        raise CheckpointError(
            f"the bundle needs {need / 1e6:,.0f} MB, but only {free / 1e6:,.0f} MB are free in"
            f" {stage.parent}"
        )


def _provenance(source: Source, source_id: str | None, revision: str | None) -> dict[str, Any]:
    """Where the weights come from. No date and no path, so that the same source gives the same
    bundle byte for byte."""
    before = source.config.get("provenance", {}) if source.bundle else {}
    if source_id is None:
        source_id = before.get("source", source.folder.resolve().name)
        revision = before.get("revision") if revision is None else revision
    elif Path(source_id).is_absolute():
        source_id = Path(source_id).name
    small = [path for name in SMALL_FILES if (path := member(source.folder, name))]
    return {
        "source": source_id,
        "revision": revision,
        "converter": f"warble-mlx {__version__}",
        "source_files": {path.name: sha256(path) for path in (*small, *source.files)},
    }


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_companions(
    source: Source, plan: Plan, stage: Path, codec_dtype: str, provenance: dict[str, Any]
) -> None:
    copy_tokenizer(source, plan.config, stage)
    write_voices(source, provenance["source"], stage)
    copy_licences(source, stage)
    config = bundle_config(source, plan.config, codec_dtype, provenance)
    write_json(stage / "config.json", config)
    card = model_card(
        source_id=provenance["source"],
        revision=provenance["revision"],
        licence=licence_lines(source.folder),
        components=components_of(plan),
        precision=f"Transformers in bfloat16, codec in {codec_dtype}.",
    )
    (stage / "README.md").write_text(card, encoding="utf-8")


def _write_weights(source: Source, plan: Plan, stage: Path, progress: Progress | None) -> None:
    total = sum(t.nbytes for t in plan.tensors.values())
    done = 0

    def produce(name: str) -> Array:
        nonlocal done
        planned = plan.tensors[name]
        values = bundle_values(
            planned.spec, planned.pieces, planned.dtype, channels_last=source.channels_last
        )
        done += planned.nbytes
        if progress:
            progress(name, done, total)
        return values

    for file, layout in plan.layouts().items():
        write_safetensors(stage / file, layout, produce)


def check_bundle(plan: Plan, folder: Path) -> None:
    """Read config and headers of a written bundle again and hold them against the plan.

    Raises CheckpointError if a dimension differs, or a tensor is absent, left over or not as
    planned.
    """
    if read_config(folder) != plan.config:
        raise CheckpointError(f"{folder}/config.json does not read back as written")
    for file, layout in plan.layouts().items():
        entries = read_header(folder / file).entries
        if layout != {name: (entry.dtype, entry.shape) for name, entry in entries.items()}:
            raise CheckpointError(f"{folder / file} does not read back as written")


def _notes(source: Source, codec_dtype: str) -> tuple[str, ...]:
    notes = []
    if source.bundle:
        before = source.config.get("codec_dtype", "unknown")
        notes.append(f"the source is a bundle already; its codec was {before}, now {codec_dtype}")
        if codec_dtype == "float32" and before != "float32":
            notes.append("a wider dtype does not bring back what was rounded away")
    if not source.encoder:
        notes.append("the source has no encoder: this bundle cannot register voices")
    return tuple(notes)
