"""A long text spoken into a file, piece by piece, so that a killed run can go on.

While it runs, two files stand beside the target: `book.wav.part`, a WAV that grows chunk by chunk
and can be listened to, and `book.wav.journal`, one JSON line for what was asked and one for each
finished piece. A piece is on the disk before its line is, so the journal never promises more than
the part holds; what the part holds beyond it is cut off when the run goes on. At the end the
part becomes the target: renamed if it is a WAV that needs no change of level, else encoded. The
journal goes last, so one without a part is that of a finished run and means nothing any more.

Going on is allowed only for the same text, voice, model and settings: the samples are then those
of a run that was never stopped.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
import soundfile

from warble_mlx import __version__
from warble_mlx.audio import FORMATS, PEAK_LIMIT, Format, check_target, checked, format_of
from warble_mlx.errors import AudioError, SickError, WarbleError
from warble_mlx.options import MAX_RETRIES
from warble_mlx.progress_bar import ProgressBar
from warble_mlx.reading import Piece, Plan, Progress

if TYPE_CHECKING:
    from warble_mlx.speech import Speech, Warble

PART_SUFFIX = ".part"
JOURNAL_SUFFIX = ".journal"
_VERSION = 1
_BLOCK = 1 << 18  # samples copied at a time
_LEAST_ROOM = 1 << 17  # bytes, more than a chunk has; with less a failed write means a full disk
_RIFF_LIMIT = 2**32 - 2**16  # bytes; beyond it a WAV is an RF64
_ENCODER_ROUNDS = 4  # of lowering the level until a lossy format's own overshoot fits, too

Samples = npt.NDArray[np.float32]


class Entry(NamedTuple):
    """One finished piece as the journal has it."""

    piece: Piece
    codes: npt.NDArray[np.int32]  # [10, frames]
    peak: float  # of its samples
    total_s: float  # taken until then, from the first run on
    codec_s: float
    retries: int


class Journal(NamedTuple):
    """What an unfinished run has left."""

    wanted: dict[str, Any]
    entries: tuple[Entry, ...]
    length: int  # bytes of its whole lines

    @property
    def seed(self) -> int:
        """The seed of that run."""
        return int(self.wanted["seed"])

    @property
    def progress(self) -> Progress:
        """Where a reading has to go on."""
        if not self.entries:
            return Progress()
        last = self.entries[-1]
        return Progress(
            tuple(entry.piece for entry in self.entries),
            tuple(entry.codes for entry in self.entries),
            last.total_s,
            last.codec_s,
            last.retries,
        )


def part_of(target: Path) -> Path:
    """The file that grows while `target` is made."""
    return target.with_name(target.name + PART_SUFFIX)


def journal_of(target: Path) -> Path:
    """The journal of `target`."""
    return target.with_name(target.name + JOURNAL_SUFFIX)


def unfinished(target: Path) -> Journal:
    """The journal of an unfinished run that wrote `target`.

    Raises WarbleError if there is none, or nothing in it can be used.
    """
    path = journal_of(target)
    try:
        missing = next((p for p in (path, part_of(target)) if not p.exists()), None)
        if missing:
            done = f" ({target} is there: it may be finished)" if target.exists() else ""
            raise WarbleError(
                f"there is nothing to resume: {missing} does not exist{done}; leave --resume out"
                " to start"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise WarbleError(f"{path} cannot be read: {error.strerror or error}") from error
    whole = raw[: raw.rfind(b"\n") + 1]  # a kill may have torn the last line
    try:
        first, *rest = [json.loads(line) for line in whole.splitlines()]
        if first["version"] != _VERSION:
            raise ValueError("another version")
        return Journal(first, tuple(map(_entry, rest)), len(whole))
    except (ValueError, KeyError, TypeError) as error:
        raise WarbleError(
            f"{path} is no journal of this version: delete it and {part_of(target).name}, and"
            " start without --resume"
        ) from error


def wanted_of(warble: Warble, plan: Plan) -> dict[str, Any]:
    """What decides on the samples: digests of text, voice, model and settings; and the seed.

    The number of retries does not: what is finished stays as it is with any.
    """
    voice: list[object] = [plan.speaker]
    if plan.reference is not None:
        voice += [plan.reference.text, np.asarray(plan.reference.codes, np.int32).tolist()]
    files = sorted(path for path in warble.folder.iterdir() if path.is_file())
    model = [
        (warble.folder / "config.json").read_text("utf-8"),
        [(path.name, path.stat().st_size) for path in files],
        warble.dtype,
    ]
    sampling = plan.sampling
    settings = [
        sampling.temperature, sampling.top_p, sampling.top_k, plan.pause_s, plan.longest,
    ]  # fmt: skip
    return {
        "version": _VERSION,
        "program": __version__,
        "seed": plan.seed,
        "text": _digest([list(part) for part in plan.parts]),
        "voice": _digest(voice),
        "model": _digest(model),
        "settings": _digest(settings),
    }


def narrate_text(
    warble: Warble, text: str, target: Path, *, resume: bool, **options: Any
) -> tuple[Speech, bool]:
    """`narrate` from the start, or from where an earlier run was stopped, whose seed it takes.

    options: `seed` and others of `Warble.say`; `keep_cut`, `bar` and `tell` of `narrate`.
    """
    own = {name: options.pop(name) for name in ("keep_cut", "bar", "tell") if name in options}
    earlier = unfinished(target) if resume else None
    if earlier is not None and options.get("seed") is None:
        options["seed"] = earlier.seed
    return narrate(warble, warble.plan(text, **options), target, earlier=earlier, **own)


def narrate(
    warble: Warble,
    plan: Plan,
    target: Path,
    *,
    earlier: Journal | None = None,
    keep_cut: bool = False,
    bar: TextIO | None = None,
    tell: Callable[[str], None] | None = None,
) -> tuple[Speech, bool]:
    """Speak `plan` into the file `target`; the speech, and whether the file was made.

    earlier: the journal of the run to go on with (`unfinished`). keep_cut: make the file even if
    a piece was cut by its budget; without it the part and its journal stay, for another decision.
    bar: where to draw progress. tell: gets a sentence on what is left and how to go on.

    After an exception the part and the journal stay if a piece is finished, and hold the finished
    ones. After Ctrl-C the part stays in any case, and holds all that was spoken.

    Raises WarbleError if the earlier run was another one or if one is unfinished, and whatever
    speaking raises; AudioError for a file that cannot be written.
    """
    check_target(target)
    target = Path(os.path.realpath(target))  # through a link, not over it
    kind = format_of(target)
    wanted = wanted_of(warble, plan)
    if earlier is not None:
        _check_same(earlier.wanted, wanted, target)
    progress = earlier.progress if earlier else Progress()
    with _writable(target), _Files(target, plan, warble.sample_rate, wanted, earlier) as files:
        stream = warble.perform(plan, progress)
        try:
            with ProgressBar(plan, warble.sample_rate, progress, bar) as shown:
                for chunk in stream:
                    if files.finish(stream.progress):
                        shown.update(stream.progress)
                    files.write(chunk.samples)
                files.finish(stream.progress)
                shown.update(stream.progress)
        except BaseException as error:
            stream.close()
            files.stop(error, tell or _silent)
            raise
        speech = stream.speech
        if speech.finish_reason == "length" and not keep_cut:
            if tell:
                cut = [i for i, p in enumerate(speech.pieces, 1) if p.finish_reason == "length"]
                tell(
                    f"pieces that were cut: {', '.join(map(str, cut)) or 'those not begun'}; the"
                    f" speech is kept in {part_of(target)}, and the same command with --resume"
                    " --allow-truncated makes the file of it"
                )
            return speech, False
        files.close()
        finish(part_of(target), target, kind, files.peak)
        journal_of(target).unlink()
    return speech, True


class _Files:
    """The part and the journal of one run. Leaving it with nothing worth keeping removes both."""

    def __init__(
        self,
        target: Path,
        plan: Plan,
        sample_rate: int,
        wanted: dict[str, Any],
        earlier: Journal | None,
    ) -> None:
        self._part, self._path = part_of(target), journal_of(target)
        self._plan, self._rate = plan, sample_rate
        self._progress = earlier.progress if earlier else Progress()
        peaks = [entry.peak for entry in earlier.entries] if earlier else []
        self.peak = max(peaks, default=0.0)  # of everything written
        self._piece_peak = 0.0  # of what was written since the last finished piece
        self._unfinished = 0  # samples, likewise
        self._keeps_part = False
        if earlier is None:
            # A part without a journal is what Ctrl-C left of a first piece.
            if self._path.exists() and self._part.exists():
                with self._path.open("rb") as other:
                    _claim(other, target)
                raise WarbleError(
                    f"{self._path} of an unfinished run is in the way: go on with it by --resume,"
                    " or delete it"
                )
            large = plan.slowest_s * sample_rate * 2 > _RIFF_LIMIT
            container = "RF64" if large else "WAV"
            soundfile.SoundFile(
                self._part, "w", sample_rate, 1, format=container, subtype="PCM_16"
            ).close()
            # With its first line or not at all: an empty one could neither be resumed nor passed.
            begun = self._path.with_name(f"{self._path.name}.new")
            self._journal: BinaryIO = begun.open("wb")
            _claim(self._journal, target)
            self._write_line(wanted)
            os.replace(begun, self._path)
        else:
            self._journal = self._path.open("r+b")
            try:
                _claim(self._journal, target)
                self._cut_back(earlier.progress)
            except BaseException:
                self.close()
                raise
            self._journal.truncate(earlier.length)
            self._journal.seek(earlier.length)

    def _cut_back(self, progress: Progress) -> None:
        """Remove what the part holds beyond the last piece in the journal."""
        length = progress.pieces[-1].samples[1] if progress.pieces else 0
        try:
            with soundfile.SoundFile(self._part, "r+") as file:
                if file.frames < length:
                    raise WarbleError(
                        f"{self._part} holds {file.frames} samples, but its journal promises"
                        f" {length}: delete both and start without --resume"
                    )
                file.truncate(length)
        except soundfile.SoundFileError as error:
            raise WarbleError(
                f"{self._part} cannot be read: {error}; delete it and its journal, and start"
                " without --resume"
            ) from error

    def write(self, samples: Samples) -> None:
        """Append samples [n] to the part, whose header is right again afterwards."""
        wave = checked(samples)
        with soundfile.SoundFile(self._part, "r+") as file:
            file.seek(0, soundfile.SEEK_END)
            file.write(wave)
        self._unfinished += wave.size
        self._piece_peak = max(self._piece_peak, float(np.abs(wave).max()))

    def finish(self, progress: Progress) -> bool:
        """Enter the pieces that are finished now, all of whose samples are written; whether there
        are any. What was written behind the last one, silence, belongs to it."""
        known = len(self._progress.pieces)
        if len(progress.pieces) == known:
            return False
        with self._part.open("rb") as raw:
            os.fsync(raw.fileno())
        for piece, codes in zip(progress.pieces[known:], progress.codes[known:], strict=True):
            self._write_line(
                {
                    "text": piece.text,
                    "seed": piece.seed,
                    "finish_reason": piece.finish_reason,
                    "samples": piece.samples,
                    "frames": piece.frames,
                    "books": len(codes),
                    "codes": base64.b64encode(codes.astype("<i2").tobytes()).decode(),
                    "peak": self._piece_peak,
                    "total_s": progress.total_s,
                    "codec_s": progress.codec_s,
                    "retries": progress.retries,
                }
            )
        self._progress = progress
        self.peak = max(self.peak, self._piece_peak)
        self._piece_peak, self._unfinished = 0.0, 0
        return True

    def stop(self, why: BaseException, tell: Callable[[str], None]) -> None:
        """Keep what is worth it of an unfinished run: its finished pieces, and if a person wanted
        it to stop the beginning of the next one, too. What was no speech goes."""
        is_wanted = isinstance(why, KeyboardInterrupt)
        done = len(self._progress.pieces)
        if not is_wanted and self._unfinished:
            self._cut_back(self._progress)
        if done:
            # With its own seed a piece that was no speech would be none again.
            again = f" --retry {MAX_RETRIES}" if isinstance(why, SickError) else ""
            tell(
                f"{done} of {len(self._plan.spoken)} pieces are kept in {self._part}: the same"
                f" command with --resume{again} goes on from there (seed {self._plan.seed})"
            )
        elif is_wanted and self._unfinished:
            self._keeps_part = True
            seconds = self._unfinished / self._rate
            tell(f"the {seconds:.2f} s that were spoken are kept in {self._part}, a WAV file")

    def _write_line(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if not self._progress.pieces:
            self._path.unlink(missing_ok=True)
            if not self._keeps_part:
                self._part.unlink(missing_ok=True)


def _claim(journal: BinaryIO, target: Path) -> None:
    """Lock an open journal until it is closed, so that no other process writes the same part.

    Raises WarbleError if another one holds it.
    """
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WarbleError(
            f"{target} is being written by another run just now: wait for its end, or name"
            " another file"
        ) from None
    except OSError:
        pass  # a network's file system without locks


def _silent(_: str) -> None:
    pass


def finish(part: Path, target: Path, kind: str, peak: float) -> None:
    """Make `target` of a finished part whose samples reach `peak`, and remove the part.

    Like a short file it peaks at -0.1 dBFS at most, and is scaled as a whole if it must be.
    """
    wanted = FORMATS[kind]
    level = min(1.0, PEAK_LIMIT / peak) if peak else 1.0
    if kind == "wav" and level == 1:
        os.replace(part, target)
        return
    made = target.with_name(f".{target.name}.encoded")  # a killed run's is written over
    try:
        for _ in range(_ENCODER_ROUNDS):
            _copy(part, made, wanted, level)
            if not wanted.lossy:
                break
            over = max((float(np.abs(b).max()) for b in _blocks(made)), default=0.0) / PEAK_LIMIT
            if over <= 1:
                break
            level /= over * 1.01
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
    part.unlink()


def _copy(source: Path, out: Path, wanted: Format, level: float) -> None:
    with soundfile.SoundFile(source) as file:
        container, rate = wanted.container, file.samplerate
        if container == "WAV":
            container = file.format  # an RF64 stays one
    with soundfile.SoundFile(out, "w", rate, 1, wanted.subtype, format=container) as file:
        for block in _blocks(source):
            file.write(block * np.float32(level))


def _blocks(path: Path) -> Iterator[Samples]:
    with soundfile.SoundFile(path) as file:
        yield from file.blocks(_BLOCK, dtype="float32")


@contextmanager
def _writable(target: Path) -> Iterator[None]:
    """A file that cannot be written, in the project's own words."""
    try:
        yield
    except (OSError, soundfile.SoundFileError) as error:
        reason = getattr(error, "strerror", None) or error
        # The audio library says "System error." to whatever a write meets.
        if isinstance(error, soundfile.SoundFileError) and not _has_room(target.parent):
            reason = "No space left on device"
        raise AudioError(f"{target} cannot be written: {reason}") from error


def _has_room(folder: Path) -> bool:
    return shutil.disk_usage(folder).free >= _LEAST_ROOM


def _check_same(old: dict[str, Any], new: dict[str, Any], target: Path) -> None:
    changed = [name for name in ("text", "voice", "model", "settings", "seed", "program")
               if old.get(name) != new[name]]  # fmt: skip
    if changed:
        verb = "is" if len(changed) == 1 and changed[0] != "settings" else "are"
        raise WarbleError(
            f"{target} cannot be resumed: {' and '.join(changed)} {verb} not as before. Give the"
            f" same command again, or delete {part_of(target).name} and"
            f" {journal_of(target).name} to start anew"
        )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


def _entry(line: dict[str, Any]) -> Entry:
    begin, end = line["frames"]
    codes = np.frombuffer(base64.b64decode(line["codes"]), "<i2").astype(np.int32)
    piece = Piece(
        line["text"], line["seed"], line["finish_reason"], tuple(line["samples"]), (begin, end)
    )
    return Entry(
        piece,
        codes.reshape(line["books"], end - begin),
        line["peak"],
        line["total_s"],
        line["codec_s"],
        line["retries"],
    )
