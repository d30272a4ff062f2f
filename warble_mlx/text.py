"""User text on its way to the prompt: cleaned, and with control tokens made harmless.

The reference folds white space and nothing else; that is `fold_whitespace`, and parity tests use
only that. Everything a user types goes through `speakable` instead: the clean-up that upstream's
later tools do, Unicode composition (NFC, as the published tokenizer does it anyway), and removal
of anything that looks like a control token, also to the eye: full-width signs, invisible
characters inside, combining marks on the brackets. What stands around it is still spoken.
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
# Invisible characters that are not in category C: joiners, fillers, variation selectors.
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
# What looks like < | > or becomes it by normalisation; combining marks may sit on each.
_MARKS = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]*"
_LEFT, _BAR, _RIGHT = "<＜﹤≮‹〈〈⟨❬", "|｜∣ǀ│┃❘⏐￨¦", ">＞﹥≯›〉〉⟩❭"
_NAMES = r"(?:im_start|im_end|endoftext|voice|audio|pad|(?:speaker|semantic)\s*[:：]\s*\d+)"
_CONTROL_TOKEN = re.compile(
    f"[{_LEFT}]{_MARKS}[{_BAR}]{_MARKS}"
    rf"(?:[^{_LEFT}{_BAR}{_RIGHT}\s]*|\s*{_NAMES}\s*)"
    f"[{_BAR}]{_MARKS}[{_RIGHT}]{_MARKS}",
    re.IGNORECASE,
)


def fold_whitespace(text: str) -> str:
    """Split at Unicode white space, drop empties, join by one space: the reference's own rule."""
    return " ".join(text.split())


def clean(text: str) -> str:
    """Fold white space, compose (NFC) and drop invisible characters (Unicode category C, fillers,
    variation selectors).

    A line break between two CJK ideographs or kana joins them; elsewhere it becomes a space.
    """
    unseen = {c for c in set(text) if not c.isspace() and unicodedata.category(c).startswith("C")}
    visible = text.translate(dict.fromkeys(map(ord, unseen)))
    # Before control tokens are looked for, or the tokenizer's own composition would make one.
    visible = unicodedata.normalize("NFC", _IGNORABLE.sub("", visible))
    pieces = re.split(r"(\s+)", visible.strip())
    out = pieces[0]
    for gap, word in zip(pieces[1::2], pieces[2::2], strict=True):
        joins = _LINE_BREAK.search(gap) and _CJK.match(out[-1:]) and _CJK.match(word)
        out += word if joins else f" {word}"
    return out


_PLAIN = {
    **dict.fromkeys("‘’‚‛ʼ′‹›`´", "'"),
    **dict.fromkeys('“”„‟″«»"', ""),
    **dict.fromkeys("–—―", ", "),
    "…": "...",
}
_PLAIN_MARKS = str.maketrans(_PLAIN)
_RANGE = re.compile(r"(?<=\d)[–—](?=\d)")
_SPACED_COMMA = re.compile(r"\s*,\s*,(?=\s)|\s+,(?=\s)")


def plain_punctuation(text: str) -> str:
    """Typographic marks as plain ones, double quotes gone: for a model that was trained on such
    text alone and stumbles over the others. Apostrophes stay, a dash becomes a comma."""
    plain = _RANGE.sub("-", text).translate(_PLAIN_MARKS)
    return fold_whitespace(_SPACED_COMMA.sub(",", plain))


def disarm(text: str) -> str:
    """Replace every `<|…|>`, and what looks like it, by a space: a typed token is never one.

    Repeated until nothing is left, since removing one may join the halves of another. The
    characters `<` and `|` on their own are ordinary text and stay.
    """
    while True:
        harmless = _CONTROL_TOKEN.sub(" ", text)
        if harmless == text:
            return text
        text = harmless


def harmless(text: str) -> str:
    """`text` cleaned and disarmed; may be empty."""
    result = clean(text)
    # Cleaning may join what disarming has left, so both until nothing changes.
    while (safe := clean(disarm(result))) != result:
        result = safe
    return result


def speakable(text: object, what: str = "text") -> str:
    """Cleaned, harmless text; raises TextError when it is no text or holds nothing to say."""
    if not isinstance(text, str):
        raise TextError(f"the {what} must be a string, not {type(text).__name__}")
    result = harmless(text)
    if not any(unicodedata.category(c)[0] in "LN" for c in result):
        seen = f"{text.strip()[:40]!r} has no letter or digit" if text.strip() else "it is empty"
        raise TextError(f"nothing to say in the {what}: {seen}")
    return result
