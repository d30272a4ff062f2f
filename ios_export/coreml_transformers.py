"""`slow_ar.mlpackage` and `fast_ar.mlpackage`: written, then evaluated against the runtime.

slow_ar has the functions `prefill_32`, `prefill_128` and `step` over one state; fast_ar makes the
nine codes of a frame in one call. An app does the rest: it looks embedding rows up in a mapped file
(`Tables`), chooses the semantic token, and draws the noise.
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
from warble_mlx.engine import PREFILL_MULTIPLE, Sampling
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
SCORES_LIMIT_DB = 40.0  # 16-bit rounding leaves about 50 of 24 layers, wrong graphs below 32
GRID_LIMIT = 1.01  # roundings to 16 bits; the hundredth is float32's
TIE = 4 * 10 ** (-SCORES_LIMIT_DB / 20)  # of the scores' size: nearer ones may change places
WHERE = "MIL evaluator"

Codes = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


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


class Outputs(NamedTuple):
    """What the slow AR gives for T positions."""

    hidden: Floats  # [T, D]
    scores: Floats  # [T, C + 1]


class SlowAR:
    """The package's functions in the evaluator, run as an app runs them. One of them is open at a
    time; the state goes along.

    slot_error is added to the cache slot of every frame, for a control that must fail.
    """

    def __init__(self, folder: Path, config: ModelConfig, *, slot_error: int = 0) -> None:
        self._package, self._tables = folder / SLOW_AR, Tables(folder, config)
        self._config, self._slot_error = config, slot_error
        self._open: Program | None = None
        self._at = self._padding = 0
        self.peaks: dict[str, float] = {}

    def read(self, prompt: Codes) -> Outputs:
        """Start with a prompt [11, P], padded on its left."""
        self._close()
        self._at, self._padding = 0, -prompt.shape[1] % PREFILL_MULTIPLE
        columns = np.zeros((len(prompt), self._padding + prompt.shape[1]), np.int32)
        columns[0] = self._config.pad_token_id
        columns[:, self._padding :] = prompt
        for length in chunks(columns.shape[1]):
            part = columns[:, self._at : self._at + length]
            result = self._run(f"prefill_{length}", part, self._at)
            self._at += length
        return result

    def step(self, codes: Codes) -> Outputs:
        """Go on with the ten codes of a frame."""
        column = np.concatenate([codes[:1] + self._config.semantic_begin_id, codes])
        result = self._run("step", column[:, None].astype(np.int32), self._at + self._slot_error)
        self._at += 1
        return result

    def forced(self, prompt: Codes, codes: Codes) -> Outputs:
        """What each frame of codes [10, T] is chosen from: hidden [T, D] and scores [T, C + 1]."""
        found = [self.read(prompt), *map(self.step, codes.T[:-1])]
        self._close()
        return Outputs(*map(np.concatenate, zip(*found, strict=True)))

    def _run(self, name: str, columns: Codes, at: int) -> Outputs:
        if self._open is None or self._open.function != name:
            state = self._close()
            self._open = Program(self._package, name)
            self._open.state |= state
        found = self._open(
            embedded=self._tables.embed(columns),
            slot=torch.tensor([at], dtype=torch.int32),
            hole=torch.tensor([0, self._padding], dtype=torch.int32),
        )
        return Outputs(found["hidden"].float().numpy(), found["logits"].float().numpy())

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


class FastAR:
    """The package in the evaluator."""

    def __init__(self, folder: Path, config: ModelConfig, sampling: Sampling, seed: int) -> None:
        self.program = Program(folder / FAST_AR)
        self._config, self._seed = config, seed
        self._names = [f"logits_{book}" for book in range(1, config.num_codebooks)]
        self._settings = {
            "top_k": torch.tensor([sampling.top_k], dtype=torch.int32),
            "top_p": torch.tensor([sampling.top_p]),
            "temperature": torch.tensor([sampling.temperature]),
        }

    def frame(self, number: int, hidden: Floats, semantic: int) -> tuple[Codes, Floats]:
        """Codes [10] of a frame and the scores [9, C] they are drawn from, of hidden [D] and the
        semantic code, with the runtime's noise of that frame."""
        found = self.program(
            also=self._names,
            hidden=torch.from_numpy(hidden[None]).half(),
            code=torch.tensor([semantic], dtype=torch.int32),
            noise=torch.from_numpy(noise(self._config, self._seed, number)),
            **self._settings,
        )
        scores = [found[name].float().numpy() for name in self._names]
        return found["codes"].numpy(), np.concatenate(scores)


def fast_frames(folder: Path, config: ModelConfig, taught: Taught) -> Frames:
    """Every taught frame from its own hidden state and semantic code."""
    fast = FastAR(folder, config, taught.sampling, taught.seed)
    made = [
        fast.frame(number, hidden, int(taught.codes[0, number]))
        for number, hidden in enumerate(taught.hidden)
    ]
    codes, books = (np.stack(values) for values in zip(*made, strict=True))
    return Frames(codes.T, books, fast.program.peak)


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
    yield from slow_checks(taught, slow.forced(taught.prompt, taught.codes))
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
        "roundings",
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


def slow_checks(taught: Taught, found: Outputs) -> list[Check]:
    """The slow AR's outputs against the runtime's."""
    return [
        near_check("hidden states of slow_ar", found.hidden, taught.hidden),
        near_check("scores of slow_ar", found.scores, taught.semantic),
        best_check("best semantic tokens", list(zip(found.scores, taught.semantic, strict=True))),
    ]


def fast_checks(taught: Taught, found: Frames) -> list[Check]:
    """Scores and drawn codes of the fast AR against the runtime's, in every frame up to and with
    the first code that differs: what follows was drawn behind another code."""
    same = found.codes[1:] == taught.codes[1:]
    behind = np.concatenate([np.ones_like(same[:1]), same[:-1]])
    comparable = behind.cumprod(axis=0).T == 1  # [T, 9]
    drawn = same.T[comparable]
    scores, wanted = found.books[comparable], taught.books[comparable]
    return [
        near_check("scores of fast_ar", scores, wanted),
        best_check("best codes", list(zip(scores, wanted, strict=True))),
        at_most(
            "drawn codes that are not the runtime's",
            int((~drawn).sum()),
            2 + drawn.size // 50,  # a candidate at the border of top_p, two draws that nearly tie
            f"of {drawn.size}",
            where=WHERE,
        ),
    ]


def near_check(name: str, found: Floats, wanted: Floats) -> Check:
    """Signal over difference of what should be equal but for 16-bit rounding."""
    return at_least(name, decibels(found, wanted), SCORES_LIMIT_DB, "dB", where=WHERE)


def best_check(name: str, pairs: Sequence[tuple[Floats, Floats]]) -> Check:
    """How often the best of scores [C] is not the best of the runtime's and no tie with it either:
    worse in the runtime's own scores by more than rounding explains."""
    margins = [float(np.max(wanted) - wanted[np.argmax(found)]) for found, wanted in pairs]
    widest = [TIE * float(np.sqrt(np.mean(np.square(wanted)))) for _, wanted in pairs]
    differing = [margin for margin in margins if margin > 0]
    return equal(
        f"{name} that are not the runtime's",
        sum(not margin <= tie for margin, tie in zip(margins, widest, strict=True)),
        0,
        f"of {len(pairs)}",
        where=WHERE,
        note=f"{len(differing)} ties, the widest of {max(differing, default=0):.4f}",
    )
