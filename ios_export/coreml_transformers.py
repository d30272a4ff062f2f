"""`slow_ar.mlpackage` and `fast_ar.mlpackage`: written, then evaluated against the runtime.

slow_ar has the functions `prefill_32`, `prefill_128` and `step` over one state; fast_ar makes the
nine codes of a frame in one call. What an app does between them is in `SlowAR`: it looks embedding
rows up in a mapped file and chooses the semantic token.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from warble_mlx.config import ModelConfig
from warble_mlx.engine import PREFILL_MULTIPLE
from warble_mlx.ios_export.checks import at_least, at_most, decibels, equal
from warble_mlx.ios_export.coreml_codec import range_check
from warble_mlx.ios_export.coreml_convert import join, write_program
from warble_mlx.ios_export.coreml_static import package_checks
from warble_mlx.ios_export.drive import chunks
from warble_mlx.ios_export.job import Job
from warble_mlx.ios_export.manifest import Check
from warble_mlx.ios_export.mil_eval import Program
from warble_mlx.ios_export.mil_transformer import even_before_odd, fast_program, slow_program
from warble_mlx.ios_export.mil_weights import Grid, Store, grid_error
from warble_mlx.ios_export.mlx_functions import PREFILL_LENGTHS
from warble_mlx.ios_export.swift_part import EMBEDDINGS_FILE, TABLES, write_aligned
from warble_mlx.ios_export.taught import Taught, noise
from warble_mlx.safetensors_file import read_header, to_float32
from warble_mlx.weights import MODEL_FILE

SLOW_AR = "slow_ar.mlpackage"
FAST_AR = "fast_ar.mlpackage"
SLOTS = 1024  # of the caches: 47 seconds less the prompt
SCORES_LIMIT_DB = 45.0
GRID_LIMIT = 0.01  # steps
TIE = 0.05  # scores this near, in nats, may change places in 16 bits
SAMPLED_LIMIT = 0.98  # share of drawn codes that are the runtime's
WHERE = "MIL evaluator"

Codes = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


def slots_of(config: ModelConfig) -> int:
    """Length of the exported caches."""
    return min(SLOTS, config.max_seq_len)


def write_transformers(job: Job, folder: Path) -> None:
    """Write both packages, and the tables whose rows an app looks up itself."""
    store, slots = Store(job.bundle, job.raw_config), slots_of(job.config)
    single = {}
    for name, length in {"step": 1, **{f"prefill_{n}": n for n in PREFILL_LENGTHS}}.items():
        job.say(f"writing {SLOW_AR}, {name}")
        single[name] = folder / f"{name}.mlpackage"
        write_program(slow_program(job.config, store, length, slots), single[name])
    join(single, folder / SLOW_AR, "step")
    for path in single.values():
        shutil.rmtree(path)
    job.say(f"writing {FAST_AR}")
    write_program(fast_program(job.config, store), folder / FAST_AR)
    write_aligned(read_header(job.bundle / MODEL_FILE), TABLES, "model.", folder / EMBEDDINGS_FILE)


# ---------------------------------------------------------------------- run as an app runs them


class Tables:
    """Embedding rows as an app looks them up: widened, added in float32, rounded once."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        header = read_header(folder / EMBEDDINGS_FILE)
        names = [f"model.{name}" for name in TABLES]
        self._tables = [header.read(name) for name in names]
        self._dtypes = [header.entries[name].dtype for name in names]
        self._config = config

    def embed(self, columns: Codes) -> torch.Tensor:
        """Columns [11, T] to float16 [1, T, D]."""
        c, (ids, codes) = self._config, (columns[0], columns[1:])
        text, books = self._tables
        rows = to_float32(text[ids], self._dtypes[0])
        places = codes.T + np.arange(c.num_codebooks) * c.codebook_size
        summed = to_float32(books[places], self._dtypes[1]).sum(axis=1)
        voiced = (ids >= c.semantic_begin_id) & (ids <= c.semantic_end_id)
        return torch.from_numpy(rows + summed * voiced[:, None]).half()[None]


