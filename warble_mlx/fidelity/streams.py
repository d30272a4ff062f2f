"""Token streams that a model makes of texts: what calibration and comparison are done on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from warble_mlx.engine import Engine, Request
from warble_mlx.errors import TextError
from warble_mlx.reading import utterance_frames
from warble_mlx.speech import Warble
from warble_mlx.text import speakable

ROWS = 8  # streams generated together


@dataclass(frozen=True)
class TokenStream:
    """A prompt and the frames that followed it."""

    prompt: npt.NDArray[np.int32]  # columns [11, T]
    codes: npt.NDArray[np.int32]  # [10, frames]
    ended: bool  # by EOS, not by its budget

    @property
    def frames(self) -> int:
        """Number of frames."""
        return int(self.codes.shape[1])

    @property
    def steps(self) -> int:
        """Choices of the slow AR: one per frame, and EOS."""
        return self.frames + self.ended

    def columns(self, semantic_begin_id: int) -> npt.NDArray[np.int32]:
        """Everything that the slow AR reads before its last choice, [11, T + steps - 1]."""
        codes = self.codes[:, : self.steps - 1]
        frames = np.concatenate([codes[:1] + semantic_begin_id, codes])
        return np.concatenate([self.prompt, frames], axis=1).astype(np.int32)


def read_texts(path: Path) -> list[str]:
    """The lines of a UTF-8 text file that hold something to say.

    Raises TextError if it cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise TextError(
            f"{path} cannot be read: {reason}. Give a text, a sentence a line"
        ) from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise TextError(f"{path} holds no text: give one sentence per line")
    for text in texts:
        speakable(text)
    return texts


def digest(texts: Iterable[str]) -> str:
    """SHA-256 of texts, in hexadecimal."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def requests_for(warble: Warble, texts: Sequence[str], seed: int) -> list[Request]:
    """One utterance per text at the model's own settings, its voices in turn; seeds count up."""
    tokens = [voice.token for voice in warble.voices] or [""]
    asked = []
    for i, text in enumerate(texts):
        prompt = warble._prompts.build(text, speaker=tokens[i % len(tokens)])
        length = prompt.columns.shape[1]
        frames = utterance_frames(warble.config, warble.default_max_frames, length, text)
        asked.append(Request(prompt, frames, warble.defaults, seed + i))
    return asked


def generate(engine: Engine, requests: Sequence[Request], rows: int = ROWS) -> list[TokenStream]:
    """The streams of all requests, in their order."""
    frames: list[list[npt.NDArray[np.int32]]] = [[] for _ in requests]
    ended = [False] * len(requests)
    for emission in engine.generate(requests, rows=min(rows, len(requests))):
        if emission.codes is not None:
            frames[emission.request].append(emission.codes)
        ended[emission.request] |= emission.finish_reason == "stop"
    books = engine.model.config.num_codebooks
    return [
        TokenStream(
            request.prompt.columns,
            np.array(own, np.int32).reshape(-1, books).T,
            over,
        )
        for request, own, over in zip(requests, frames, ended, strict=True)
    ]
