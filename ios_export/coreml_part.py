"""The part `coreml`: a model for Core ML alone, four packages and the tables that an app maps.

The codec's halves are for the Neural Engine. The transformers have block-wise 4-bit weights, which
only the GPU and the CPU take; an app that has MLX runs them there from the same weights and needs
the codec's packages alone (see docs/iphone.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx

from warble_mlx.ios_export.checks import at_most, unverified
from warble_mlx.ios_export.coreml_codec import (
    FUNCTIONS,
    POST_MODULE,
    VOCODER,
    codec_checks,
    whole_chunks,
    write_packages,
)
from warble_mlx.ios_export.coreml_static import functions_of
from warble_mlx.ios_export.coreml_transformers import (
    FAST_AR,
    SLOW_AR,
    transformer_checks,
    write_transformers,
)
from warble_mlx.ios_export.facts import is_published
from warble_mlx.ios_export.job import Built, Job
from warble_mlx.ios_export.manifest import Check, Function, MemoryEstimate, Requires
from warble_mlx.ios_export.mil_transformer import CANDIDATES
from warble_mlx.ios_export.mil_weights import Store, held_bits
from warble_mlx.ios_export.mlx_functions import PREFILL_LENGTHS
from warble_mlx.ios_export.mlx_part import SEED, runtime_samples
from warble_mlx.ios_export.swift_part import EMBEDDINGS_FILE, TABLES
from warble_mlx.ios_export.taught import SELFTEST_FILE, teach, teacher, write_selftest

PROGRAMS = 8_000_000  # bytes: the packages' operations and RoPE tables
CODEC_FRAMES = 29  # of real speech; the evaluator needs seconds for each chunk of the full codec
LARGE_FRAMES = 15  # of a model of the published size; the evaluator needs seconds for each


def build(job: Job, folder: Path) -> Built:
    """Write all packages and evaluate them on tokens that the model has generated."""
    write_packages(job, folder)
    write_transformers(job, folder)
    job.say("generating tokens to check with")
    frames = job.options.check_frames
    if is_published(job.config):
        frames = min(frames, LARGE_FRAMES)
    taught = teach(teacher(job), job.prompt(job.check_text), frames, SEED)
    mx.clear_cache()
    codes = taught.codes[:, : whole_chunks(min(CODEC_FRAMES, taught.codes.shape[1]))]
    job.say(f"evaluating the codec on {codes.shape[1]} frames")
    checks = list(codec_checks(job, folder, codes, runtime_samples(job, codes)))
    job.say(f"evaluating the transformers on {taught.codes.shape[1]} frames")
    checks += transformer_checks(job, folder, taught)
    write_selftest(folder, taught)
    checks += size_checks(job, folder)
    checks += [
        unverified("placement on the Neural Engine", "Core ML decides on the device"),
        unverified("compilation on the device", "no Apple system was used"),
        unverified("speed and memory on a phone", "no phone was used"),
    ]
    functions = described(folder)
    return Built(
        about="Core ML alone: slow and fast AR (GPU or CPU), codec (Neural Engine)",
        requires=Requires(ios="18.0", increased_memory_limit=True),
        roles={
            SLOW_AR: "slow AR: prefill and step, keys and values as state",
            FAST_AR: "fast AR: the codes of a frame in one call",
            EMBEDDINGS_FILE: "tables to be mapped, read by row",
            POST_MODULE: "codec: codes to latents, keys and values as state",
            VOCODER: "codec: latents to samples, no state",
            SELFTEST_FILE: "inputs and results of a self-test",
        },
        optional=frozenset({SELFTEST_FILE}),
        checks=checks,
        functions=functions,
        memory=_memory(job, folder, functions),
        notes=[
            "Functions of one package share one MLState: make it from any of them and pass it on.",
            "A prompt is padded on its left to a multiple of 32; hole = (0, padding).",
            "The app looks up embedding rows, adds those of a frame and chooses the semantic"
            " token; fast_ar chooses the other nine.",
            "Give the vocoder the last latents as history and, as hist, how many of them exist.",
        ],
    )


def described(folder: Path) -> list[Function]:
    """Functions of all packages in `folder`, as the manifest lists them."""
    chunk = {name: f"{frames} frames a call" for name, frames in FUNCTIONS.items()}
    columns = {f"prefill_{n}": f"{n} prompt columns" for n in PREFILL_LENGTHS}
    about = {
        SLOW_AR: {**columns, "step": "one frame's column"},
        FAST_AR: {"main": f"codes 1 to 9 of a frame; top_k up to {CANDIDATES}"},
        POST_MODULE: chunk,
        VOCODER: chunk,
    }
    return [f for name, texts in about.items() for f in functions_of(folder / name, texts)]


def size_checks(job: Job, folder: Path) -> Iterator[Check]:
    """One copy of the weights for all functions, packed ones packed."""
    store = Store(job.bundle, job.raw_config)
    stored = 0
    for name, entry in store.header.entries.items():
        bits = store.bits(name.removesuffix(".weight"))
        if name not in TABLES:
            stored += entry.nbytes if bits is None else entry.nbytes * held_bits(bits) // bits
    head = job.config.head_rows * job.config.dim * 2
    yield at_most(
        "size of both transformers' packages",
        sum(nbytes(folder / name) for name in (SLOW_AR, FAST_AR)),
        stored + head + PROGRAMS,
        "bytes",
    )


def nbytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _memory(job: Job, folder: Path, functions: Sequence[Function]) -> MemoryEstimate:
    tables = (folder / EMBEDDINGS_FILE).stat().st_size
    weights = sum(nbytes(folder / name) for name in (SLOW_AR, FAST_AR, POST_MODULE, VOCODER))
    states = 2 * sum(
        math.prod(tensor.shape)
        for function in functions if function.name in ("stream", "step")
        for state in function.states for tensor in state.tensors
    )  # fmt: skip
    c = job.config
    working = 4 * 2 * FUNCTIONS["stream"] * c.codec_frame_size * (c.codec_decoder_dim // 16)
    return MemoryEstimate(
        weights=weights,
        mapped=tables,
        caches=states,
        working=working,
        total=weights + states + working,
        note="projection from the packages; what Core ML adds is not known here",
    )
