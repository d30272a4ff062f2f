"""Text and voice to token columns, as the model was trained to read them.

Every part of the prompt is tokenised on its own (joined tokenisation would merge across the
borders) and the ids are concatenated. A column is eleven integers: a text or semantic id, then
ten codes, which are zero at text positions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from warble_mlx.config import ModelConfig, read_config_json
from warble_mlx.errors import CheckpointError, TextError, VoiceError
from warble_mlx.text import disarm, fold_whitespace, plain_punctuation, speakable

Columns = npt.NDArray[np.int32]

SYSTEM = "<|im_start|>system\n"
PLAIN = "convert the provided text to speech"
CLONE = "convert the provided text to speech reference to the following:\n\nText:\n"
SPEECH = "\n\nSpeech:\n"
END = "<|im_end|>\n"
USER = "<|im_start|>user\n"
ASSISTANT = "<|im_start|>assistant\n<|voice|>"
ANY_SPEAKER = "<|speaker:0|>"
_SPEAKER = re.compile(r"<\|speaker:\d+\|>")


class Reference(NamedTuple):
    """A voice to continue: what was said, and its codes, int [10, frames]."""

    text: str
    codes: npt.NDArray[np.integer]


class Prompt(NamedTuple):
    """Columns [11, T] in two parts: `prefix` depends on the voice alone, so its KV can be kept."""

    prefix: Columns
    target: Columns

    @property
    def columns(self) -> Columns:
        return np.concatenate([self.prefix, self.target], axis=1)


class PromptBuilder:
    """Builds prompts for one tokenizer and one set of special ids.

    plain_punctuation: the model was trained on text without typographic marks, so it gets none.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, *, plain_punctuation: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._plain_punctuation = plain_punctuation
        self._config = config
        # Added tokens that `disarm` does not know by their looks: `<think>` and the like.
        added = (t.content for t in tokenizer.get_added_tokens_decoder().values())
        rest = sorted((t for t in added if disarm(t) == t), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, rest)) or r"(?!)")
        semantic = range(config.semantic_begin_id, config.semantic_end_id + 1)
        self._control = {*tokenizer.get_added_tokens_decoder(), *semantic, config.eos_token_id}

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> PromptBuilder:
        """Read `folder`/tokenizer.json and check that its special ids are the config's."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json; copy it from the source model")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path} is no tokenizer: {error}") from error
        expected = {
            "<|im_end|>": config.eos_token_id,
            "<|semantic:0|>": config.semantic_begin_id,
            f"<|semantic:{config.codebook_size - 1}|>": config.semantic_end_id,
        }
        for token, wanted in expected.items():
            found = tokenizer.token_to_id(token)
            # The bundled tokenizer carries no semantic tokens: their ids are never typed.
            if found != wanted and not (found is None and token.startswith("<|semantic")):
                raise CheckpointError(
                    f"{path}: {token} has id {found}, but config.json says {wanted}"
                )
        generation = read_config_json(folder).get("generation", {})
        plain = generation.get("plain_punctuation", False)
        return cls(tokenizer, config, plain_punctuation=plain)

    def build(
        self,
        text: str,
        *,
        speaker: str = "",
        reference: Reference | None = None,
        exact: bool = False,
    ) -> Prompt:
        """Columns for `text`, spoken by the voice token `speaker` or like `reference`.

        User text and transcript are cleaned and disarmed, whatever they contain. `exact` is for
        parity with the reference only: it folds white space and lets typed control tokens act.

        Raises TextError (nothing to say) and VoiceError (codes of a wrong shape or range, no
        transcript).
        """
        if exact:
            target = fold_whitespace(text)
            if not target:
                raise TextError("nothing to say in the text: it is empty")
            spoken = self._ids(speaker + target)
        else:
            spoken = self._harmless_ids(speakable(text), speaker)
        if reference is None:
            prefix = self._text_columns(
                self._ids(SYSTEM) + self._ids(PLAIN) + self._ids(END) + self._ids(USER)
            )
        else:
            prefix = self._reference_columns(reference, exact)
        return Prompt(prefix, self._text_columns(spoken + self._ids(END) + self._ids(ASSISTANT)))

    def _reference_columns(self, reference: Reference, exact: bool) -> Columns:
        c = self._config
        codes = np.asarray(reference.codes)
        if codes.ndim != 2 or codes.shape[0] != c.num_codebooks or codes.shape[1] == 0:
            raise VoiceError(
                f"reference codes have shape {list(codes.shape)}, not [{c.num_codebooks}, frames]"
            )
        if codes.min() < 0 or codes.max() >= c.codebook_size:
            raise VoiceError(
                f"reference codes lie in {codes.min()}..{codes.max()},"
                f" but this model knows 0..{c.codebook_size - 1}"
            )
        if not reference.text:
            raise VoiceError("a reference clip needs its transcript")
        if exact:
            text = fold_whitespace(reference.text)
            said = self._ids(text if _SPEAKER.search(text) else ANY_SPEAKER + text)
        else:
            said = self._harmless_ids(speakable(reference.text, "transcript"), ANY_SPEAKER)
        before = self._ids(SYSTEM) + self._ids(CLONE) + said + self._ids(SPEECH)
        frames = np.concatenate([codes[:1] + c.semantic_begin_id, codes]).astype(np.int32)
        after = self._ids(END) + self._ids(USER)
        return np.concatenate(
            [self._text_columns(before), frames, self._text_columns(after)], axis=1
        )

    def _text_columns(self, ids: list[int]) -> Columns:
        columns = np.zeros((self._config.num_codebooks + 1, len(ids)), np.int32)
        columns[0] = ids
        return columns

    def _ids(self, text: str) -> list[int]:
        """Token ids of one part; control tokens in it act."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _harmless_ids(self, text: str, speaker: str) -> list[int]:
        """Token ids of disarmed user text behind the caller's own speaker tag.

        The text is cut inside every added token that is left, so that the tokenizer cannot
        match one. The tag stays whole and is tokenised together with the first words: to a
        published tokenizer it is plain text whose end merges with them.
        """
        if self._plain_punctuation:
            # Disarmed once more: without its quotes a text may hold a control token.
            text = speakable(plain_punctuation(text))
        pieces, at = [], 0
        for match in self._added.finditer(text):
            pieces.append(text[at : match.start() + 1])
            at = match.start() + 1
        pieces.append(text[at:])
        pieces[0] = speaker + pieces[0]
        ids = [i for piece in pieces for i in self._ids(piece)]
        wanted = self._control_ids(self._ids(speaker))
        if self._control_ids(ids) == wanted:
            return ids
        # The tokenizer's own normalisation has made a control token of something else. Single
        # characters cannot be one.
        ids = self._ids(speaker) + [i for character in text for i in self._ids(character)]
        if self._control_ids(ids) != wanted:
            raise TextError("the text holds a character that this tokenizer reads as control")
        return ids

    def _control_ids(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._control]
