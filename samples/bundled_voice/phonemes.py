"""English text to the phoneme alphabet that Kokoro was trained on, through eSpeak NG.

eSpeak writes a diphthong or an affricate as two letters; Kokoro has one letter for each. The
tables below translate. Characters that Kokoro has no number for are left out.
"""

from __future__ import annotations

import re

PUNCTUATION = ';:,.!?¡¿—…"«»“”'

# Number of each character in Kokoro's input table.
VOCABULARY: dict[str, int] = {
    ";": 1, ":": 2, ",": 3, ".": 4, "!": 5, "?": 6, "—": 9, "…": 10, '"': 11, "(": 12, ")": 13,
    "“": 14, "”": 15, " ": 16, "A": 24, "I": 25, "O": 31, "W": 39, "Y": 41, "ᵊ": 42, "a": 43,
    "b": 44, "d": 46, "e": 47, "f": 48, "h": 50, "i": 51, "j": 52, "k": 53, "l": 54, "m": 55,
    "n": 56, "o": 57, "p": 58, "s": 61, "t": 62, "u": 63, "v": 64, "w": 65, "z": 68, "ɑ": 69,
    "æ": 72, "ɔ": 76, "ð": 81, "ʤ": 82, "ə": 83, "ɛ": 86, "ɜ": 87, "ɡ": 92, "ɪ": 102, "ŋ": 112,
    "θ": 119, "ɹ": 123, "ɾ": 125, "ʃ": 131, "ʧ": 133, "ʊ": 135, "ʌ": 138, "ʒ": 147, "ˈ": 156,
    "ˌ": 157, "ᵻ": 177, "T": 36,
}  # fmt: skip
_AT_ONCE = 2000  # texts per call of phonemizer: putting punctuation back is quadratic in them
_STRESS = (VOCABULARY["ˈ"], VOCABULARY["ˌ"])

_JOINED = [  # eSpeak's tied pairs, then single letters; the order matters
    ("a^ɪ", "I"), ("a^ʊ", "W"), ("d^ʒ", "ʤ"), ("e^ɪ", "A"), ("t^ʃ", "ʧ"), ("ɔ^ɪ", "Y"),
    ("o^ʊ", "O"), ("ə^ʊ", "O"), ("ə^l", "ᵊl"), ("i^ə", "iə"), ("ɚ", "əɹ"), ("ɝ", "ɜɹ"),
    ("ɐ", "ə"), ("r", "ɹ"), ("x", "k"), ("ç", "k"), ("ɬ", "l"), ("ʲ", ""), ("ʔ", "t"),
    ("ɾ", "T"), ("ɜː", "ɜɹ"), ("ɹɹ", "ɹ"), ("ː", ""), ("^", ""), ("\u0329", ""), ("\u032a", ""),
    ("\u0303", ""), ("g", "ɡ"),
]  # fmt: skip


def translated(ipa: str) -> str:
    """eSpeak's output with `^` as tie, in Kokoro's letters."""
    for old, new in _JOINED:
        ipa = ipa.replace(old, new)
    ipa = re.sub(r"(?<=\S)n(?=\u0329)", "ᵊn", ipa)
    ipa = "".join(letter for letter in ipa if letter in VOCABULARY)
    return re.sub(r"\s+", " ", ipa).strip()


def numbers(phonemes: str) -> list[int]:
    return [VOCABULARY[letter] for letter in phonemes if letter in VOCABULARY]


def sounding(tokens: list[int]) -> list[int]:
    """Stress marks replaced by the phoneme they stress: they take time, but have no sound."""
    found = list(tokens)
    for at in range(len(found) - 2, -1, -1):
        if found[at] in _STRESS:
            found[at] = found[at + 1]
    return found


def phonemised(texts: list[str]) -> list[str]:
    """One line of phonemes per text, punctuation kept; needs phonemizer and eSpeak NG."""
    from phonemizer.backend import EspeakBackend

    backend = EspeakBackend(
        "en-us",
        preserve_punctuation=True,
        punctuation_marks=PUNCTUATION,
        with_stress=True,
        tie="^",
        language_switch="remove-flags",
    )
    return [
        translated(line)
        for begin in range(0, len(texts), _AT_ONCE)
        for line in backend.phonemize(texts[begin : begin + _AT_ONCE], strip=True, njobs=1)
    ]
