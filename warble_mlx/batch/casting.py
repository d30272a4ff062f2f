"""From a row to a plan: its voice, its seed, and the options it leaves to the command line."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from warble_mlx import __version__
from warble_mlx.batch.ledger import file_digest
from warble_mlx.batch.rows import Numbered, Row
from warble_mlx.clips import prepare_clip
from warble_mlx.narration import wanted_of
from warble_mlx.options import DEFAULT_PAUSE_S
from warble_mlx.reading import Plan
from warble_mlx.registered import SUFFIX, RegisteredVoice, read_voice
from warble_mlx.speech import Warble

# Written out, so that leaving an option out and giving its usual value are one and the same.
_USUAL: Mapping[str, Any] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "greedy": False,
    "max_seconds": None,
    "retry": 0,
    "normalise": False,
    "pause_s": DEFAULT_PAUSE_S,
}
KEPT_VOICES = 64  # encoded clips, the least recently used goes first


class Casting:
    """Turns rows into plans for one model. Clips are encoded once while they stay in use.

    defaults: options of `Warble.say` for rows that do not have them; `seed` among them is what
    the seeds of rows without one follow from. folder: where relative paths begin.
    """

    def __init__(self, warble: Warble, defaults: Mapping[str, Any], folder: Path) -> None:
        self._warble = warble
        self._defaults = {**_USUAL, **defaults}
        self._base = int(self._defaults.pop("seed", 0))
        self._voice = self._defaults.pop("voice", None)
        self._folder = folder
        self._clips: OrderedDict[tuple[Path, str], RegisteredVoice] = OrderedDict()
        self._heard: dict[tuple[Path, str], tuple[str, ...]] = {}
        self._digests: dict[Path, str] = {}

    def check(self, numbered: Numbered) -> None:
        """Raise WarbleError if the row cannot be spoken. Its clip is read, but not encoded."""
        row = numbered.row
        clip = self._clip(row)
        if clip is None:
            self.plan(numbered)
            return
        self._check_clip(*clip)
        # Everything but the clip.
        self._warble.plan(row.text, **self._options(numbered))

    def plan(self, numbered: Numbered) -> Plan:
        """The row's plan; encodes its clip if it has one."""
        row = numbered.row
        clip = self._clip(row)
        voice: Any = self._encoded(*clip) if clip else self._named(row)
        return self._warble.plan(row.text, voice=voice, **self._options(numbered))

    def digest(self, numbered: Numbered) -> str:
        """SHA-256 of all that decides on the row's samples, without encoding a clip."""
        row = numbered.row
        clip = self._clip(row)
        if clip is None:
            voice: object = self._identity(self._named(row))
        else:
            path, words = clip
            if path not in self._digests:
                self._digests[path] = file_digest(path)
            voice = ["clip", self._digests[path], words]
        facts = [__version__, self._model, row.text, voice, self._options(numbered)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def doubts(self, row: Row) -> tuple[str, ...]:
        """What may spoil the voice of the row's clip, in sentences."""
        clip = self._clip(row)
        return () if clip is None else self._heard.get(clip, ())

    @cached_property
    def _model(self) -> str:
        # What the model is does not depend on the plan.
        return str(wanted_of(self._warble, self._warble.plan("a"))["model"])

    def _options(self, numbered: Numbered) -> dict[str, Any]:
        row = numbered.row
        own = {
            "temperature": row.temperature,
            "top_p": row.top_p,
            "top_k": row.top_k,
            "greedy": row.greedy,
            "max_seconds": row.max_seconds,
            "retry": row.retry,
            "normalise": row.normalise,
            "pause_s": row.pause,
        }
        given = {name: value for name, value in own.items() if value is not None}
        return {**self._defaults, **given, "seed": self._seed(numbered)}

    def _seed(self, numbered: Numbered) -> int:
        """The row's own, or one that follows from its id: the same in every run, on any machine."""
        if numbered.row.seed is not None:
            return numbered.row.seed
        raw = f"{self._base} {numbered.id}".encode()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=4).digest(), "little")

    def _clip(self, row: Row) -> tuple[Path, str] | None:
        if row.reference_audio is None or row.reference_text is None:
            return None
        return self._folder / row.reference_audio, row.reference_text

    def _named(self, row: Row) -> str | int | Path | None:
        voice = self._voice if row.voice is None else row.voice
        is_file = isinstance(voice, str) and voice.endswith(SUFFIX)
        return self._folder / str(voice) if is_file else voice

    def _identity(self, voice: str | int | Path | None) -> object:
        """What tells one voice from another, for a digest."""
        if isinstance(voice, Path):
            found = read_voice(voice)
            codes = np.ascontiguousarray(found.codes).tobytes()
            return ["file", found.transcript, hashlib.sha256(codes).hexdigest()]
        plan = self._warble.plan("a", voice=voice, seed=0)
        if plan.reference is None:
            return ["own", plan.speaker]
        codes = np.ascontiguousarray(plan.reference.codes).tobytes()
        return ["registered", plan.reference.text, hashlib.sha256(codes).hexdigest()]

    def _check_clip(self, path: Path, words: str) -> None:
        if (path, words) not in self._heard:
            self._heard[path, words] = prepare_clip(path, words)[2].warnings

    def _encoded(self, path: Path, words: str) -> RegisteredVoice:
        key = path, words
        if key not in self._clips:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._clips[key] = self._warble.register(path, words)
            self._heard[key] = self._clips[key].warnings
            while len(self._clips) > KEPT_VOICES:
                self._clips.popitem(last=False)
        self._clips.move_to_end(key)
        return self._clips[key]