class SlowAR:
    """The package's functions in the evaluator. One of them is open at a time; the state goes
    along."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._package, self._tables = folder / SLOW_AR, Tables(folder, config)
        self._config = config
        self._open: Program | None = None
        self.peaks: dict[str, float] = {}

    def forced(self, prompt: Codes, codes: Codes, *, slot_error: int = 0) -> tuple[Floats, Floats]:
        """What each frame of codes [10, T] is chosen from: hidden [T, D] and scores [T, C + 1].

        `slot_error` is added to the cache slot of every frame, for a control that must fail.
        """
        c = self._config
        padding = -prompt.shape[1] % PREFILL_MULTIPLE
        columns = np.zeros((len(prompt), padding + prompt.shape[1]), np.int32)
        columns[0] = c.pad_token_id
        columns[:, padding:] = prompt
        at, result = 0, {}
        for length in chunks(columns.shape[1]):
            part = columns[:, at : at + length]
            result = self._run(f"prefill_{length}", part, at, padding)
            at += length
        found = [result]
        frames = np.concatenate([codes[:1] + c.semantic_begin_id, codes]).astype(np.int32)
        for frame in range(codes.shape[1] - 1):
            part = frames[:, frame : frame + 1]
            found.append(self._run("step", part, at + frame + slot_error, padding))
        self._close()
        hidden, logits = (
            np.concatenate([one[name].float().numpy() for one in found])
            for name in ("hidden", "logits")
        )
        return hidden, logits

    def _run(self, name: str, columns: Codes, at: int, padding: int) -> dict[str, torch.Tensor]:
        if self._open is None or self._open.function != name:
            state = self._close()
            self._open = Program(self._package, name)
            self._open.state |= state
        return self._open(
            embedded=self._tables.embed(columns),
            slot=torch.tensor([at], dtype=torch.int32),
            hole=torch.tensor([0, padding], dtype=torch.int32),
        )

    def _close(self) -> dict[str, torch.Tensor]:
        program, self._open = self._open, None
        if program is None:
            return {}
        self.peaks |= {f"{program.function}: {name}": v for name, v in program.peak.items()}
        return program.state


class Frames(NamedTuple):
    """What the fast AR made of T frames."""

    codes: Codes  # [10, T]
    books: Floats  # scores it drew from, [T, 9, C]
    peaks: dict[str, float]


def fast_frames(folder: Path, config: ModelConfig, taught: Taught) -> Frames:
    """Every taught frame from its own hidden state and semantic code, with the runtime's noise."""
    program = Program(folder / FAST_AR)
    names = [f"logits_{book}" for book in range(1, config.num_codebooks)]
    settings = {
        "top_k": torch.tensor([taught.sampling.top_k], dtype=torch.int32),
        "top_p": torch.tensor([taught.sampling.top_p]),
        "temperature": torch.tensor([taught.sampling.temperature]),
    }
    codes, books = [], []
    for frame, hidden in enumerate(taught.hidden):
        values = program(
            also=names,
            hidden=torch.from_numpy(hidden[None]).half(),
            code=torch.from_numpy(taught.codes[:1, frame].copy()),
            noise=torch.from_numpy(noise(config, taught.seed, frame)),
            **settings,
        )
        codes.append(values["codes"].numpy())
        books.append(np.concatenate([values[name].float().numpy() for name in names]))
    return Frames(np.stack(codes, axis=1), np.stack(books), program.peak)


# ---------------------------------------------------------------------- checks


def transformer_checks(job: Job, folder: Path, taught: Taught) -> Iterator[Check]:
    """Both packages against the bundle's weights and the runtime's scores and choices."""
    for name in (SLOW_AR, FAST_AR):
        yield from package_checks(folder / name)
    yield from weight_checks(job, folder)
    yield from replay_checks(job.config, folder, taught)


def replay_checks(config: ModelConfig, folder: Path, taught: Taught) -> Iterator[Check]:
    """Both packages, given the taught tokens, against the runtime's scores and choices."""
    slow = SlowAR(folder, config)
    hidden, logits = slow.forced(taught.prompt, taught.codes)
    yield from slow_checks(taught, hidden, logits)
    fast = fast_frames(folder, config, taught)
    yield from fast_checks(taught, fast)
    yield range_check("largest value in the transformers' packages", slow.peaks | fast.peaks)


