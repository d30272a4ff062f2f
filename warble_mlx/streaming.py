"""Speech while it is made: chunk by chunk, for a loop or for an event loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from warble_mlx.errors import SickError, WarbleError
from warble_mlx.reading import Chunk, Piece, Progress, Reading
from warble_mlx.results import Speech, Timings


class Stream(Iterator[Chunk]):
    """Chunks of a speech while it is generated. `speech` is there after the last one.

    Closing it, or leaving its `with` block, stops the generation within a frame.
    """

    def __init__(self, reading: Reading, model: str, sample_rate: int, keep_samples: bool) -> None:
        self._reading = reading
        self._model, self._sample_rate = model, sample_rate
        self._kept: list[npt.NDArray[np.float32]] | None = [] if keep_samples else None
        self._chunks = reading.chunks()
        self._is_closed = False
        self._speech: Speech | None = None

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            if isinstance(error, SickError):
                error.warnings = self._reading.plan.warnings
            self._is_closed = True  # a generator that has raised looks like one at its end
            raise
        if chunk is None:
            if self._speech is None and not self._is_closed:
                self._speech = self._whole()
            raise StopIteration
        if self._kept is not None:
            self._kept.append(chunk.samples)
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating. `speech` stays unavailable unless the stream had ended."""
        self._is_closed = True
        self._chunks.close()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of the text that are finished. One is here before the chunk after it is."""
        return tuple(self._reading.pieces)

    @property
    def progress(self) -> Progress:
        """What `Warble.perform` needs to go on behind the last of `pieces`."""
        return self._reading.progress

    @property
    def speech(self) -> Speech:
        """The whole speech; raises WarbleError before the stream has ended.

        Its `samples` are empty unless the stream was made with keep_samples.
        """
        if self._speech is None:
            raise WarbleError("the stream has not ended: iterate over it first")
        return self._speech

    def _whole(self) -> Speech:
        reading, plan = self._reading, self._reading.plan
        total_s, codec_s = reading.total_s, reading.codec_s
        kept = self._kept
        return Speech(
            samples=np.concatenate(kept) if kept else np.zeros(0, np.float32),
            sample_rate=self._sample_rate,
            codes=reading.all_codes,
            finish_reason=reading.finish_reason,
            seed=reading.pieces[0].seed if len(reading.pieces) == 1 else plan.seed,
            text=plan.text,
            voice=plan.voice,
            model=self._model,
            timings=Timings(reading.first_audio_s, total_s - codec_s, codec_s, total_s),
            warnings=plan.warnings,
            retries=reading.retries,
            pieces=tuple(reading.pieces),
            streamed=None if kept is not None else reading.position,
        )
