"""Word errors between what should have been said and what a recogniser wrote."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SIGNS = {"%": " percent ", "&": " and ", "°": " degrees ", "’": "'"}


class WordErrors(NamedTuple):
    """Edits (substitutions, insertions, deletions) and the number of words of the reference."""

    errors: int
    words: int


def spelled(number: int) -> str:
    """An integer of 0 … 999,999 in English words, without "and"."""
    if not 0 <= number < 1_000_000:
        raise ValueError(f"numbers of 0 … 999999 can be spelled, not {number}")
    if number < 20:
        return ONES[number]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            return f"{spelled(number // size)} {name}" + (f" {spelled(rest)}" if rest else "")
    return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")


def words(text: str) -> list[str]:
    """Lower-case words of an English text; digits, times and some signs are spelled out.

    Recognisers write "25 dollars", "$25" and "5:30" for what was said as words, so reference and
    hypothesis both go through here. Longer numbers than six digits are read digit by digit.
    """
    text = text.lower()
    for sign, word in SIGNS.items():
        text = text.replace(sign, word)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"\$(\d+(?:\.\d+)?)", r"\1 dollars", text)
    text = re.sub(r"(\d+):(\d\d)", _time, text)
    text = re.sub(r"(\d+)\.(\d+)", lambda m: f"{_integer(m[1])} point {_digits(m[2])}", text)
    text = re.sub(r"\d+", lambda m: _integer(m[0]), text)
    text = re.sub(r"[^a-z' ]", " ", text)
    return [word for word in (part.strip("'") for part in text.split()) if word]


def _integer(digits: str) -> str:
    return f" {spelled(int(digits)) if len(digits) <= 6 else _digits(digits)} "


def _digits(digits: str) -> str:
    return " ".join(ONES[int(digit)] for digit in digits)


def _time(match: re.Match[str]) -> str:
    hours, minutes = _integer(match[1]), match[2]
    if minutes == "00":
        return f"{hours} o'clock "
    return f"{hours} oh {ONES[int(minutes)]} " if minutes[0] == "0" else hours + _integer(minutes)


def word_errors(reference: str, hypothesis: str) -> WordErrors:
    """Fewest word edits that turn `reference` into `hypothesis`, both normalised by `words`."""
    wanted, got = words(reference), words(hypothesis)
    row = list(range(len(got) + 1))
    for i, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(got, 1):
            replaced = diagonal + (word != other)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, replaced)
    return WordErrors(row[-1], len(wanted))


def rate(results: list[WordErrors]) -> float:
    """Word error rate over several sentences: all errors over all words."""
    total = sum(result.words for result in results)
    if total == 0:
        raise ValueError("no words to judge")
    return sum(result.errors for result in results) / total


def interval(results: list[WordErrors], *, draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of `rate`, over sentences drawn with replacement, fixed seed."""
    if not results:
        raise ValueError("no sentences to judge")
    counts = np.array(results)
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(draws, len(counts)))]
    rates = drawn[..., 0].sum(axis=1) / drawn[..., 1].sum(axis=1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(low), float(high)


def difference_interval(
    before: list[WordErrors], after: list[WordErrors], *, draws: int = 2000
) -> tuple[float, float]:
    """95 % bootstrap interval of rate(after) - rate(before), paired by sentence."""
    if len(before) != len(after) or not before:
        raise ValueError("both lists must hold the same sentences, at least one")
    counts = np.concatenate([np.array(before), np.array(after)], axis=1)
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(draws, len(counts)))]
    totals = drawn.sum(axis=1)
    low, high = np.quantile(
        totals[:, 2] / totals[:, 3] - totals[:, 0] / totals[:, 1], [0.025, 0.975]
    )
    return float(low), float(high)
