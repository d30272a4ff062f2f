"""Text, and a voice's transcript and codes, to packed columns."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from warble_mlx.config import ModelConfig

SPEAKER = re.compile(r"<\|speaker:\d+\|>")
OPENING = "<|im_start|>system\n"
PLAIN = "convert the provided text to speech"
VOICED = "convert the provided text to speech reference to the following:\n\nText:\n"
BETWEEN = ("<|im_end|>\n", "<|im_start|>user\n")
CLOSING = ("<|im_end|>\n", "<|im_start|>assistant\n<|voice|>")


class Prompts:
    """Prompts for one checkpoint's tokenizer and ids."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = config

    def build(
        self, text: str, reference_text: str | None = None, codes: Tensor | None = None
    ) -> Tensor:
        """Columns [11, T] for `text`, after the voice of `codes` [10, F] that says
        `reference_text` if both are given. Every part is tokenised on its own."""
        target = " ".join(text.split())
        if reference_text is None or codes is None:
            return self._columns(OPENING, PLAIN, *BETWEEN, target, *CLOSING)
        said = " ".join(reference_text.split())
        said = said if SPEAKER.search(said) else f"<|speaker:0|>{said}"
        before = self._columns(OPENING, VOICED, said, "\n\nSpeech:\n")
        frames = torch.cat([codes[:1] + self._config.semantic_begin_id, codes])
        return torch.cat([before, frames, self._columns(*BETWEEN, target, *CLOSING)], dim=1)

    def _columns(self, *parts: str) -> Tensor:
        ids = [i for p in parts for i in self._tokenizer.encode(p, add_special_tokens=False).ids]
        columns = torch.zeros(self._config.num_codebooks + 1, len(ids), dtype=torch.long)
        columns[0] = torch.tensor(ids)
        return columns
