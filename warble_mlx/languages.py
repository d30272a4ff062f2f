"""Which scripts a text is written in, and whether model and voice can be expected to read them.

The published model speaks eleven languages: Cantonese, Chinese, Dutch, English, French, German,
Italian, Japanese, Korean, Polish and Spanish. In another script it babbles with confidence.
Languages that share a script cannot be told apart here: nobody is warned about Danish.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

LATIN, HAN, KANA, HANGUL = "Latin", "Han", "kana", "Hangul"
_SCRIPTS = {
    "LATIN": LATIN,
    "CJK": HAN,
    "IDEOGRAPHIC": HAN,
    "HIRAGANA": KANA,
    "KATAKANA": KANA,
    "KATAKANA-HIRAGANA": KANA,
    "HANGUL": HANGUL,
}
SUPPORTED = frozenset(_SCRIPTS.values())
_OF_LANGUAGE = {
    "zh": {HAN},
    "yue": {HAN},
    "ja": {HAN, KANA},
    "ko": {HANGUL, HAN},
    **{code: {LATIN} for code in ("de", "en", "es", "fr", "it", "nl", "pl")},
}


@lru_cache(maxsize=4096)
def script_of(letter: str) -> str | None:
    """The script of one letter, by its Unicode name; None for letters of no script (ª, ʰ, µ, 𝑥)."""
    words = unicodedata.name(letter, "").split()
    if words[:1] in (["FULLWIDTH"], ["HALFWIDTH"]):
        words = words[1:]
    # "ARABIC LETTER ALEF", but "MICRO SIGN" and "MATHEMATICAL ITALIC SMALL X".
    if len(words) < 2 or words[0] in {"MATHEMATICAL", "MODIFIER", "DOUBLE-STRUCK", "SCRIPT"}:
        return None
    if words[-1] in {"SIGN", "SYMBOL", "INDICATOR"} and words[0] not in _SCRIPTS:
        return None
    return _SCRIPTS.get(words[0], words[0].capitalize())


def language_doubts(text: str, voice: str | None = None, language: str = "") -> tuple[str, ...]:
    """Sentences on letters that will not be read well, for `text` spoken by a voice of `language`.

    language-unsupported: a word of a script that none of the model's languages uses (one letter
    is taken for a formula's). voice-language: most letters are in a script that the voice's own
    language does not use.
    """
    scripts: Counter[str] = Counter()
    foreign: list[str] = []
    for word in text.split():
        found = Counter(s for c in word if c.isalpha() and (s := script_of(c)) is not None)
        scripts += found
        foreign += [s for s, count in found.items() if s not in SUPPORTED and count > 1]
    doubts = []
    if foreign:
        names = ", ".join(dict.fromkeys(foreign))
        doubts.append(
            f"the text has words in {names} letters, which none of the model's languages uses:"
            " expect babble there (language-unsupported)"
        )
    own = _OF_LANGUAGE.get(language.partition("-")[0].lower())
    known = +Counter({s: n for s, n in scripts.items() if s in SUPPORTED})
    if own and sum(n for s, n in known.items() if s not in own) * 2 > sum(known.values()):
        names = ", ".join(s for s in known if s not in own)
        doubts.append(
            f"most of the text is in {names} letters, but the voice {voice or 'chosen'} speaks only"
            f' "{language}": expect babble (voice-language)'
        )
    return tuple(doubts)
