"""Markdown, links, emoji and numbers as a person would read them aloud; off by default.

The model takes text as it is, so this is for text that was written for the eye: chat replies,
README files. Markup goes and what it marks stays; a link keeps its label, a bare address its
host; code blocks, emoji and rules between paragraphs go; lines that are items or headings end
like sentences. Numbers become words through the library num2words (extra `text`), in the
languages that it knows and that are written in Latin letters.

What looks like markup but is not stays: `2 * 3`, `snake_case`, `a < b`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from warble_mlx.errors import MissingExtraError
from warble_mlx.text import disarm

LANGUAGES = ("de", "en", "es", "fr", "it", "nl", "pl")  # written in Latin letters

_SPACES = re.compile(r"[ \t]+")
_FENCE = re.compile(r"^[ \t]*(```+|~~~+).*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_REFERENCE = re.compile(r"^[ \t]*\[[^\]\n]+\]:[ \t]*\S+.*$", re.MULTILINE)
_RULE = re.compile(
    r"^[ \t]*(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,}|={3,})$", re.MULTILINE
)
_TABLE_RULE = re.compile(
    r"^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)+\|?[ \t]*$", re.MULTILINE
)
_TABLE_ROW = re.compile(r"^[ \t]*\|(.+)\|[ \t]*$", re.MULTILINE)
_LINE_MARK = re.compile(
    r"^[ \t]*(?:>[ \t]?)*[ \t]*(?:(#{1,6})[ \t]+|([-*+])[ \t]+(?:\[[ xX]\][ \t]+)?)?"
)
_NUMBERED = re.compile(r"^[ \t]*\d{1,3}[.)][ \t]+\S")
_LINK = re.compile(
    r"!?\[([^\[\]]*)\](?:\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)|\[[^\[\]]*\])"
)
_ADDRESS = re.compile(
    r"<?\b(?:https?://|www\.)([^\s/?#<>()\[\]]*[^\s/?#<>()\[\].,;:!?])[^\s<>]*?>?"
    r"(?=[.,;:!?)\]]*(?:\s|$))"
)
_TAG = re.compile(
    r"</?(?:a|b|i|u|s|p|em|br|hr|li|ul|ol|h[1-6]|del|div|kbd|sub|sup|code|span|strong)"
    r"(?:\s+[\w-]+=(?:\"[^\"]*\"|'[^']*'))*\s*/?>",
    re.IGNORECASE,
)
# What marks enclose is bounded, or a text of many opening marks would take quadratic time.
_CODE = re.compile(r"(`+)(?!`)(.{1,500}?)(?<!`)\1(?!`)", re.DOTALL)
# Emphasis opens before a letter at a word's border and closes after one: CommonMark's rule,
# but also for the star, so that 2*3*4 stays.
_EMPHASIS = re.compile(
    r"(?<![\w\\*_~])(\*{1,3}|_{1,3}|~~)(?=[^\s*_~])(.{1,500}?)(?<=[^\s\\*_~])\1(?![\w*_~])",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+.!>~|-])")
_EMOJI = re.compile(
    "[\U0001f000-\U0001faff\u2600-\u27bf\u231a\u231b\u23e9-\u23fa\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55]"
    "[\ufe0e\ufe0f\u200d\u20e3]*|[\ufe0f\u20e3]"
)
_ENDS = ".!?:;,。！？：；，、…"


def normalised(text: str, language: str = "en") -> str:
    """`text` without markup and emoji, its numbers in words of `language`.

    Raises MissingExtraError when there are numbers and num2words is not installed.
    """
    # Control tokens first, while they still look like ones.
    plain = without_markup(disarm(text))
    return numbers_in_words(_EMOJI.sub(" ", plain), language)


def without_markup(text: str) -> str:
    """Markdown and simple HTML as plain text; links keep their label, addresses their host."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _SPACES.sub(" ", text)  # the patterns below take quadratic time over long runs
    for gone in (_FENCE, _REFERENCE, _RULE, _TABLE_RULE):
        text = gone.sub("", text)
    text = _TABLE_ROW.sub(lambda m: ", ".join(map(str.strip, m[1].split("|"))), text)
    text = _TAG.sub(" ", text)
    # Until nothing changes, since marks may stand within each other.
    for pattern, kept in ((_LINK, 1), (_CODE, 2), (_EMPHASIS, 2)):
        text = _to_the_end(pattern, kept, text)
    text = _ADDRESS.sub(lambda m: m[1].removeprefix("www.").replace(".", " dot "), text)
    text = "\n".join(map(_plain_line, text.split("\n")))
    return html.unescape(_ESCAPE.sub(r"\1", text))


