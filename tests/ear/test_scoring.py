"""The scoring of the ear tests, which needs no recogniser."""

from __future__ import annotations

import pytest
from ear.scoring import (
    WordErrors,
    difference_interval,
    interval,
    rate,
    spelled,
    word_errors,
    words,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (47, "forty seven"),
        (100, "one hundred"),
        (315, "three hundred fifteen"),
        (2000, "two thousand"),
        (1984, "one thousand nine hundred eighty four"),
        (512_007, "five hundred twelve thousand seven"),
    ],
)
def test_numbers_are_spelled(number: int, text: str) -> None:
    assert spelled(number) == text


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="can be spelled"):
        spelled(number)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("The museum closes at 5:30 on Sunday.", "the museum closes at five thirty on sunday"),
        ("At 7:00.", "at seven o'clock"),
        ("It is 3:05.", "it is three oh five"),
        ("A kilogram is about 2.25 pounds.", "a kilogram is about two point two five pounds"),
        ("$25", "twenty five dollars"),
        ("1,250 boats", "one thousand two hundred fifty boats"),
        ("6, 6, 9, 8", "six six nine eight"),
        ("5 % & more", "five percent and more"),
        ("12345678", "one two three four five six seven eight"),
        ("Freud's, 'quoted' — don’t!", "freud's quoted don't"),
        ("tree-killing", "tree killing"),
        ("", ""),
    ],
)
def test_text_becomes_words(written: str, said: str) -> None:
    assert words(written) == said.split()


@pytest.mark.parametrize(
    ("reference", "hypothesis", "errors"),
    [
        ("one two three four", "One, two, 3, 4!", 0),
        ("one two three four", "one two tree four", 1),
        ("one two three four", "one two four", 1),
        ("one two three four", "one two two three four", 1),
        ("one two three four", "", 4),
        ("one two three four", "four three two one", 4),
        ("one two three four", "a b c d e f", 6),
        ("one two three four", "two three four five", 2),
    ],
)
def test_word_errors(reference: str, hypothesis: str, errors: int) -> None:
    assert word_errors(reference, hypothesis) == WordErrors(errors, 4)


def test_the_rate_weighs_words_and_not_sentences() -> None:
    assert rate([WordErrors(1, 1), WordErrors(0, 9)]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no words"):
        rate([])


def test_the_interval_holds_the_rate_and_narrows() -> None:
    few = [WordErrors(e, 10) for e in (0, 1, 4, 2)]
    low, high = interval(few)
    assert 0 <= low < rate(few) < high <= 0.4
    narrow_low, narrow_high = interval(few * 16)
    assert low < narrow_low < rate(few) < narrow_high < high
    assert interval([WordErrors(1, 10)] * 5) == (0.1, 0.1)
    with pytest.raises(ValueError, match="no sentences"):
        interval([])


def test_the_difference_is_paired() -> None:
    """Sentences that differ a lot, but all by the same step: the interval has no width."""
    before = [WordErrors(e, 10) for e in (0, 5, 2, 7)]
    after = [WordErrors(e + 1, 10) for e in (0, 5, 2, 7)]
    assert difference_interval(before, after) == pytest.approx((0.1, 0.1))
    with pytest.raises(ValueError, match="same sentences"):
        difference_interval(before, after[:-1])
