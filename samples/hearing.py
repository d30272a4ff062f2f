"""Speak utterances and let the recogniser of tests/ear read them: side by side, in processes.

    utterances ──next──► processes ──rows of an Ensemble──► Said ──Whisper──► rows, as they come

Several utterances step together, which costs a CPU a third of the time of one after the other and
changes no token. A process takes the next utterance when it has a row for it, so that all of them
end together, however fast each core is and however long each voice speaks. A `Journal` keeps every
result as it comes, so that a run goes on after a stop.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from warble_mlx import Warble, WarbleError, load
from warble_mlx.ensemble import Ensemble, Event
from warble_mlx.errors import SickError
from warble_mlx.reading import Reading

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from ear.recogniser import Recogniser
from ear.scoring import word_errors

ROWS = 8
# Each process has one core: threads of several would wait for each other.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Samples = npt.NDArray[np.float32]
Row = dict[str, Any]


class Utterance(NamedTuple):
    """What is to be said."""

    voice: str | int | None  # None: the default voice without naming it
    seed: int
    text: str


class Said(NamedTuple):
    """What was said. What the runtime drops as no speech counts as silence that did not end."""

    utterance: Utterance
    samples: Samples  # float32 [n]
    rate_hz: int
    finish_reason: str  # stop, length, or the reason of a SickError
    codes: int  # CRC-32 of the tokens


def speak(
    warble: Warble, utterances: Iterable[Utterance], rows: int = ROWS, **options: Any
) -> Iterator[Said]:
    """Say every utterance, `rows` of them at a time, with options of `Warble.say`; in the order
    in which they end. An utterance is taken when there is room for it. Raises WarbleError for what
    cannot be said."""
    ensemble = Ensemble(warble.engine, rows)
    waiting = iter(utterances)
    spoken: dict[Reading, tuple[Utterance, list[Samples]]] = {}

    def ended(events: Iterable[Event]) -> Iterator[Said]:
        for event in events:
            utterance, samples = spoken[event.reading]
            if event.chunk is not None:
                samples.append(event.chunk.samples)
                continue
            del spoken[event.reading]
            reason: str = event.reading.finish_reason
            if event.error is not None:
                if not isinstance(event.error, SickError):
                    raise event.error
                samples, reason = [], event.error.reason
            yield Said(
                utterance,
                np.concatenate([np.zeros(0, np.float32), *samples]),
                warble.sample_rate,
                reason,
                zlib.crc32(event.reading.all_codes.tobytes()),
            )

    while True:
        while ensemble.room and (utterance := next(waiting, None)) is not None:
            plan = warble.plan(
                utterance.text, voice=utterance.voice, seed=utterance.seed, **options
            )
            reading = warble.reading(plan)
            spoken[reading] = utterance, []
            yield from ended(ensemble.start(reading))
        if not spoken:
            return
        yield from ended(ensemble.step())


def read(said: Said, recogniser: Recogniser) -> Row:
    """What is heard of it, and how many words of it are wrong."""
    text = said.utterance.text
    heard = recogniser.read(said.samples, said.rate_hz) if len(said.samples) else ""
    found = word_errors(text, heard)
    return {
        "voice": said.utterance.voice,
        "seed": said.utterance.seed,
        "text": text,
        "heard": heard,
        "errors": found.errors,
        "words": found.words,
        "seconds": round(len(said.samples) / said.rate_hz, 3),
        "finish_reason": said.finish_reason,
        "codes": said.codes,
    }


def in_processes(
    model: str | None,
    utterances: Sequence[Utterance],
    *,
    jobs: int,
    rows: int = ROWS,
    **options: Any,
) -> Iterator[Row]:
    """`speak` and `read` in `jobs` processes, one thread each; rows in the order they are ready.

    model: as `warble_mlx.load` takes it. Raises WarbleError if a process fails; its own message
    is on stderr.
    """
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    # Neither MLX nor the recogniser survives a fork.
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    processes = {}
    for _ in range(min(jobs, len(utterances))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_share,
            args=(sender, model, utterances, taken, rows, options),
            daemon=True,  # ends with this process
        )
        process.start()
        sender.close()  # so that the end of the process is the end of the pipe
        processes[receiver] = process
    try:
        while processes:
            for receiver in wait(list(processes)):
                assert isinstance(receiver, Connection)
                try:
                    yield receiver.recv()
                except EOFError:
                    process = processes.pop(receiver)
                    process.join()
                    if process.exitcode:
                        raise WarbleError(
                            f"a process of the measurement ended with status {process.exitcode}:"
                            " see above, or try fewer --jobs if memory was short"
                        ) from None
    finally:
        for process in processes.values():
            process.terminate()


def untaken(utterances: Sequence[Utterance], taken: Synchronized[int]) -> Iterator[Utterance]:
    """The utterances that no other process takes; `taken` counts those of all."""
    while True:
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(utterances):
            return
        yield utterances[number]


def _share(
    sender: Connection,
    model: str | None,
    utterances: Sequence[Utterance],
    taken: Synchronized[int],
    rows: int,
    options: Mapping[str, Any],
) -> None:
    """What one process does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end in order
    try:
        recogniser = Recogniser(threads=1)
        for said in speak(load(model), untaken(utterances, taken), rows, **options):
            sender.send(read(said, recogniser))
    except KeyboardInterrupt:
        sys.exit(130)  # the process that started this one says so


def key(row: Row) -> Utterance:
    """The utterance that a result is of."""
    return Utterance(row["voice"], row["seed"], row["text"])


class Journal:
    """Results of an unfinished run as JSON lines: first what is measured, then a row each.

    Opening one with the same `subject` gives its rows back. Raises WarbleError if it has another
    subject.
    """

    def __init__(self, path: Path, subject: Row) -> None:
        self.path = path
        self.rows: list[Row] = []
        head = json.dumps(subject)
        if path.exists():
            first, *lines = path.read_text("utf-8").split("\n")
            if first != head:
                raise WarbleError(
                    f"{path} holds results of another model or of other settings: remove it, or"
                    " give another name"
                )
            self.rows = [json.loads(line) for line in lines[:-1]]  # the last was not completed
        whole = "".join(f"{line}\n" for line in (head, *map(json.dumps, self.rows)))
        replaced = path.with_name(path.name + ".new")
        replaced.write_text(whole, "utf-8")
        replaced.replace(path)

    def add(self, row: Row) -> None:
        """Keep a result, whatever happens next."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def remove(self) -> None:
        """The run has finished."""
        self.path.unlink()
