"""Runs exported functions the way an app does: pad, prefill in chunks, frame by frame, codec.

It holds the caches and nothing of the model; `samples/host_cpp` is the same in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from warble_mlx.config import ModelConfig
from warble_mlx.engine import PREFILL_MULTIPLE, Sampling
from warble_mlx.errors import BudgetError
from warble_mlx.ios_export.mlx_functions import CHUNK_FRAMES, FIRST_FRAMES, PREFILL_LENGTHS
from warble_mlx.sampling import NOTHING

Run = Callable[..., Sequence[mx.array]]
Codes = npt.NDArray[np.int32]


def open_function(path: Path) -> Run:
    """The function of a `.mlxfn` file."""
    return cast(Run, mx.import_function(str(path)))


class Utterance(NamedTuple):
    """What one run of the functions gave: rows of the semantic index and ten codes [T, 11], the
    EOS row included if it came."""

    emitted: Codes
    eos: int

    @property
    def codes(self) -> Codes:
        """Codes of the frames before EOS, [10, T]."""
        spoken = self.emitted[self.emitted[:, 0] != self.eos]
        return np.ascontiguousarray(spoken[:, 1:].T)


def slots_for(config: ModelConfig, lengths: Sequence[int], columns: int, frames: int) -> int:
    """The shortest exported cache that holds a prompt and frames. Raises BudgetError if none."""
    wanted = columns + -columns % PREFILL_MULTIPLE + frames + 1
    for slots in sorted(lengths):
        if wanted <= slots:
            return slots
    raise BudgetError(
        f"{columns} prompt columns and {frames} frames need {wanted} cache slots, the longest"
        f" exported cache has {max(lengths)}: shorten the text"
    )


def uniforms(config: ModelConfig, seed: int, frame: int) -> tuple[mx.array, mx.array]:
    """The runtime's noise of one frame: [2, 1, C + 1] and [9, 1, C], from (seed, frame) alone."""
    semantic, codes = 2 * config.head_rows, (config.num_codebooks - 1) * config.codebook_size
    key = mx.array([seed, frame], dtype=mx.uint32)
    drawn = mx.random.uniform(shape=(semantic + codes,), key=key)
    return (
        drawn[:semantic].reshape(2, 1, config.head_rows),
        drawn[semantic:].reshape(config.num_codebooks - 1, 1, config.codebook_size),
    )


def generate(
    run: Run,
    config: ModelConfig,
    dtype: mx.Dtype,
    columns: npt.NDArray[np.int32],
    slots: int,
    *,
    frames: int,
    sampling: Sampling,
    seed: int,
    stop_at_eos: bool = True,
) -> Utterance:
    """Speak prompt `columns` [11, T] for at most `frames` frames."""
    hidden, hole, at, caches = prefill(run, config, dtype, columns, slots)
    slot = mx.array([at], mx.int32)
    recent = mx.full((1, config.ras_window_size), NOTHING, dtype=mx.uint32)
    frame = mx.zeros((1,), mx.int32)
    greedy = sampling.greedy
    settings = (
        mx.array([1 if greedy else sampling.top_k], mx.int32),
        mx.array([sampling.top_p], mx.float32),
        mx.array([1.0 if greedy else sampling.temperature], mx.float32),
    )
    rows = []
    for number in range(frames):
        noise = uniforms(config, seed, number)
        given = (hidden, slot, hole, recent, frame, *settings, *noise, *caches)
        emitted, hidden, slot, recent, frame, *caches = run(*given)
        del given
        mx.eval(emitted, hidden, slot, recent, frame, caches)
        rows.append(np.array(emitted)[0].astype(np.int32))
        if stop_at_eos and rows[-1][0] == config.codebook_size:
            break
    return Utterance(np.stack(rows), config.codebook_size)


def prefill(
    run: Run,
    config: ModelConfig,
    dtype: mx.Dtype,
    columns: npt.NDArray[np.int32],
    slots: int,
) -> tuple[mx.array, mx.array, int, list[mx.array]]:
    """Read prompt `columns` [11, T], padding on its left; returns hidden [1, D], hole, the next
    slot and the caches."""
    padding = -columns.shape[1] % PREFILL_MULTIPLE
    padded = np.zeros((columns.shape[0], padding + columns.shape[1]), np.int32)
    padded[0] = config.pad_token_id
    padded[:, padding:] = columns
    slow = config.slow
    shape = (2, 1, slow.n_kv_head, slots, slow.head_dim)
    caches = [mx.zeros(shape, dtype) for _ in range(slow.n_layer)]
    hole = mx.array([[0, padding]], mx.int32)
    hidden = mx.zeros((1, config.dim), dtype)
    at = 0
    for length in chunks(padded.shape[1]):
        part = mx.array(padded[None, :, at : at + length])
        hidden, *caches = run(part, mx.array([at], mx.int32), hole, *caches)
        mx.eval(hidden, caches)
        at += length
    return hidden, hole, at, caches


def chunks(length: int) -> Iterator[int]:
    """Prefill lengths that add up to `length`, a multiple of 32, the longest first."""
    for size in sorted(PREFILL_LENGTHS, reverse=True):
        while length >= size:
            yield size
            length -= size


def decode(run: Run, codes: Codes, state: Sequence[mx.array]) -> npt.NDArray[np.float32]:
    """Codes [10, T] to samples: a first short chunk, then long ones, the last filled up with
    zeros whose sound is dropped."""
    pieces, at, total = [], 0, codes.shape[1]
    carried = list(state)
    while at < total:
        size = FIRST_FRAMES if at == 0 else CHUNK_FRAMES
        part = codes[:, at : at + size]
        filled = np.zeros((codes.shape[0], size), np.int32)
        filled[:, : part.shape[1]] = part
        samples, *carried = run(mx.array(filled[None]), *carried)
        mx.eval(samples, carried)
        wave = np.array(samples)[0]
        pieces.append(wave[: part.shape[1] * (len(wave) // size)])
        at += part.shape[1]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
