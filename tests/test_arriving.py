"""Text bit by bit: lines at once, sentences when the next one begins, nothing lost or doubled."""

from __future__ import annotations

import pytest

from warble_mlx.arriving import ArrivingText


def cut(pieces: list[str]) -> list[list[str]]:
    text = ArrivingText()
    return [*(text.add(piece) for piece in pieces), text.finish()]


def test_lines_and_sentences() -> None:
    assert cut(["Hello the", "re. How", " are you?\nFi", "ne."]) == [
        [], ["Hello there."], ["How are you?"], [], ["Fine."]
    ]  # fmt: skip
    assert cut(["One.\r", "\nTwo.\n\n\nThree"]) == [["One."], ["Two."], ["Three"]]
    assert cut(["\n", " \n", "…\n", "?! "]) == [[], [], [], [], []]
    assert cut([]) == [[]]


@pytest.mark.parametrize("text", ["Dr. Smith paid $3.50 at 3 p.m. today.", "See e.g. the U.S. map"])
def test_a_full_stop_need_not_be_the_end(text: str) -> None:
    assert [piece for pieces in cut(list(text)) for piece in pieces] == [text]


def test_any_cut_gives_the_same_words() -> None:
    text = "It rained. The kettle sang!\nWas it late? Yes.  It was 3.5 hours past noon. “Oh.” End"
    for size in range(1, 20):
        pieces = cut([text[i : i + size] for i in range(0, len(text), size)])
        words = " ".join(piece for found in pieces for piece in found).split()
        assert words == text.split()


def test_what_never_ends_is_cut() -> None:
    found = cut(["word " * 100] * 10)
    assert max(len(piece) for pieces in found for piece in pieces) < 3000
    assert sum(piece.count("word") for pieces in found for piece in pieces) == 1000
