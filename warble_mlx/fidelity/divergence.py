"""How far a model's distributions lie from a reference's on the same token streams.

Raw softmax of the scores, before any sampling setting: the filter of top-k and top-p would hide
what lies outside it. Codebook 0 is the slow AR's choice, EOS included; 1 to 9 are the fast AR's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import msgspec
import numpy as np

from warble_mlx.dual_ar import DualAR
from warble_mlx.fidelity.forced import fast_scores, forced, slow_hidden
from warble_mlx.fidelity.streams import TokenStream

TOGETHER = 8  # streams in one pass


class Book(msgspec.Struct, frozen=True):
    """Means over the steps of one codebook."""

    kl: float  # nats, of the reference's distribution from the model's
    agreement: float  # share of steps at which both have the same best token
    perplexity: float  # of the tokens in the streams
    reference_perplexity: float


class Divergence(msgspec.Struct, frozen=True):
    """All ten codebooks, and over how much was averaged."""

    books: tuple[Book, ...]
    steps: int
    frames: int

    @property
    def semantic_kl(self) -> float:
        """Of the slow AR, nats per step."""
        return self.books[0].kl

    @property
    def fast_kl(self) -> float:
        """Of the fast AR, nats per code."""
        return float(np.mean([book.kl for book in self.books[1:]]))

    @property
    def semantic_agreement(self) -> float:
        """Of the slow AR."""
        return self.books[0].agreement

    @property
    def fast_agreement(self) -> float:
        """Of the fast AR."""
        return float(np.mean([book.agreement for book in self.books[1:]]))


class SlowPass(NamedTuple):
    """What the slow AR gave over some streams."""

    semantic: mx.array  # log-probabilities [S, C + 1]
    hidden: mx.array  # [F, D], at the steps that brought a frame


class Reference:
    """A reference model's distributions on given streams, kept to compare several models with.

    `slow` holds its own slow passes: with them `compare` tells what a fast AR alone costs.
    """

    def __init__(self, model: DualAR, streams: Sequence[TokenStream]) -> None:
        config = model.config
        ordered = sorted(streams, key=lambda s: s.prompt.shape[1] + s.steps)  # little padding
        self._given = [
            forced(
                ordered[first : first + TOGETHER], config.semantic_begin_id, config.codebook_size
            )
            for first in range(0, len(ordered), TOGETHER)
        ]
        self.slow = self.slow_passes(model)
        self._codes = self._code_scores(model, self.slow)
        mx.eval(self._codes)

    def slow_passes(self, model: DualAR) -> list[SlowPass]:
        """The slow AR of `model` over all streams."""
        found = []
        for given in self._given:
            hidden = slow_hidden(model, given)
            semantic = log_softmax(model.semantic_logits(model.norm(hidden)))
            found.append(SlowPass(semantic, hidden[given.framed]))
            mx.eval(found[-1])
        return found

    def _code_scores(self, model: DualAR, slow: Sequence[SlowPass]) -> list[mx.array]:
        """Log-probabilities [F, 9, C] of the codes, lazy."""
        return [
            log_softmax(fast_scores(model, own.hidden, given.codes))
            for given, own in zip(self._given, slow, strict=True)
        ]

    def compare(self, model: DualAR, slow: Sequence[SlowPass] | None = None) -> Divergence:
        """Hold `model` against the reference; `slow` are passes made before, maybe by another
        model."""
        slow = self.slow_passes(model) if slow is None else slow
        sums: list[list[list[float]]] = []
        steps = frames = 0
        for given, reference, codes, own, own_codes in zip(
            self._given, self.slow, self._codes, slow, self._code_scores(model, slow), strict=True
        ):
            books = [_book_sums(reference.semantic, own.semantic, given.semantic)]
            books += [
                _book_sums(codes[:, i], own_codes[:, i], given.codes[:, i + 1])
                for i in range(codes.shape[1])
            ]
            sums.append([[np.array(value).item() for value in book] for book in books])
            steps += len(given.semantic)
            frames += len(given.codes)
        totals = np.sum(sums, axis=0)
        found = []
        for number, (kl, same, own, wanted) in enumerate(totals.tolist()):
            count = steps if number == 0 else frames
            found.append(
                Book(kl / count, same / count, math.exp(own / count), math.exp(wanted / count))
            )
        return Divergence(tuple(found), steps, frames)


def log_softmax(scores: mx.array) -> mx.array:
    """Logarithms of the probabilities along the last axis."""
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def _book_sums(reference: mx.array, own: mx.array, tokens: mx.array) -> list[mx.array]:
    """Sums over steps of KL, agreement and the negative log-likelihoods, own and reference's.

    reference, own: log-probabilities [S, V]; tokens [S].
    """
    chosen = tokens[:, None]
    return [
        (mx.exp(reference) * (reference - own)).sum(),
        (reference.argmax(axis=-1) == own.argmax(axis=-1)).sum(),
        -mx.take_along_axis(own, chosen, axis=-1).sum(),
        -mx.take_along_axis(reference, chosen, axis=-1).sum(),
    ]
