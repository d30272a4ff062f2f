"""Which sentences of a long text are heard, in order, and whether more is heard than it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ear.scoring import words

HEARD_SHARE = 0.5  # of a sentence's words in their place
SURPLUS_SHARE = 0.6  # of a sentence's length, heard beside it


class Alignment(NamedTuple):
    """How a transcript covers a text."""

    shares: tuple[float, ...]  # per sentence, of its words heard in their place
    named: float  # share, likewise, of the words that only one sentence in twenty has
    swollen: tuple[int, ...]  # sentences at which most of one more was heard: said twice, or babble

    @property
    def heard(self) -> int:
        """Sentences that are there, in order."""
        return sum(share >= HEARD_SHARE for share in self.shares)


def align(sentences: Sequence[str], heard: str) -> Alignment:
    """Align `heard`, a transcript, with the sentences of a text by the fewest word edits.

    Sentences that resemble each other align in any order; `named` tells then.
    """
    spoken = [words(sentence) for sentence in sentences]
    lengths = np.array([len(sentence) for sentence in spoken])
    wanted = [word for sentence in spoken for word in sentence]
    owners = np.repeat(np.arange(len(spoken)), lengths)
    matched, inserted = _matches(wanted, words(heard))
    shares = np.bincount(owners[matched], minlength=len(spoken)) / lengths
    spread = Counter(word for sentence in spoken for word in set(sentence))
    rare = np.array([spread[word] <= max(1, len(spoken) // 20) for word in wanted])
    surplus = np.bincount(owners[inserted], minlength=len(spoken) + 1)
    # A sentence said twice may be entered at the end of one and the beginning of the next.
    near = np.maximum(surplus[:-1] + surplus[1:], surplus[:-1] + np.roll(surplus, 1)[:-1])
    return Alignment(
        tuple(shares.tolist()),
        float(rare[matched].sum() / max(rare.sum(), 1)),
        tuple(np.flatnonzero(near >= SURPLUS_SHARE * lengths).tolist()),
    )


def _costs(wanted: list[str], got: list[str]) -> np.ndarray:
    """Fewest edits between all beginnings of both, int32 [wanted + 1, got + 1]."""
    names = {word: i for i, word in enumerate({*wanted, *got})}
    other = np.array([names[word] for word in got], np.int32)
    steps = np.arange(len(got) + 1, dtype=np.int32)
    costs = np.empty((len(wanted) + 1, len(got) + 1), np.int32)
    costs[0] = steps
    for i, word in enumerate(wanted):
        row = costs[i] + 1
        row[1:] = np.minimum(row[1:], costs[i, :-1] + (other != names[word]))
        # Insertions: the least of everything to the left, plus its distance.
        costs[i + 1] = np.minimum.accumulate(row - steps) + steps
    return costs


def _matches(wanted: list[str], got: list[str]) -> tuple[list[int], list[int]]:
    """Places of `wanted` that are heard, and for each word too many the place it was heard at."""
    costs = _costs(wanted, got)
    i, j = len(wanted), len(got)
    matched: list[int] = []
    inserted: list[int] = []
    while i or j:
        if i and j and costs[i, j] == costs[i - 1, j - 1] + (wanted[i - 1] != got[j - 1]):
            i, j = i - 1, j - 1
            if wanted[i] == got[j]:
                matched.append(i)
        elif j and costs[i, j] == costs[i, j - 1] + 1:
            j -= 1
            inserted.append(max(i - 1, 0))
        else:
            i -= 1
    return matched, inserted
