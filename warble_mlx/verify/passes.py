"""Passes of our model over a dump's prompts and frames, for the rungs to compare."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from warble_mlx.engine import Engine, Request
from warble_mlx.prompt import Prompt
from warble_mlx.verify.compare import Array
from warble_mlx.verify.dump import Case, Dump
from warble_mlx.verify.subject import Subject

PREFIX_COLUMNS = 7  # any border between the kept prefix and the rest gives the same


class Passes:
    """One subject, one dump."""

    def __init__(self, subject: Subject, dump: Dump) -> None:
        self.subject, self.dump, self.model = subject, dump, subject.model
        self._own_hidden: dict[str, tuple[mx.array, mx.array]] = {}

    def codes(self, case: Case) -> Array:
        """The dump's codes [10, F]."""
        return self.dump[f"{case.name}.codes"]

    def choices(self, case: Case) -> Array:
        """The dump's semantic index at every step [S], EOS (C) included."""
        semantic = self.codes(case)[0]
        return np.append(semantic, self.subject.config.codebook_size) if case.finished else semantic

    def columns(self, case: Case, frames: int = 0) -> Array:
        """The prompt and the dump's first `frames` frames, [11, T + frames]."""
        codes = self.codes(case)[:, :frames]
        more = np.concatenate([codes[:1] + self.subject.config.semantic_begin_id, codes])
        return np.concatenate([self.dump[f"{case.name}.columns"], more], axis=1)

    def own_hidden(self, case: Case) -> tuple[mx.array, mx.array]:
        """Our hidden states [S, D] before and after the final norm, given the dump's frames."""
        if case.name not in self._own_hidden:
            steps = len(self.choices(case))
            x = self.model.embed(mx.array(self.columns(case, max(0, steps - 1)))[None])
            hidden = self.advance(x, range(self.subject.config.n_layer))[0]
            hidden = hidden[hidden.shape[0] - steps :]
            self._own_hidden[case.name] = hidden, self.model.norm(hidden)
        return self._own_hidden[case.name]

    def advance(self, x: mx.array, layers: Sequence[int]) -> mx.array:
        """Some of the slow layers over x [1, T, D], from an empty cache."""
        part = copy.copy(self.model)
        part.layers = [self.model.layers[i] for i in layers]
        zero, hole = mx.zeros((1,), mx.int32), mx.zeros((1, 2), mx.int32)
        out, _ = part.advance(x, zero, hole, part.empty_caches(1, x.shape[1]))
        return out

    def fast_scores(self, entry: mx.array, codes: Array) -> mx.array:
        """Logits [F, 9, C] from the slow AR's output [F, D] and the codes [10, F]."""
        model, given = self.model, mx.array(codes)
        x = mx.concatenate([model.fast_input(entry), model.embed_code(given[0])], axis=1)
        first, caches, scores = 0, None, []
        for book in range(1, self.subject.config.num_codebooks):
            logits, caches = model.fast_pass(x, first, caches)
            scores.append(logits)
            first, x = book + 1, model.embed_code(given[book])
        return mx.stack(scores, axis=1)

    def array(self, value: Array) -> mx.array:
        """A dump's numbers in the dtype of our activations."""
        return mx.array(value).astype(self.model._dtype)


def generated(engine: Engine, requests: list[Request], rows: int) -> list[tuple[Array, bool]]:
    """Codes [10, n] of each request, and whether EOS ended it."""
    frames: list[list[Array]] = [[] for _ in requests]
    ended = [False] * len(requests)
    for emission in engine.generate(requests, rows=rows):
        if emission.codes is not None:
            frames[emission.request].append(emission.codes)
        ended[emission.request] |= emission.finish_reason == "stop"
    books = engine.model.config.num_codebooks
    codes = [np.array(f, np.int32).reshape(-1, books).T for f in frames]
    return list(zip(codes, ended, strict=True))


def as_prompt(columns: Array) -> Prompt:
    """Columns [11, T] as the engine reads them."""
    border = min(PREFIX_COLUMNS, columns.shape[1] - 1)
    return Prompt(columns[:, :border], columns[:, border:])
