"""Frames that the runtime speaks in float32, and all scores that it chose them from.

An exported graph is given these tokens step by step (teacher forcing), so that one other choice
does not make everything behind it incomparable.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.config import ModelConfig
from warble_mlx.dual_ar import DualAR
from warble_mlx.engine import Engine, Request, Sampling
from warble_mlx.errors import CheckpointError
from warble_mlx.fidelity.forced import fast_scores, forced, slow_hidden
from warble_mlx.fidelity.streams import TokenStream
from warble_mlx.ios_export.drive import uniforms
from warble_mlx.ios_export.job import Job
from warble_mlx.prompt import Prompt
from warble_mlx.safetensors_file import read_header, write_safetensors
from warble_mlx.weights import load_dual_ar

SELFTEST_FILE = "selftest.safetensors"
SELFTEST_FRAMES = 4

Codes = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Taught(NamedTuple):
    """T frames behind a prompt of P columns; C is codebook_size, D the slow AR's width."""

    prompt: Codes  # columns [11, P]
    codes: Codes  # [10, T]
    hidden: Floats  # [T, D], what the fast AR was given for each frame
    semantic: Floats  # scores [T, C + 1]
    books: Floats  # scores of codes 1 to 9, [T, 9, C]
    sampling: Sampling
    seed: int


def teacher(job: Job) -> DualAR:
    """The bundle's transformers with packed weights unpacked to float32: the same weights, and
    products that are exact to float32."""
    return load_dual_ar(job.bundle, mx.float32, dequantize=True)


def teach(model: DualAR, prompt: Prompt, frames: int, seed: int) -> Taught:
    """Speak `prompt` for at most `frames` frames. Raises CheckpointError if nothing was spoken."""
    config, sampling = model.config, Sampling()
    engine = Engine(model, compiled=False)
    asked = Request(prompt, frames, sampling, seed)
    emitted = [e.codes for e in engine.generate([asked]) if e.codes is not None]
    if not emitted:
        raise CheckpointError(
            "the model ended at once instead of speaking, so there is nothing to compare with: run"
            " `warble verify` on the bundle"
        )
    codes = np.stack(emitted, axis=1).astype(np.int32)
    stream = TokenStream(prompt.columns, codes, ended=False)
    given = forced([stream], config.semantic_begin_id, config.codebook_size)
    hidden = slow_hidden(model, given)
    normed = model.norm(hidden)
    return Taught(
        prompt=prompt.columns.astype(np.int32),
        codes=codes,
        hidden=np.array(normed if config.norm_fastlayer_input else hidden),
        semantic=np.array(model.semantic_logits(normed)),
        books=np.array(fast_scores(model, hidden, given.codes)),
        sampling=sampling,
        seed=seed,
    )


def noise(config: ModelConfig, seed: int, frame: int) -> Floats:
    """What is added to the scores of codes 1 to 9 in the race of a frame, [9, C]: -log(-log(u)) of
    the runtime's uniforms. A code of u = 0 can never win."""
    _, codes = uniforms(config, seed, frame)
    with np.errstate(divide="ignore"):
        found: Floats = -np.log(-np.log(np.array(codes)[:, 0]))
    return found


def write_selftest(folder: Path, taught: Taught) -> None:
    """Keep the first frames beside the packages, for any other machine to compare with."""
    n = SELFTEST_FRAMES
    arrays = {
        "columns": taught.prompt,
        "codes": taught.codes[:, :n],
        "hidden": taught.hidden[:n],
        "semantic": taught.semantic[:n],
        "books": taught.books[:n],
    }
    write_safetensors(
        folder / SELFTEST_FILE,
        {
            name: ("I32" if array.dtype == np.int32 else "F32", array.shape)
            for name, array in arrays.items()
        },
        lambda name: np.ascontiguousarray(arrays[name]),
        {
            "seed": str(taught.seed),
            **{name: str(value) for name, value in asdict(taught.sampling).items()},
        },
    )


def read_selftest(folder: Path) -> Taught:
    """What `write_selftest` has kept in `folder`."""
    stored = read_header(folder / SELFTEST_FILE)
    told = stored.metadata
    sampling = Sampling(float(told["temperature"]), float(told["top_p"]), int(told["top_k"]))
    return Taught(
        prompt=stored.read("columns"),
        codes=stored.read("codes"),
        hidden=stored.read("hidden"),
        semantic=stored.read("semantic"),
        books=stored.read("books"),
        sampling=sampling,
        seed=int(told["seed"]),
    )
