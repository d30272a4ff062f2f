"""Long text to parts that are spoken one at a time, and the pauses between them.

    text ──tags──► stretches ──blank lines──► paragraphs ──sentencex──► sentences ──► parts

Sentences are packed into parts up to a limit. A sentence above it is cut at a comma or its like,
else at a space, and inside a word only where the word alone is above it. Nothing is lost on the
way: the parts and what stands between them are the cleaned text (`joined`).

Of SSML, `<speak>` is dropped and `<break time="800ms"/>` is a pause; a text with any other tag of
that language is refused, since its author expects what would not happen. A `<` or `>` that belongs
to no such tag is text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import unescape
from typing import Literal, NamedTuple

from warble_mlx.errors import TextError
from warble_mlx.text import harmless, speakable

Joint = Literal["start", "word", "phrase", "sentence", "paragraph", "break"]

LONGEST_BREAK_S = 60.0
DEFAULT_LANGUAGE = "en"  # whose abbreviations are known if the voice does not say its own
# Share of the pause between sentences that a joint gets.
_SHARES = {"start": 0.0, "word": 0.0, "phrase": 0.5, "sentence": 1.0, "paragraph": 2.0}
# A cut leaves at least this share of the limit before it: no part of a word or two.
_LEAST_PART = 0.25
_BLOCK = 2000  # characters segmented at a time; paragraphs are shorter, mostly

# Han, kana and Hangul: a character is a syllable or more, and takes as long as three letters.
_SYLLABIC = re.compile(
    r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    r"\U00020000-\U0003ffff]"
)
_SYLLABIC_WEIGHT = 3
_HAN_OR_KANA = re.compile(
    r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
# Where a sentence may end with no space behind it.
_CJK_END = "。！？．｡…」』）】》〉”’"
# Where a sentence that is too long may be cut: behind these, and a space if they are Western.
_PHRASE_END = re.compile(r"[,;:…–—)](?= )|[，；：、､。！？…」』）】》〉]")

_BREAK = re.compile(r"<break\b([^<>]*?)/?>(?:\s*</break\s*>)?", re.IGNORECASE)
_TIME = re.compile(r"""\btime\s*=\s*(["'])(.*?)\1""", re.IGNORECASE | re.DOTALL)
_SECONDS = re.compile(r"\+?(\d+(?:\.\d+)?|\.\d+)\s*(ms|s)", re.IGNORECASE)
_ATTRIBUTES = r"""(?:\s+[\w:.-]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*"""
_SPEAK = re.compile(rf"</?speak{_ATTRIBUTES}>", re.IGNORECASE)
_OTHER_TAG = re.compile(
    r"</?(?:audio|desc|emphasis|lang|lexicon|lookup|mark|meta|metadata|p|par|phoneme|prosody|s"
    r"|say-as|seq|sub|token|voice|w|(?:amazon|google|mstts):[\w-]+)"
    rf"{_ATTRIBUTES}/?>",
    re.IGNORECASE,
)
_GAP = re.compile(r"(\s+)")
_LINE_BREAK = re.compile(r"\r\n|[\n\r\v\x85\u2028]")
_PARAGRAPH_END = re.compile(r"[\f\u2029]")


class Part(NamedTuple):
    """A stretch of the cleaned text that is spoken in one go, or passed over as a pause."""

    text: str
    glue: str  # what stands before it in the cleaned text: a space or nothing
    joint: Joint  # what it follows
    break_s: float  # seconds of a `<break>` before it; counts where joint is "break"
    spoken: bool  # False: no letter or digit, such as a row of asterisks

    def pause(self, pause_s: float) -> float:
        """Seconds of silence before this part, if there are `pause_s` between sentences."""
        return self.break_s if self.joint == "break" else _SHARES[self.joint] * pause_s


def joined(parts: Iterable[Part]) -> str:
    """The cleaned text that `parts` were made of."""
    return "".join(part.glue + part.text for part in parts)


def weight(text: str) -> int:
    """Length of a text in letters of the Latin kind: ideographs, kana and Hangul count thrice."""
    return len(text) + (_SYLLABIC_WEIGHT - 1) * len(_SYLLABIC.findall(text))


def split(
    text: object,
    limit: int,
    language: str = DEFAULT_LANGUAGE,
    rewrite: Callable[[str], str] | None = None,
) -> tuple[Part, ...]:
    """Parts of `text`, each of a `weight` of at most `limit`; the last may be only a pause.

    language: code whose abbreviations count, such as "en" or "de-AT". rewrite: what to do first
    with the words between two tags.

    Raises TextError if there is nothing to say, and for tags that have no meaning here.
    """
    if limit < _SYLLABIC_WEIGHT:
        raise ValueError(f"the limit of a part must be {_SYLLABIC_WEIGHT} or more, not {limit}")
    if not isinstance(text, str):
        text = speakable(text)  # which raises
    sentences_of = _segmenter(language)
    parts: list[Part] = []
    pending: float | None = None  # seconds of the breaks since the last part
    for stretch in _stretches(text):
        if isinstance(stretch, float):
            pending = stretch + (pending or 0.0)
            continue
        for paragraph in _paragraphs(rewrite(stretch) if rewrite else stretch):
            words = harmless(paragraph)
            if not words:
                continue
            following = list(_pack(sentences_of(words), limit))
            glue = ""
            joint: Joint = "start"
            if parts:
                tight = pending is None and _HAN_OR_KANA.match(parts[-1].text[-1:])
                glue = "" if tight and _HAN_OR_KANA.match(words) else " "
                joint = "paragraph"
            if pending is not None:
                joint = "break"
            following[0] = following[0]._replace(glue=glue, joint=joint, break_s=pending or 0.0)
            parts += following
            pending = None
    if not any(part.spoken for part in parts):
        speakable(_BREAK.sub(" ", _SPEAK.sub(" ", text)))
        raise TextError("nothing to say in the text: nothing is left of it that has a sound")
    if pending is not None:
        parts.append(Part("", "", "break", pending, spoken=False))
    return tuple(parts)


def sentences(text: str, language: str = DEFAULT_LANGUAGE) -> list[str]:
    """Sentences of a cleaned text, without the spaces between them."""
    return [sentence for _, sentence in _segmenter(language)(text)]


def _paragraphs(text: str) -> Iterator[str]:
    """Stretches between blank lines, form feeds and paragraph separators.

    Gap by gap: one pattern for all of it would take quadratic time over a long run of spaces.
    """
    words, *rest = _GAP.split(text)
    current = [words]
    for gap, word in zip(rest[::2], rest[1::2], strict=True):
        if len(_LINE_BREAK.findall(gap)) > 1 or _PARAGRAPH_END.search(gap):
            yield "".join(current)
            current = [word]
        else:
            current += [gap, word]
    yield "".join(current)


# ---------------------------------------------------------------------- tags


def _stretches(text: str) -> Iterator[str | float]:
    """The text without its tags, and in its place the seconds of each break."""
    bare = _SPEAK.sub(" ", text)
    is_ssml = bare != text
    tag = _OTHER_TAG.search(bare)
    if tag is not None:
        raise TextError(
            f"the tag {tag[0]} has no effect in this model, so the text was refused: take it out;"
            ' of SSML, only <break time="800ms"/> is known (ssml-unsupported)'
        )
    at = 0
    for match in _BREAK.finditer(bare):
        yield _entities(bare[at : match.start()]) if is_ssml else bare[at : match.start()]
        yield _break_seconds(match)
        at = match.end()
    yield _entities(bare[at:]) if is_ssml else bare[at:]


def _entities(text: str) -> str:
    """XML's own five entities as the characters they stand for."""
    return re.sub(r"&(?:amp|lt|gt|quot|apos);", lambda match: unescape(match[0]), text)


def _break_seconds(tag: re.Match[str]) -> float:
    time = _TIME.search(tag[1])
    wanted = _SECONDS.fullmatch(time[2].strip()) if time else None
    if wanted is None:
        raise TextError(
            f'the pause {tag[0]} has no length: write it as <break time="800ms"/> or'
            ' <break time="1.5s"/> (ssml-unsupported)'
        )
    seconds = float(wanted[1]) / (1000 if wanted[2].lower() == "ms" else 1)
    if seconds > LONGEST_BREAK_S:
        raise TextError(f"the pause {tag[0]} is too long: at most {LONGEST_BREAK_S:.0f} s")
    return seconds


# ---------------------------------------------------------------------- sentences


def sentence_ends(text: str, language: str = DEFAULT_LANGUAGE) -> list[int]:
    """Where sentences end in a text: indices behind their last characters."""
    from sentencex import segment

    code = re.split(r"[-_]", language.lower())[0] or DEFAULT_LANGUAGE
    ends = _sentence_ends(text, lambda block: segment(code, block))
    return [end for end in ends if _may_end(text, end)]


def _segmenter(language: str) -> Callable[[str], list[tuple[str, str]]]:
    """A function from a cleaned text to its sentences, each with the space or nothing before it."""

    def sentences_of(text: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        begin = 0
        for end in sentence_ends(text, language):
            found.append(_cut_out(text, begin, end))
            begin = end
        if begin < len(text):
            found.append(_cut_out(text, begin, len(text)))
        return found

    return sentences_of


def _sentence_ends(text: str, segment: Callable[[str], Iterable[str]]) -> Iterator[int]:
    """Where sentences end, block by block: releases of the library in pure Python, which are all
    there is for some systems, take quadratic time over a long text."""
    at = 0
    while at < len(text):
        block = text[at : at + _BLOCK]
        ends, end = [], 0
        for segment_ in segment(block):
            # Some releases keep the space behind a sentence and some drop it.
            sentence = segment_.strip()
            end = block.index(sentence, end) + len(sentence)
            if sentence:
                ends.append(at + end)
        if at + _BLOCK < len(text):
            ends = ends[:-1]  # may be only a beginning: the next block starts with it
        yield from ends
        at = ends[-1] if ends and at + _BLOCK < len(text) else at + _BLOCK


def _may_end(text: str, at: int) -> bool:
    """Whether a sentence may end at `at`: before a space, or behind a mark that needs none."""
    return at >= len(text) or text[at] == " " or text[at - 1] in _CJK_END


def _cut_out(text: str, begin: int, end: int) -> tuple[str, str]:
    """`text[begin:end]` and the space before it, which is one at most."""
    cut = text[begin:end]
    sentence = cut.lstrip(" ")
    return (" " if begin and sentence != cut else ""), sentence


# ---------------------------------------------------------------------- packing


def _pack(sentences: Sequence[tuple[str, str]], limit: int) -> Iterator[Part]:
    """Sentences side by side while they fit, too long ones in several parts."""
    current: Part | None = None
    for glue, sentence in sentences:
        if current is not None and weight(current.text + glue + sentence) <= limit:
            current = _part(current.text + glue + sentence, current.glue, current.joint)
            continue
        joint: Joint = "start" if current is None else "sentence"
        for cut_glue, cut_joint, piece in _cut_sentence(sentence, limit):
            if current is not None:
                yield current
            current = _part(piece, cut_glue or glue, cut_joint or joint)
            glue, joint = "", "word"
    if current is not None:
        yield current


def _part(text: str, glue: str, joint: Joint) -> Part:
    spoken = any(unicodedata.category(c)[0] in "LN" for c in text)
    return Part(text, glue, joint, 0.0, spoken)


def _cut_sentence(sentence: str, limit: int) -> Iterator[tuple[str, Joint | None, str]]:
    """Pieces of a sentence with the space or nothing and the joint before each; for the first
    both are open."""
    glue: str = ""
    joint: Joint | None = None
    total = weight(sentence)
    while total > limit:
        # No more than this many characters fit, so a look at them is enough.
        cut, following = _best_cut(sentence[: limit + 1], total, limit)
        yield glue, joint, sentence[:cut]
        rest = sentence[cut:].lstrip(" ")
        glue, joint = sentence[cut : len(sentence) - len(rest)], following
        total -= weight(sentence[:cut] + glue)
        sentence = rest
    yield glue, joint, sentence


def _best_cut(sentence: str, total: int, limit: int) -> tuple[int, Joint]:
    """Where to cut a sentence of the weight `total`, more than `limit`, and what that place is.
    Its beginning is enough.

    Pieces of about equal length sound better than a long one and a remnant, so the cut nearest to
    that is taken: behind a comma or its like, else at a space, else inside the word.
    """
    weights = _weights(sentence)
    furthest = sum(1 for w in weights if w <= limit)
    even = total / -(-total // limit)

    def nearest(cuts: Iterable[int], least: float) -> int | None:
        fitting = [cut for cut in cuts if cut <= furthest and weights[cut - 1] >= least]
        return min(fitting, key=lambda cut: abs(weights[cut - 1] - even), default=None)

    phrase = nearest((m.end() for m in _PHRASE_END.finditer(sentence)), _LEAST_PART * limit)
    if phrase is not None:
        return phrase, "phrase"
    space = nearest((i for i, c in enumerate(sentence) if c == " " and i), 0)
    if space is not None:
        return space, "phrase"
    # A mark belongs to the letter before it.
    cut = furthest
    while cut > 1 and unicodedata.category(sentence[cut])[0] == "M":
        cut -= 1
    return (furthest if cut == 1 else cut), "word"


def _weights(text: str) -> list[int]:
    """Weight of every beginning of `text`, from one character on."""
    total, weights = 0, []
    for character in text:
        total += weight(character)
        weights.append(total)
    return weights
