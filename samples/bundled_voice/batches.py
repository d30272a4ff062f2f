"""Rows of token ids and codes that the DualAR learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samples.bundled_voice import prompts
from samples.bundled_voice.casting import DEFAULT_VOICE, FIRST_PASSING
from samples.bundled_voice.settings import Settings

_IGNORED = -100
_WITHOUT_TAG = 0.4  # of the default voice's lines
_WITH_REFERENCE = 0.12  # of the characters' lines; passing speakers always have one
_ROUGH = 0.5  # of the references of passing speakers
_CORRUPTED = 0.75  # of the rows have some wrong input codes, against exposure bias
_LONGEST_REFERENCE = 190  # frames
Ints = npt.NDArray[np.int64]


@dataclass
class Spoken:
    """Encoded sentences: codes [books, frames], first and last frame, text tokens, speaker, the
    line of the corpus, and whether it is a rough take."""

    codes: npt.NDArray[np.int16]
    first: Ints
    last: Ints
    text: list[npt.NDArray[np.int64]]
    speaker: Ints
    line: Ints
    rough: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, path: Any, texts: list[str]) -> Spoken:
        with np.load(path) as stored:
            codes, ends = stored["codes"], stored["ends"]
            line, speaker, rough = stored["line"], stored["speaker"], stored["rough"]
        tokens = {
            int(index): np.array(prompts.encoded(" ".join(texts[index].split())), np.int64)
            for index in np.unique(line)
        }
        first = np.concatenate([[0], ends[:-1]])
        text = [tokens[int(index)] for index in line]
        return cls(codes, first, ends, text, speaker, line, rough)

    def frames(self, index: int) -> npt.NDArray[np.int16]:
        """Codes of one sentence, [frames, books]."""
        return self.codes[:, self.first[index] : self.last[index]].T


@dataclass
class Batch:
    """ids, targets [rows, length]; codes [rows, length, books]; where [n] counts the positions
    that predict a frame in the flattened rows, and frame_codes [n, books] are those frames."""

    ids: Tensor
    codes: Tensor
    targets: Tensor
    where: Tensor
    frame_codes: Tensor

    def pin_memory(self) -> Batch:
        """The same in memory that a GPU can fetch by itself; called by the loader."""
        return Batch(*(getattr(self, part.name).pin_memory() for part in fields(self)))


class Rows(torch.utils.data.IterableDataset[Batch]):
    """Endless batches of rows of nearly the same length; every worker draws its own.

    held_out: of the characters' sentences that the training leaves out, instead of the others.
    """

    def __init__(
        self, settings: Settings, spoken: Spoken, seed: int = 1000, *, held_out: bool = False
    ) -> None:
        self.settings, self.spoken, self.seed = settings, spoken, seed
        left_out = spoken.line % settings.ar_held_out == settings.ar_held_out - 1
        if held_out:
            left_out &= spoken.speaker < FIRST_PASSING
            short = spoken.last - spoken.first <= _LONGEST_REFERENCE
            self.own = np.flatnonzero(left_out & short)
        else:
            self.own = np.flatnonzero(~left_out & ~spoken.rough)
        self.same, self.rough = self._by_speaker(~spoken.rough), self._by_speaker(spoken.rough)

    def _by_speaker(self, among: npt.NDArray[np.bool_]) -> dict[int, Ints]:
        """Sentences of each speaker that are of a length to serve as reference."""
        length = self.spoken.last - self.spoken.first
        usable = np.flatnonzero(among & (length >= 20) & (length <= _LONGEST_REFERENCE))
        if not len(usable):
            return {}
        order = usable[np.argsort(self.spoken.speaker[usable], kind="stable")]
        speakers, begin = np.unique(self.spoken.speaker[order], return_index=True)
        return {
            int(who): own for who, own in zip(speakers, np.split(order, begin[1:]), strict=True)
        }

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(self.seed + (worker.id if worker else 0))
        lengths = self.settings.ar_lengths
        waiting: dict[int, list[tuple[list[int], int, Ints | None]]] = {n: [] for n in lengths}
        while True:
            for index in rng.permutation(self.own):
                row = self.row(int(index), rng)
                if row is None:
                    continue
                before, reference = row
                total = len(before[0]) + len(before[1])
                total += 0 if reference is None else len(self.spoken.frames(reference))
                total += len(self.spoken.frames(int(index)))
                length = next((n for n in lengths if total <= n), None)
                if length is None:
                    continue
                waiting[length].append((before, int(index), reference))  # type: ignore[arg-type]
                if len(waiting[length]) == max(1, self.settings.ar_tokens // length):
                    yield self.made(waiting[length], length, rng)  # type: ignore[arg-type]
                    waiting[length] = []

    def row(
        self, index: int, rng: np.random.Generator
    ) -> tuple[tuple[list[int], list[int]], int | None] | None:
        """Tokens before and after the reference (the second alone where there is none), and the
        reference sentence; None where a passing speaker has said nothing else."""
        who = int(self.spoken.speaker[index])
        passing = who >= FIRST_PASSING
        text = self.varied(self.spoken.text[index], rng)
        if passing or rng.random() < _WITH_REFERENCE:
            pool = self.rough if passing and rng.random() < _ROUGH else self.same
            others = pool.get(who, np.zeros(0, np.int64))
            if len(others) < 64:
                # Nor another take of it, which would say how to say it.
                others = others[self.spoken.line[others] != self.spoken.line[index]]
            if len(others):
                reference = int(rng.choice(others))
                if self.spoken.line[reference] != self.spoken.line[index]:
                    before = prompts.before_speech(self.spoken.text[reference].tolist())
                    return (before, prompts.after_speech(text)), reference
            if passing:
                return None
        silent = who == DEFAULT_VOICE and rng.random() < _WITHOUT_TAG
        return ([], prompts.plain(text, None if silent else who)), None

    @staticmethod
    def varied(text: npt.NDArray[np.int64], rng: np.random.Generator) -> list[int]:
        """Now and then without the full stop, as people type."""
        own = text.tolist()
        if rng.random() < 0.06 and own[-1:] == prompts.encoded("."):
            own = own[:-1]
        return own

    def made(
        self,
        rows: list[tuple[tuple[list[int], list[int]], int, int | None]],
        length: int,
        rng: np.random.Generator,
    ) -> Batch:
        config = self.settings.config
        books, first = config["num_codebooks"], config["semantic_begin_id"]
        ids = np.full((len(rows), length), config["pad_token_id"], np.int64)
        codes = np.zeros((len(rows), length, books), np.int64)
        targets = np.full((len(rows), length), _IGNORED, np.int64)
        where, wanted = [], []
        for i, ((before, after), index, reference) in enumerate(rows):
            at = len(before)
            ids[i, :at] = before
            if reference is not None:
                heard = self.spoken.frames(reference).astype(np.int64)
                ids[i, at : at + len(heard)] = first + heard[:, 0]
                codes[i, at : at + len(heard)] = heard
                at += len(heard)
            ids[i, at : at + len(after)] = after
            at += len(after)
            frames = self.spoken.frames(index).astype(np.int64)
            given = self.corrupted(frames, rng)
            count = len(frames)
            ids[i, at : at + count] = first + given[:, 0]
            codes[i, at : at + count] = given
            targets[i, at - 1 : at - 1 + count] = first + frames[:, 0]
            targets[i, at - 1 + count] = config["eos_token_id"]
            where.append(i * length + np.arange(at - 1, at - 1 + count))
            wanted.append(frames)
        return Batch(
            *(torch.from_numpy(part) for part in (ids, codes, targets)),
            torch.from_numpy(np.concatenate(where)),
            torch.from_numpy(np.concatenate(wanted)),
        )

    def corrupted(self, frames: Ints, rng: np.random.Generator) -> Ints:
        if rng.random() >= _CORRUPTED:
            return frames
        wrong = rng.random(frames.shape) < rng.choice([0.02, 0.05, 0.1, 0.2])
        wrong[:, 0] &= rng.random(len(frames)) < 0.5
        config = self.settings.config
        noise = rng.integers(0, config["codec_residual_codebook_size"], frames.shape)
        noise[:, 0] = rng.integers(0, config["codec_semantic_codebook_size"], len(frames))
        return np.where(wrong, noise, frames)
