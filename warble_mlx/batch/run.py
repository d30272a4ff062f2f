"""A batch from its JSONL file to the manifest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from warble_mlx.audio import write_audio
from warble_mlx.batch.casting import Casting
from warble_mlx.batch.ledger import Entry, Ledger, file_digest
from warble_mlx.batch.ranks import Ranks
from warble_mlx.batch.rows import Failure, Numbered, read_rows
from warble_mlx.codec.convolution import chunk_frames_for
from warble_mlx.ensemble import Ensemble, Event
from warble_mlx.errors import AudioError, SickError, WarbleError
from warble_mlx.reading import Plan, Reading
from warble_mlx.speech import Warble
from warble_mlx.splitting import weight

DEFAULT_ROWS = 8


class Outcome(NamedTuple):
    """What came of a batch, in all its processes together."""

    good: int  # rows that have a file now
    kept: int  # of those, from an earlier run
    failures: tuple[Failure, ...]
    seconds: float  # of speech made now
    took_s: float  # by the slowest process
    rank: int  # of this process


@dataclass(eq=False)
class _Take:
    """A row while it is spoken."""

    numbered: Numbered
    plan: Plan
    samples: list[npt.NDArray[np.float32]] = field(default_factory=list)


def run_batch(
    warble: Warble,
    source: Path,
    folder: Path,
    *,
    rows: int = DEFAULT_ROWS,
    kind: str = "wav",
    resume: bool = False,
    keep_cut: bool = False,
    defaults: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = print,
    bar: TextIO | None = None,
) -> Outcome:
    """Speak every row of the JSONL file `source` into `folder`/ID.`kind`.

    rows: how many are spoken at once. resume: leave out rows whose file an earlier run has
    completed from the same inputs. keep_cut: a row cut by its max_seconds counts as good.
    defaults: options of `Warble.say` for rows that lack them. tell: gets a sentence for every row
    that fails, all those that can be known beforehand before any work begins. bar: where to draw
    progress.

    Raises WarbleError for a folder or file that cannot be used, AudioError when the disk is full.
    """
    started = perf_counter()
    ranks = Ranks()
    ledger = Ledger(folder, ranks.rank)
    good, failures = read_rows(source)  # before a folder is made
    earlier = _opened(ledger, ranks, resume=resume)
    if ranks.rank:
        failures = []  # rank 0 has the same
    own = ranks.share(good, [weight(numbered.row.text) for numbered in good])
    casting = Casting(warble, defaults or {}, source.parent)
    work = _Work(warble, casting, ledger, folder, kind, keep_cut, tell)
    for failure in failures:
        work.fail(failure)
    todo = work.checked(own, earlier, bar)
    fatal = ""
    try:
        work.speak(todo, rows, bar)
    except AudioError as error:  # not one row's fault: the others would not fare better
        fatal = str(error)
    reports = ranks.gather(
        {
            "done": work.done,
            "failures": work.failures,
            "kept": work.kept,
            "seconds": work.seconds,
            "took_s": perf_counter() - started,
            "fatal": fatal,
        }
    )
    if any(report["fatal"] for report in reports):
        raise AudioError(
            next(report["fatal"] for report in reports if report["fatal"])
            + ": the batch was stopped; make room and go on with --resume"
        )
    done = [entry for report in reports for entry in report["done"]]
    every = [Failure(*failure) for report in reports for failure in report["failures"]]
    if not ranks.rank:
        ledger.close(done, every)
    ranks.gather(None)  # until the manifest is there
    ledger.drop_progress()
    return Outcome(
        good=len(done),
        kept=sum(report["kept"] for report in reports),
        failures=tuple(sorted(every)),
        seconds=sum(report["seconds"] for report in reports),
        took_s=max(report["took_s"] for report in reports),
        rank=ranks.rank,
    )


def _opened(ledger: Ledger, ranks: Ranks, *, resume: bool) -> dict[str, Entry]:
    """Open the ledger in every process, or in none: one that stopped alone would leave the others
    waiting."""
    refusal = ""
    try:
        ledger.open(resume=resume)
    except WarbleError as error:
        refusal = str(error)
    for other in ranks.gather(refusal):
        if other:
            raise WarbleError(other)
    return ledger.earlier() if resume else {}


class _Work:
    """The rows of this process."""

    def __init__(
        self,
        warble: Warble,
        casting: Casting,
        ledger: Ledger,
        folder: Path,
        kind: str,
        keep_cut: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._warble, self._casting, self._ledger = warble, casting, ledger
        self._folder, self._kind, self._keep_cut, self._tell = folder, kind, keep_cut, tell
        self.done: list[Entry] = []
        self.failures: list[Failure] = []
        self.kept = 0
        self.seconds = 0.0

    def fail(self, failure: Failure) -> None:
        """Put a row down as failed, and say so."""
        self.failures.append(failure)
        name = "" if failure.id is None else f" ({failure.id})"
        self._tell(f"line {failure.line}{name}: {failure.error}")

    def checked(
        self, own: Sequence[Numbered], earlier: Mapping[str, Entry], bar: TextIO | None
    ) -> list[Numbered]:
        """The rows that are to be spoken; the others are done or have failed."""
        todo = []
        for numbered in tqdm(own, "checking", file=bar, disable=bar is None, leave=False):
            try:
                self._casting.check(numbered)
                entry = earlier.get(numbered.id)
                digest = self._casting.digest(numbered) if entry else ""
                if entry and self._ledger.holds(entry, digest, self._name(numbered)):
                    self.done.append({**entry, "line": numbered.line})
                    self.kept += 1
                else:
                    todo.append(numbered)
            except WarbleError as error:
                self.fail(Failure(numbered.line, numbered.id, "row", str(error)))
        return todo

    def speak(self, todo: Sequence[Numbered], rows: int, bar: TextIO | None) -> None:
        """Speak them, `rows` at a time. Raises AudioError when a file cannot be written."""
        ensemble = Ensemble(self._warble.engine, rows)
        takes: dict[Reading, _Take] = {}
        waiting = deque(todo)
        started = perf_counter()
        with tqdm(
            total=sum(weight(numbered.row.text) for numbered in todo),
            file=bar,
            disable=bar is None,
            dynamic_ncols=True,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {desc}{remaining} left",
        ) as shown:

            def see(event: Event) -> None:
                take = takes[event.reading]
                if event.chunk is not None:
                    take.samples.append(event.chunk.samples)
                    return
                del takes[event.reading]
                self._finish(take, event)
                taken = perf_counter() - started
                rtf = f", RTF {taken / self.seconds:.2f}" if self.seconds else ""
                shown.set_description_str(
                    f"{len(todo) - len(waiting) - len(takes)}/{len(todo)} rows,"
                    f" {self.seconds:.0f} s of audio{rtf}, "
                )
                shown.update(weight(take.numbered.row.text))

            while waiting or takes:
                while waiting and ensemble.room:
                    numbered = waiting.popleft()
                    try:
                        plan = self._casting.plan(numbered)
                    except WarbleError as error:
                        self.fail(Failure(numbered.line, numbered.id, "row", str(error)))
                        continue
                    chunk = chunk_frames_for(self._warble.config.codec_frame_size)
                    reading = self._warble.reading(plan, chunk_frames=(chunk, chunk))
                    takes[reading] = _Take(numbered, plan)
                    for event in ensemble.start(reading):
                        see(event)
                for event in ensemble.step():
                    see(event)

    def _finish(self, take: _Take, event: Event) -> None:
        numbered, reading, error = take.numbered, event.reading, event.error
        if error is not None:
            reason = error.reason if isinstance(error, SickError) else "row"
            self.fail(Failure(numbered.line, numbered.id, reason, str(error)))
            return
        samples = np.concatenate([np.zeros(0, np.float32), *take.samples])
        seconds = samples.size / self._warble.sample_rate
        if reading.finish_reason == "length" and not self._keep_cut:
            message = (
                f"the speech was cut after {seconds:.2f} s, before its end: allow more with"
                " max_seconds, or keep it with --allow-truncated"
            )
            self.fail(Failure(numbered.line, numbered.id, "cut", message))
            return
        path = self._folder / self._name(numbered)
        write_audio(samples, self._warble.sample_rate, path)
        self.seconds += seconds
        entry = {
            "id": numbered.id,
            "line": numbered.line,
            "file": path.name,
            "text": take.plan.text,
            "voice": take.plan.voice,
            "seed": take.plan.seed,
            "retries": reading.retries,
            "seconds": round(seconds, 6),
            "sample_rate": self._warble.sample_rate,
            "frames": reading.frames,
            "finish_reason": reading.finish_reason,
            "warnings": [*take.plan.warnings, *self._casting.doubts(numbered.row)],
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
            "digest": self._casting.digest(numbered),
        }
        self._ledger.add(entry)
        self.done.append(entry)

    def _name(self, numbered: Numbered) -> str:
        return f"{numbered.id}.{self._kind}"
