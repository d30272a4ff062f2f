"""Check an exported folder again, on whatever machine it has come to.

Files are held against their sizes and hashes, and each part against what it says about itself.
What this machine cannot look at is reported as not verified.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from warble_mlx.config import ModelConfig
from warble_mlx.ios_export.checks import at_least, decibels, equal, unverified
from warble_mlx.ios_export.manifest import MANIFEST, Check, File, Manifest, Part, read_manifest
from warble_mlx.safetensors_file import read_header

THIS = "this machine"


def verify_export(folder: Path) -> Iterator[Check]:
    """Every check, one by one, as it is made. Raises CheckpointError for a broken manifest."""
    manifest = read_manifest(folder)
    damaged = damaged_files(folder, manifest.all_files)
    yield equal("damaged or missing files", len(damaged), 0, where=THIS, note=", ".join(damaged))
    extra = unlisted_files(folder, manifest)
    yield equal("files not in the manifest", len(extra), 0, where=THIS, note=", ".join(extra))
    failed = [c.name for p in manifest.parts for c in p.checks if c.result == "fail"]
    yield equal("checks that failed on export", len(failed), 0, where=THIS, note=", ".join(failed))
    if damaged:
        return
    for part in manifest.parts:
        yield from _checks_of(folder, manifest, part)


def damaged_files(folder: Path, files: Iterable[File]) -> list[str]:
    """Paths of files that are missing, or of another size or hash than the manifest says."""
    from warble_mlx.ios_export.job import sha256

    wrong = []
    for file in files:
        path = folder / file.path
        good = path.is_file() and path.stat().st_size == file.bytes
        if not (good and sha256(path) == file.sha256):
            wrong.append(file.path)
    return wrong


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files below `folder` that the manifest does not name."""
    listed = {file.path for file in manifest.all_files} | {MANIFEST}
    present = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(set(present) - listed)


def _checks_of(folder: Path, manifest: Manifest, part: Part) -> Iterator[Check]:
    if part.name == "mlxfn":
        yield from self_test(folder / part.name, manifest)
    elif part.name == "mlx-swift":
        from warble_mlx.ios_export.swift_part import folder_checks

        yield from folder_checks(folder / part.name)
    else:
        yield from _coreml_checks(folder / part.name, manifest, part)


def _coreml_checks(folder: Path, manifest: Manifest, part: Part) -> Iterator[Check]:
    """Packages against their limits, the manifest and the frames kept beside them."""
    if any(find_spec(package) is None for package in ("coremltools", "torch")):
        yield Check(
            name="operations of the Core ML packages",
            result="unverified",
            where=THIS,
            note='coremltools and torch are not installed: pip install "warble-mlx[ios]"',
        )
        return
    from warble_mlx.ios_export.coreml_part import described
    from warble_mlx.ios_export.coreml_static import package_checks
    from warble_mlx.ios_export.coreml_transformers import replay_checks
    from warble_mlx.ios_export.taught import read_selftest

    for package in sorted(folder.glob("*.mlpackage")):
        yield from package_checks(package)
    found = {f"{part.name}/{f.file}:{f.name}": f for f in described(folder)}
    listed = {f"{f.file}:{f.name}": f for f in part.functions}
    other = [
        name
        for name in sorted(found.keys() | listed.keys())
        if name not in found or name not in listed
        or any(
            getattr(found[name], field) != getattr(listed[name], field)
            for field in ("inputs", "outputs", "states", "longest_axis")
        )
    ]  # fmt: skip
    yield equal(
        "Core ML functions unlike the manifest", len(other), 0, where=THIS, note=", ".join(other)
    )
    yield from replay_checks(config_of(manifest), folder, read_selftest(folder))


def config_of(manifest: Manifest) -> ModelConfig:
    """The dimensions of a manifest as a model's config."""
    return msgspec.convert(manifest.dimensions | {"model_type": "arktts"}, type=ModelConfig)


