"""Text and reference prompts as token ids: one token per byte, a token per speaker tag.

The parts and their order are those of the runtime's prompt; tests hold the two together.
"""

from __future__ import annotations

from samples.bundled_voice.settings import FIRST_SPECIAL, SPECIAL_TOKENS

SYSTEM = "convert the provided text to speech"
REFERENCE = "convert the provided text to speech reference to the following:\n\nText:\n"


def byte_order() -> list[int]:
    """Bytes in the order of their ids: those with a printable stand-in of their own come first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [value for value in range(256) if value not in printable]


_IDS = {value: number for number, value in enumerate(byte_order())}


def special(token: str) -> int:
    return FIRST_SPECIAL + SPECIAL_TOKENS.index(token)


START, END, VOICE = special("<|im_start|>"), special("<|im_end|>"), special("<|voice|>")


def speaker(number: int) -> int:
    return special(f"<|speaker:{number}|>")


def encoded(text: str) -> list[int]:
    return [_IDS[value] for value in text.encode("utf-8")]


_LINE_END = encoded("\n")
HEAD = [START, *encoded("system\n"), *encoded(SYSTEM), END, *_LINE_END, START, *encoded("user\n")]
TAIL = [END, *_LINE_END, START, *encoded("assistant\n"), VOICE]
_BEFORE_REFERENCE = [START, *encoded("system\n"), *encoded(REFERENCE), speaker(0)]
_BEFORE_SPEECH = encoded("\n\nSpeech:\n")
_AFTER_SPEECH = [END, *_LINE_END, START, *encoded("user\n")]


def plain(text: list[int], voice: int | None) -> list[int]:
    """A prompt without reference; voice: the tag in front of the text, or none."""
    return [*HEAD, *([speaker(voice)] if voice else []), *text, *TAIL]


def before_speech(reference: list[int]) -> list[int]:
    """What stands before the frames of a reference."""
    return [*_BEFORE_REFERENCE, *reference, *_BEFORE_SPEECH]


def after_speech(text: list[int]) -> list[int]:
    """What stands after them."""
    return [*_AFTER_SPEECH, *text, *TAIL]
