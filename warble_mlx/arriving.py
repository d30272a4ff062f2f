"""Text that arrives bit by bit, as a language model writes it, cut into what can be spoken."""

from __future__ import annotations

import re

from warble_mlx.splitting import DEFAULT_LANGUAGE, sentence_ends

_LINE_END = re.compile(r"[\r\n]+")
_LONGEST = 2000  # characters that may stand without the end of a sentence
_SAYS_SOMETHING = re.compile(r"\w")


class ArrivingText:
    """Hands out lines, and of an unfinished line the sentences that another one has followed.

    language: code of the text's language, for the rules of its sentences.
    """

    def __init__(self, language: str = DEFAULT_LANGUAGE) -> None:
        self._language = language or DEFAULT_LANGUAGE
        self._rest = ""

    def add(self, text: str) -> list[str]:
        """What can be spoken now that `text` has come, in order."""
        *lines, self._rest = _LINE_END.split(self._rest + text)
        done = [line for line in lines if _SAYS_SOMETHING.search(line)]
        # The last sentence may go on: "3." is followed by "5" as often as by a space.
        ends = sentence_ends(self._rest.rstrip(), self._language)[:-1]
        if ends and _SAYS_SOMETHING.search(self._rest[: ends[-1]]):
            done.append(self._rest[: ends[-1]])
            self._rest = self._rest[ends[-1] :]
        if len(self._rest) > _LONGEST:
            done += self.finish()
        return [text.strip() for text in done]

    def finish(self) -> list[str]:
        """What is left when no more will come."""
        rest, self._rest = self._rest.strip(), ""
        return [rest] if _SAYS_SOMETHING.search(rest) else []