def token_check(
    found: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32], *, exact: bool, where: str
) -> Check:
    """Judge the frames [T, 11] of a self-test. Where arithmetic is not `exact`, in 16 bits on a GPU
    or on another device than the file was written on, a close choice may fall otherwise and all
    that follows is another speech: then the first semantic token alone has to be right."""
    rows = min(len(found), len(wanted))
    leading = int((found[:rows] == wanted[:rows]).all(axis=1).cumprod().sum())
    name, same = "self-test tokens equal", leading == len(found) == len(wanted)
    if same or exact or found[0, 0] != wanted[0, 0]:
        return equal(name, leading, len(wanted), "frames", where=where)
    return Check(
        name=name,
        result="unverified",
        where=where,
        value=leading,
        limit=len(wanted),
        unit="frames",
        note="16 bits round otherwise on another device; exported with --dtype float32 they are"
        " equal",
    )


def self_test(folder: Path, manifest: Manifest) -> Iterator[Check]:
    """Run both files on their self-test's prompt and compare tokens and samples.

    Where MLX has no GPU, files made for one are run from copies that name the CPU instead, if they
    were traced on a CPU.
    """
    import mlx.core as mx

    from warble_mlx.engine import Sampling
    from warble_mlx.ios_export.drive import decode, generate, open_function, slots_for
    from warble_mlx.ios_export.graph_file import Device, devices_in, retarget
    from warble_mlx.ios_export.job import DTYPES, MLX_VERSION
    from warble_mlx.ios_export.mlx_functions import CODEC_FILE, LM_FILE
    from warble_mlx.ios_export.mlx_part import GRAPHS_FILE, SELFTEST_FILE, Graph

    if manifest.created_by.mlx != MLX_VERSION:
        yield Check(
            name="MLX version",
            result="unverified",
            where=THIS,
            note=f"written by {manifest.created_by.mlx}, read by {MLX_VERSION}",
        )
    graphs = msgspec.json.decode((folder / GRAPHS_FILE).read_bytes(), type=dict[str, Graph])
    here: Device = "gpu" if mx.default_device().type == mx.gpu else "cpu"
    runs = {}
    with tempfile.TemporaryDirectory(prefix="warble-verify-") as scratch:
        for name, graph in graphs.items():
            found = devices_in(folder / name, graph.operations)
            yield equal(
                f"operations of {name} on the {graph.device}",
                found.get(graph.device, 0),
                sum(graph.operations.values()),
                where=THIS,
            )
            if (graph.traced_on, here) == ("gpu", "cpu"):
                continue
            path = folder / name
            if graph.device != here and here == "cpu":
                path = Path(scratch) / name
                retarget(folder / name, path, graph.operations, here)
            runs[name] = open_function(path)
    if len(runs) < len(graphs):
        note = "traced on a GPU: MLX has some of its operations on GPUs only"
        yield unverified("self-test tokens and audio", note)
        return
    stored = read_header(folder / SELFTEST_FILE)
    metadata = stored.metadata
    config = config_of(manifest)
    wanted, samples = stored.read("emitted"), stored.read("samples")
    columns = stored.read("columns")
    lengths = sorted({
        state.shape[3]
        for part in manifest.parts for f in part.functions if f.name.startswith("frame_")
        for record in f.states for state in record.tensors
    })  # fmt: skip
    utterance = generate(
        runs[LM_FILE],
        config,
        DTYPES[metadata["dtype"]],
        columns,
        slots_for(config, lengths, columns.shape[1], len(wanted)),
        frames=len(wanted),
        sampling=Sampling(),
        seed=int(metadata["seed"]),
    )
    where = f"{THIS}, {here}"
    written_on = {graph.traced_on for graph in graphs.values()}
    exact = metadata["dtype"] == "float32" or written_on == {here} == {"cpu"}
    yield token_check(utterance.emitted, wanted, exact=exact, where=where)
    codec = next(f for p in manifest.parts for f in p.functions if f.name == "codec_first")
    state = [mx.zeros(t.shape, getattr(mx, t.dtype)) for s in codec.states for t in s.tensors]
    spoken = wanted[wanted[:, 0] != config.codebook_size][:, 1:].T
    found_samples = decode(runs[CODEC_FILE], np.ascontiguousarray(spoken), state)
    yield at_least("self-test audio", decibels(found_samples, samples), 60.0, "dB", where=where)
