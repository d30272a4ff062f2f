"""The alignment of a long text with what a recogniser wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from ear.alignment import align

from warble_mlx.splitting import sentences

TEXT = (Path(__file__).parents[1] / "cases" / "texts" / "long_75_markers.txt").read_text("utf-8")
SENTENCES = sentences(" ".join(TEXT.split()))


def test_the_text_has_its_75_sentences() -> None:
    assert len(SENTENCES) == 75


def test_everything_heard() -> None:
    found = align(SENTENCES, TEXT.upper())
    assert found.heard == 75
    assert set(found.shares) == {1.0}
    assert (found.named, found.swollen) == (1.0, ())


@pytest.mark.parametrize("lost", [0, 20, 74])
def test_a_sentence_that_is_left_out(lost: int) -> None:
    found = align(SENTENCES, " ".join(s for i, s in enumerate(SENTENCES) if i != lost))
    # Its neighbour says much the same, so that half of each may be missing.
    assert 73 <= found.heard <= 74
    assert found.swollen == ()


@pytest.mark.parametrize("place", [0, 33, 74])
def test_a_sentence_said_twice(place: int) -> None:
    heard = [*SENTENCES[: place + 1], SENTENCES[place], *SENTENCES[place + 1 :]]
    found = align(SENTENCES, " ".join(heard))
    assert found.heard == 75
    assert place in found.swollen


def test_babble_beside_a_sentence() -> None:
    found = align(SENTENCES, " ".join([*SENTENCES[:9], "and so on " * 8, *SENTENCES[9:]]))
    assert found.heard == 75
    assert found.swollen


def test_sentences_in_the_wrong_order() -> None:
    found = align(SENTENCES, " ".join([*SENTENCES[40:], *SENTENCES[:40]]))
    assert found.named < 0.1


def test_one_wrong_word_in_three_is_still_that_sentence() -> None:
    heard = " ".join("mumble" if i % 3 == 0 else word for i, word in enumerate(TEXT.split()))
    found = align(SENTENCES, heard)
    assert found.heard == 75
    assert found.swollen == ()
    assert found.named > 0.5


def test_other_words_are_no_sentence_of_the_text() -> None:
    assert align(SENTENCES, "nothing of the kind was ever said by anyone " * 100).heard == 0
