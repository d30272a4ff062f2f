"""Spoken audio on the training device; grows while the synthesis still writes shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samples.bundled_voice.audio import TRACK, source_samples, to_codec_rate
from samples.bundled_voice.kokoro import RATE
from samples.bundled_voice.progress import log
from samples.bundled_voice.settings import CLASSES, FRAME, PITCH_BINS

_STEP = 80  # samples at 24 kHz that 147 samples of the codec's rate take
PITCH_PER_FRAME = 2


class Pool:
    """All sentences one after another: int16 samples and the two tracks.

    start, length: where each sentence lies, in samples; line, speaker: what and who it is.
    """

    def __init__(self, folder: Path, device: torch.device, hours: float) -> None:
        self.folder, self.device = folder, device
        room = int(hours * 3600 * RATE) // TRACK * TRACK
        self.samples = torch.zeros(room, dtype=torch.int16, device=device)
        self.phone = torch.zeros(room // TRACK, dtype=torch.uint8, device=device)
        self.pitch = torch.zeros(room // TRACK, dtype=torch.uint8, device=device)
        self.seen: set[str] = set()
        self.fill, self.full = 0, False
        self.start = np.zeros(0, np.int64)
        self.length = np.zeros(0, np.int64)
        self.line = np.zeros(0, np.int64)
        self.speaker = np.zeros(0, np.int64)
        self.ends = np.zeros(0, np.int64)

    @property
    def hours(self) -> float:
        return self.fill / RATE / 3600

    def poll(self, most: int = 10**9) -> int:
        """Take in at most so many new shards; returns how many came."""
        ready = sorted(path.name for path in self.folder.glob("*[0-9].meta.npy"))
        fresh = [name for name in ready if name not in self.seen][:most]
        metas: list[np.ndarray] = []  # type: ignore[type-arg]
        for name in fresh:
            self.seen.add(name)
            parts = {
                kind: np.load(self.folder / name.replace(".meta.", f".{kind}."))
                for kind in ("meta", "pcm", "phone", "pitch")
            }
            count = len(parts["pcm"])
            if self.fill + count > len(self.samples):
                self.full = True
                break
            self.samples[self.fill : self.fill + count].copy_(torch.from_numpy(parts["pcm"]))
            tracks = slice(self.fill // TRACK, (self.fill + count) // TRACK)
            self.phone[tracks].copy_(torch.from_numpy(parts["phone"]))
            self.pitch[tracks].copy_(torch.from_numpy(parts["pitch"]))
            metas.append(parts["meta"])
            self.fill += count
        if metas:
            meta = np.concatenate(metas)
            self.length = np.concatenate([self.length, meta[:, 2]])
            self.line = np.concatenate([self.line, meta[:, 0]])
            self.speaker = np.concatenate([self.speaker, meta[:, 1]])
            self.ends = np.cumsum(self.length)
            self.start = self.ends - self.length
        return len(metas)

    def drawn(
        self, batch: int, frames: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Random stretches: samples [batch, frames * 2048] at 44.1 kHz, the share of each phoneme
        in each frame [batch, frames, CLASSES], and pitch bins [batch, frames * 2]."""
        needed = source_samples(frames * FRAME)
        which = np.searchsorted(self.ends, rng.integers(0, self.ends[-1], batch), side="right")
        length = self.length[which]
        room = np.maximum(1, (length - 0.8 * needed) // TRACK)
        offset = np.floor(rng.random(batch) * room).astype(np.int64) * TRACK
        offset = np.where(rng.random(batch) < 0.25, 0, np.minimum(offset, length - 8 * TRACK))
        begin = torch.from_numpy(self.start[which] + offset).to(self.device)[:, None]
        end = torch.from_numpy(self.start[which] + length).to(self.device)[:, None]
        sound = to_codec_rate(self.stretch(begin, end, needed))[:, : frames * FRAME]

        def track(values: Tensor, per_frame: int) -> Tensor:
            moment = torch.arange(frames * per_frame, device=self.device) + 0.5
            step = (moment * (FRAME / per_frame * _STEP / 147 / TRACK)).long()
            where = begin // TRACK + step
            inside = where < end // TRACK
            return values[where.clamp_max(len(values) - 1)].long() * inside

        phones = track(self.phone, 4).view(batch, frames, 4, 1)
        every = torch.arange(CLASSES, device=self.device)
        share = (phones == every).float().mean(2)
        return sound, share, track(self.pitch, PITCH_PER_FRAME).clamp_max(PITCH_BINS - 1)

    def stretch(self, begin: Tensor, end: Tensor, count: int) -> Tensor:
        """Samples from begin [batch, 1], silence from end on: [batch, count] float32."""
        where = begin + torch.arange(count, device=self.device)
        found = self.samples[where.clamp_max(len(self.samples) - 1)]
        return found.float() * (where < end) / 32768.0

    def report(self) -> None:
        five = {number: int((self.speaker == number).sum()) for number in range(1, 6)}
        log(f"pool {self.hours:.2f} h, {len(self.line)} sentences, by voice {five}")
