"""User text on its way to the prompt: cleaned, and with control tokens made harmless.

The reference folds white space and nothing else; that is `fold_whitespace`, and parity tests use
only that. Everything a user types goes through `speakable` instead: the clean-up that upstream's
later tools do, and removal of anything that looks like a control token.
"""

from __future__ import annotations

import re
import unicodedata

from warble_mlx.errors import TextError

# Han and kana: a line break between two of these is layout, not a pause.
_CJK = re.compile(
    r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_CONTROL_TOKEN = re.compile(r"<\|[^<>|\s]*\|>")


def fold_whitespace(text: str) -> str:
    """Split at Unicode white space, drop empties, join by one space: the reference's own rule."""
    return " ".join(text.split())


def clean(text: str) -> str:
    """Fold white space and drop invisible characters (Unicode category C).

    A line break between two CJK ideographs or kana joins them; elsewhere it becomes a space.
    """
    visible = "".join(c for c in text if c.isspace() or not unicodedata.category(c).startswith("C"))
    pieces = re.split(r"(\s+)", visible.strip())
    out = pieces[0]
    for gap, word in zip(pieces[1::2], pieces[2::2], strict=True):
        joins = _LINE_BREAK.search(gap) and _CJK.match(out[-1:]) and _CJK.match(word)
        out += word if joins else f" {word}"
    return out


def disarm(text: str) -> str:
    """Replace every `<|…|>` by a space, so that a typed control token is never one.

    Repeated until nothing is left, since removing one may join the halves of another. The
    characters `<` and `|` on their own are ordinary text and stay.
    """
    while True:
        harmless = _CONTROL_TOKEN.sub(" ", text)
        if harmless == text:
            return text
        text = harmless


def speakable(text: object, what: str = "text") -> str:
    """Cleaned, harmless text; raises TextError when it is no text or holds nothing to say."""
    if not isinstance(text, str):
        raise TextError(f"the {what} must be a string, not {type(text).__name__}")
    result = clean(disarm(clean(text)))
    if not any(unicodedata.category(c)[0] in "LN" for c in result):
        seen = f"{text.strip()[:40]!r} has no letter or digit" if text.strip() else "it is empty"
        raise TextError(f"nothing to say in the {what}: {seen}")
    return result
