"""Bundle to a folder for an iPhone app: part by part, whole or not at all.

Parts are built one after another in a folder beside the target, `.NAME.parts`. A part counts once
its own checks have passed; it is then listed in that folder's manifest. A run that was interrupted
or failed leaves them there, and the next one with the same bundle and options takes them up again
after comparing their hashes. The target appears by renaming when all wanted parts are there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from warble_mlx.config import read_config, read_config_json
from warble_mlx.errors import CheckpointError, MissingExtraError, WarbleError
from warble_mlx.ios_export import facts
from warble_mlx.ios_export.checks import require
from warble_mlx.ios_export.job import PARTS, Built, Job, Options, list_files, part_record
from warble_mlx.ios_export.manifest import (
    MANIFEST,
    Manifest,
    Part,
    read_manifest,
    write_manifest,
)
from warble_mlx.ios_export.verify import damaged_files
from warble_mlx.model_files import is_bundle
from warble_mlx.staging import clear_leftovers, replace_folder, staged_folder

Builder = Callable[[Job, Path], Built]


def export(
    bundle: Path,
    out: Path,
    *,
    only: Sequence[str] = PARTS,
    voices: Sequence[str] = (),
    options: Options | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write the parts `only` of `bundle` into the folder `out` and return its manifest.

    An `out` that is an export of the same bundle with the same options keeps its other parts. Any
    other existing folder is refused, or with `force` replaced if it is an export.

    Raises WarbleError for what cannot work, before anything is written; ExportError if a part
    fails its checks. `out` is then as it was.
    """
    options = options or Options()
    unknown = [name for name in only if name not in PARTS]
    if unknown or not only:
        raise WarbleError(f"parts are {', '.join(PARTS)}, not {', '.join(unknown) or 'none'}")
    if not is_bundle(bundle):
        raise CheckpointError(f"{bundle} is no bundle; make one of it: warble convert {bundle} OUT")
    job = Job(bundle, read_config(bundle), read_config_json(bundle), options, say)
    wanted = [name for name in PARTS if name in only]
    builders = {name: _builder(name) for name in wanted}
    clear_leftovers(out.resolve())
    kept = _kept_from(out, bundle, job, force)
    work = out.resolve().parent / f".{out.resolve().name}.parts"
    work.mkdir(parents=True, exist_ok=True)
    _drop_stale(work, job)
    for part in kept:
        if part.name not in wanted and _find(work, part.name) is None:
            _take_over(out, work, part, job)
    for name in wanted:
        if _find(work, name) is not None:
            say(f"{name}: there already")
            continue
        say(f"{name}: building")
        _build(name, builders[name], job, work)
    _write_shared(work, job, voices)
    manifest = _describe(work, job, voices, _parts_in(work))
    write_manifest(work, manifest)
    for name in PARTS:
        _record_of(work, name).unlink(missing_ok=True)
    replace_folder(work, out.resolve())
    return manifest


def _builder(name: str) -> Builder:
    """The function that builds a part. Raises MissingExtraError if it needs what is not there."""
    if name == "mlxfn":
        from warble_mlx.ios_export.mlx_part import build

        return build
    if name == "mlx-swift":
        from warble_mlx.ios_export.swift_part import build as build_folder

        return build_folder
    if any(find_spec(package) is None for package in ("coremltools", "torch")):
        raise MissingExtraError("The part coreml", "coremltools and torch", "ios")
    from warble_mlx.ios_export.coreml_part import build as build_coreml

    return build_coreml