def weight_checks(job: Job, folder: Path) -> Iterator[Check]:
    """Every packed matrix in the packages, by its name, is the bundle's on its own grid; none for a
    bundle without packed weights."""
    store = Store(job.bundle, job.raw_config)
    if not store.packed:
        return
    programs = [Program(folder / SLOW_AR, "step"), Program(folder / FAST_AR)]
    held = {
        name: matrix
        for program in programs
        for name, matrix in program.constants_of("constexpr_blockwise_shift_scale").items()
    }
    places = {path.replace(".", "_"): path for path in store.packed}
    errors = {}
    for name, matrix in held.items():
        if name in places:
            errors[name] = _error_of(job.config, store, places[name], matrix)
    wrong = sorted(n for n in places if not errors.get(n, math.inf) <= GRID_LIMIT)
    stray = sorted(held.keys() - places.keys())
    yield equal(
        "packed weights of the Core ML packages that are not the bundle's",
        len(wrong) + len(stray),
        0,
        note=", ".join((*wrong, *stray)[:5]),
    )
    yield at_most(
        "unpacked values against the bundle's", max(errors.values(), default=math.inf), GRID_LIMIT,
        "steps",
    )  # fmt: skip


def _error_of(
    config: ModelConfig, store: Store, path: str, matrix: dict[str, torch.Tensor]
) -> float:
    exact = store.exact(path)
    found = Grid(
        matrix["data"].numpy().astype(np.uint8),
        matrix["scale"].numpy(),
        matrix["offset"].numpy(),
        exact.bits,
    )
    if path.endswith(".wqkv"):
        order = even_before_odd(config.fast if path.startswith("fast_") else config.slow)
        back = np.argsort(order)
        found = Grid(found.integers[back], found.scales[back], found.offsets[back], found.bits)
    return grid_error(found, exact)


def slow_checks(taught: Taught, hidden: Floats, logits: Floats) -> list[Check]:
    """The slow AR's outputs [T, D] and scores [T, C + 1] against the runtime's."""
    steps = range(len(logits))
    return [
        at_least("hidden states of slow_ar", decibels(hidden, taught.hidden), SCORES_LIMIT_DB, "dB",
                 where=WHERE),
        at_least("scores of slow_ar", decibels(logits, taught.semantic), SCORES_LIMIT_DB, "dB",
                 where=WHERE),
        best_check("best semantic tokens", [(logits[t], taught.semantic[t]) for t in steps]),
    ]  # fmt: skip


def fast_checks(taught: Taught, found: Frames) -> list[Check]:
    """Scores and drawn codes of the fast AR against the runtime's, in every frame up to and with
    the first code that differs: what follows was drawn behind another code."""
    same = found.codes[1:] == taught.codes[1:]
    behind = np.concatenate([np.ones_like(same[:1]), same[:-1]])
    comparable = behind.cumprod(axis=0).T == 1  # [T, 9]
    drawn = same.T[comparable]
    scores, wanted = found.books[comparable], taught.books[comparable]
    return [
        at_least("scores of fast_ar", decibels(scores, wanted), SCORES_LIMIT_DB, "dB", where=WHERE),
        best_check("best codes", list(zip(scores, wanted, strict=True))),
        at_least(
            "drawn codes that are the runtime's", float(drawn.mean()), SAMPLED_LIMIT,
            where=WHERE, note=f"{int(drawn.sum())} of {drawn.size}",
        ),
    ]  # fmt: skip


def best_check(name: str, pairs: Sequence[tuple[Floats, Floats]]) -> Check:
    """How often the best of scores [C] is not the best of the runtime's and no tie with it either:
    worse by more than TIE in the runtime's own scores."""
    margins = [float(wanted.max() - wanted[found.argmax()]) for found, wanted in pairs]
    differing = [margin for margin in margins if margin > 0]
    return equal(
        f"{name} that are not the runtime's",
        sum(not margin <= TIE for margin in margins),
        0,
        f"of {len(pairs)}",
        where=WHERE,
        note=f"{len(differing)} ties, the widest of {max(differing, default=0):.4f}",
    )