def _to_the_end(pattern: re.Pattern[str], kept: int, text: str) -> str:
    while (shorter := pattern.sub(lambda m: str(m[kept]), text)) != text:
        text = shorter
    return text


def _plain_line(line: str) -> str:
    """A heading or item without its mark, and with an end, so that it is a sentence."""
    mark = _LINE_MARK.match(line)
    assert mark is not None  # it matches nothing, too
    plain = line[mark.end() :].rstrip()
    if mark[1]:
        plain = plain.rstrip("#").rstrip()
    is_item = bool(mark[1] or mark[2] or _NUMBERED.match(plain))
    return f"{plain}." if is_item and plain and plain[-1] not in _ENDS else plain


_AMOUNT = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_MONEY = re.compile(rf"([$€£])\s?({_AMOUNT})(?![\w.]*\d)")
_ORDINAL = re.compile(r"(?<![\w.])(\d+)(?:st|nd|rd|th)\b")
_TIME = re.compile(r"(?<![\w:.])([01]?\d|2[0-3]):([0-5]\d)(?![\w:])")
_PERCENT = re.compile(rf"(?<![\w.])({_AMOUNT})\s?%")
_YEAR = re.compile(r"(?<![\w.,-])(1[1-9]\d\d|20[1-9]\d)(?![\w%-]|[.,]\d)")
_NUMBER = re.compile(rf"(?<![\w.,:])(-?)({_AMOUNT})(?![\w]|[.,:]\d)")
_MOST_DIGITS = 15  # longer ones are no quantities: they stay, and the model spells them


def numbers_in_words(text: str, language: str = "en") -> str:
    """Numbers of `text` in words; money, dates, times and shares only in English.

    An empty `language` is an unknown one: the numbers stay, since the model reads them in the
    language around them; so they do in a language that is not in LANGUAGES. Numbers of other
    shapes (2.0.1, A4, a telephone's) stay, too.
    """
    language = language.partition("-")[0].lower()
    if language not in LANGUAGES or not any(c.isdecimal() for c in text):
        return text
    try:
        from num2words import num2words
    except ImportError as error:
        raise MissingExtraError("reading numbers as words", "num2words", "text") from error

    def words(number: str, **how: Any) -> str:
        digits = number.replace(",", "")
        if len(digits) > _MOST_DIGITS:
            return number
        value = Decimal(digits) if "." in digits else int(digits)
        return str(num2words(value, lang=language, **how))

    def clock(m: re.Match[str]) -> str:
        if m[2] == "00":
            return (
                f"{words(m[1])} o'clock"
                if not re.match(r"\s*[ap]\.?m", m.string[m.end() :])
                else words(m[1])
            )
        return f"{words(m[1])} {'oh ' if m[2][0] == '0' else ''}{words(m[2])}"

    rules: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = []
    if language == "en":
        rules = [
            (_MONEY, lambda m: _money(words, m[1], m[2])),
            (_ORDINAL, lambda m: words(m[1], to="ordinal")),
            (_TIME, clock),
            (_PERCENT, lambda m: f"{words(m[1])} percent"),
            (_YEAR, lambda m: words(m[1], to="year")),
        ]
    rules.append((_NUMBER, lambda m: f"{'minus ' if m[1] else ''}{words(m[2])}"))
    for pattern, read in rules:
        text = pattern.sub(read, text)
    return text


def _money(words: Callable[..., str], sign: str, amount: str) -> str:
    unit = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny")}[sign]
    whole, _, part = amount.partition(".")
    said = f"{words(whole)} {unit[0]}{'' if whole == '1' else 's'}"
    if part and len(part) != 2:
        return f"{words(amount)} {unit[0]}s"
    cents = int(part or 0)
    if not cents:
        return said
    plural = {"penny": "pence"}.get(unit[1], unit[1] + "s")
    return f"{said} and {words(str(cents))} {unit[1] if cents == 1 else plural}"