def _kept_from(out: Path, bundle: Path, job: Job, force: bool) -> tuple[Part, ...]:
    """Parts of an existing `out` that still belong to this bundle."""
    final, source = out.resolve(), bundle.resolve()
    if final == source or final.is_relative_to(source) or source.is_relative_to(final):
        raise CheckpointError(f"{out} and {bundle} lie inside each other. Give a folder elsewhere")
    if not final.exists():
        return ()
    if not (final / MANIFEST).is_file():
        raise CheckpointError(
            f"{out} exists and is no export (it has no {MANIFEST}), so it is not replaced even by"
            " force. Remove it yourself or give another folder"
        )
    if force:
        return ()
    parts = read_manifest(final).parts
    if any(part.made_from != job.made_from for part in parts):
        raise CheckpointError(
            f"{out} holds an export of another bundle, or with other options or versions. Give"
            " another folder, or --force to replace it"
        )
    return parts


def _take_over(out: Path, work: Path, part: Part, job: Job) -> None:
    if damaged_files(out.resolve(), part.files):
        job.say(f"{part.name}: damaged in {out}, left out")
        return
    shutil.copytree(out / part.name, work / part.name, copy_function=_link)
    _record(work, part)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _build(name: str, builder: Builder, job: Job, work: Path) -> None:
    started = time.monotonic()
    folder = work / name
    if folder.exists():
        shutil.rmtree(folder)
    with staged_folder(folder, source=job.bundle) as stage:
        built = builder(job, stage)
        require(name, built.checks)
        part = part_record(name, job, built, stage, started)
    _record(work, part)


def _record_of(work: Path, name: str) -> Path:
    """Where it stands that a part is finished, until the manifest says so."""
    return work / f".{name}.json"


def _record(work: Path, part: Part) -> None:
    path = _record_of(work, part.name)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(part))
    partial.replace(path)


def _find(work: Path, name: str) -> Part | None:
    path = _record_of(work, name)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Part)
    except msgspec.DecodeError:
        return None


def _parts_in(work: Path) -> tuple[Part, ...]:
    return tuple(part for name in PARTS if (part := _find(work, name)) is not None)


def _drop_stale(work: Path, job: Job) -> None:
    """Remove what an earlier run left for another bundle, and what was damaged since."""
    for name in PARTS:
        part = _find(work, name)
        if part is None or part.made_from != job.made_from or damaged_files(work, part.files):
            _record_of(work, name).unlink(missing_ok=True)
            shutil.rmtree(work / name, ignore_errors=True)


def _write_shared(work: Path, job: Job, voices: Sequence[str]) -> None:
    for left in [*work.glob(".*.partial"), *work.glob(".*.partial-*")]:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    shutil.rmtree(work / facts.VOICES_FOLDER, ignore_errors=True)
    for name in ("LICENSE", "NOTICE"):
        for path in job.bundle.glob(f"{name}*"):
            shutil.copyfile(path, work / path.name)
    shutil.copyfile(job.bundle / "tokenizer.json", work / "tokenizer.json")


def _describe(work: Path, job: Job, voices: Sequence[str], parts: tuple[Part, ...]) -> Manifest:
    entries = facts.voices(job, voices, work)
    inside = {part.name for part in parts}
    roles = {path.name: "licence" for path in work.iterdir() if path.name not in inside}
    roles |= {"tokenizer.json": "tokenizer", facts.VOICES_FOLDER: "voice"}
    unlisted = {MANIFEST, *(_record_of(work, name).name for name in PARTS)}
    shared = [f for f in list_files(work, "", roles | dict.fromkeys(inside, "part"))
              if f.role != "part" and f.path not in unlisted]  # fmt: skip
    versions = _coreml_versions() if "coreml" in inside else ("", "")
    return Manifest(
        schema="warble-ios/1",
        model=facts.model(job),
        created_by=facts.created_by(job, *versions),
        audio=facts.audio(job),
        dimensions=facts.dimensions(job),
        tokens=facts.tokens(job),
        sampling=facts.sampling(job),
        quantization=facts.quantization(job),
        voices=entries,
        files=tuple(shared),
        parts=parts,
        bandwidth=facts.bandwidth(job),
    )


def _coreml_versions() -> tuple[str, str]:
    return version("coremltools"), version("torch")
