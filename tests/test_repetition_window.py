"""The repetition rescue's window, in cases that the reference's recorded trace does not hold.

Scores are equal for all tokens, so that the uniforms alone decide: the largest wins.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from warble_mlx.sampling import Settings, choose_semantic, remember

TOKENS = 16  # and EOS, whose index is 16
WINDOW = 10
OTHER = 15  # what the rescue draw yields
EVERYTHING = Settings(mx.array([TOKENS + 1]), mx.array([1.0]), mx.array([1.0]))


def emitted(regular: list[int]) -> list[int]:
    """Tokens of consecutive frames whose regular draws are given and whose rescue is OTHER."""
    recent, found = mx.full((1, WINDOW), -1, dtype=mx.int32), []
    for frame, token in enumerate(regular):
        uniforms = np.full((2, 1, TOKENS + 1), 0.1, np.float32)
        uniforms[0, 0, token] = uniforms[1, 0, OTHER] = 0.9
        chosen = choose_semantic(
            mx.zeros((1, TOKENS + 1)), EVERYTHING, EVERYTHING, mx.array(uniforms), recent
        )
        recent = remember(recent, chosen, mx.array([frame]))
        found.append(chosen.item())
    return found


def test_the_first_token_is_not_remembered() -> None:
    """Said twice in a row it passes; the second time it was recorded, and the third is rescued."""
    assert emitted([3, 3, 3]) == [3, 3, OTHER]


def test_a_token_is_remembered_for_ten_frames() -> None:
    ten = list(range(1, 11))
    assert emitted([0, *ten, 1]) == [0, *ten, OTHER]
    assert emitted([0, *ten, 11, 1]) == [0, *ten, 11, 1]


def test_what_was_emitted_is_remembered_and_not_what_was_drawn() -> None:
    """The rescued frame records OTHER; a regular draw of OTHER is then a repetition itself, and
    the rescue may yield it again."""
    assert emitted([0, 1, 1, 2, 1]) == [0, 1, OTHER, 2, OTHER]
    assert emitted([0, *[1] * 12]) == [0, 1, *[OTHER] * 10, 1]


def test_the_end_is_never_rescued() -> None:
    assert emitted([0, TOKENS, TOKENS]) == [0, TOKENS, TOKENS]


def test_token_zero_is_remembered_like_any_other() -> None:
    """An empty window must not look as if it held index 0, nor hide it."""
    assert emitted([5, 0, 0]) == [5, 0, OTHER]
