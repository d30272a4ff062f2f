"""Text for the eye becomes text for the ear, and what only looks like markup stays."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from warble_mlx.errors import MissingExtraError
from warble_mlx.normalise import normalised, numbers_in_words, without_markup
from warble_mlx.text import speakable

TEXTS = Path(__file__).parent / "cases" / "texts" / "texts.jsonl"
CASES = {
    case["id"]: case
    for case in map(json.loads, TEXTS.read_text("utf-8").splitlines())
    if case["id"].startswith("md")
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    pytest.importorskip("num2words")
    expect, spoken = CASES[name]["expect"], speakable(normalised(CASES[name]["text"]))
    assert all(word in spoken for word in expect.get("spoken_has", []))
    assert not any(word in spoken for word in expect.get("spoken_lacks", []))
    assert ("snake_case_name" in spoken) is bool(expect.get("snake_case_intact"))
    assert not set("`#[]") & set(spoken)


def test_arithmetic_and_names_are_no_markup() -> None:
    text = CASES["md-03"]["text"]
    assert without_markup(text) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("***all*** of ~~the~~ __kinds__", "all of the kinds"),
        ("**bold with *soft* inside**", "bold with soft inside"),
        ("2*3*4 and 2 * 3 * 4 and a_b_c", "2*3*4 and 2 * 3 * 4 and a_b_c"),
        ("[a [b](c)](d) ![picture](e.png) [f][1]\n\n[1]: g", "a b picture f\n\n"),
        ("See https://example.org/a_b_c?x=1.", "See example dot org."),
        ("See https://example.org.", "See example dot org."),
        ("At www.example.org, too", "At example dot org, too"),
        ("Or <https://www.example.org/d>, fine", "Or example dot org, fine"),
        ("## Heading ##\ntext", "Heading.\ntext"),
        ("# What?\n> quoted\n* item\n+ item!\n- [ ] task", "What?\nquoted\nitem.\nitem!\ntask."),
        ("| a | b |\n|---|:-:|\n| c | d |", "a, b\n\nc, d"),
        ("one\n\n---\n\ntwo", "one\n\n\n\ntwo"),
        ("before\n~~~\ncode\n~~~\nafter", "before\n\nafter"),
        ("before\n```\nnever closed", "before\n"),
        ("`a*b*c` and ``x ` y``", "a*b*c and x ` y"),
        (r"\*not\* \_soft\_", "*not* _soft_"),
        ("R&amp;D <b>is</b> a<br/>b", "R&D  is  a b"),
        ("If a < b and b > c then stop.", "If a < b and b > c then stop."),
        ("if a <b and b> c", "if a <b and b> c"),
        ('<break time="1s"/> stays', '<break time="1s"/> stays'),
    ],
)
def test_markup(text: str, plain: str) -> None:
    assert without_markup(text) == plain


def test_emoji_go() -> None:
    assert speakable(normalised("Done 👍🏽 🇩🇪 ok ❤️ 👩‍👩‍👧 ✨!")) == "Done ok !"
    assert normalised("a → b © ™") == "a → b © ™"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("24 of 8,848.86 m", "twenty-four of eight thousand, eight hundred and forty-eight point"
         " eight six m"),
        ("The 21st at 9:05 a.m., 9:30 and 1:00", "The twenty-first at nine oh five a.m., nine"
         " thirty and one o'clock"),
        ("at 3:00 p.m.", "at three p.m."),
        ("$3.50, €1, £0.01, $2.5", "three dollars and fifty cents, one euro, zero pounds and one"
         " penny, two point five dollars"),
        ("50% in 1999, 2024 and 2005", "fifty percent in nineteen ninety-nine, twenty twenty-four"
         " and two thousand and five"),
        ("-5 degrees", "minus five degrees"),
        ("Version 2.0.1, A4, x2, 12345678901234567890", "Version 2.0.1, A4, x2,"
         " 12345678901234567890"),
    ],
)  # fmt: skip
def test_numbers(text: str, words: str) -> None:
    pytest.importorskip("num2words")
    assert numbers_in_words(text, "en-GB") == words


def test_numbers_of_other_languages() -> None:
    pytest.importorskip("num2words")
    assert numbers_in_words("3 Hunde um 9:30", "de") == "drei Hunde um 9:30"
    assert numbers_in_words("3 chiens", "fr") == "trois chiens"
    assert numbers_in_words("3 只狗", "zh") == "3 只狗"
    assert numbers_in_words("3 dogs?", "") == "3 dogs?"


def test_control_tokens_do_not_survive() -> None:
    assert speakable(normalised("Hi &lt;|im_end|&gt; <|semantic:1200|>you")) == "Hi you"


def test_numbers_need_the_extra_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "num2words":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert normalised("**No** numbers") == "No numbers"
    with pytest.raises(MissingExtraError, match=r"warble-mlx\[text\]"):
        normalised("7 numbers")
