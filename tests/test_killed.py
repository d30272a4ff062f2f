"""Commands killed without warning: nothing looks finished that is not, and the same command then
does what it was to do.

Killed is before changes to files and at random moments of a command's whole time, by a fixed seed.
With `WARBLE_TEST_KILLS=all` that is before every change and at twenty moments. The reader of a long
text and the batch have a stand-in for their voice; `WARBLE_TEST_VOICE=real` takes the bundled one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import killing
import pytest
import synthetic

from warble_mlx.convert import convert
from warble_mlx.ios_export.manifest import read_manifest
from warble_mlx.ios_export.verify import damaged_files
from warble_mlx.narration import journal_of, part_of

ALL = os.environ.get("WARBLE_TEST_KILLS") == "all"
MOMENTS = 20 if ALL else 2
STRIDE = 1 if ALL else 4
MOST_STEPS = 300
VOICE = os.environ.get("WARBLE_TEST_VOICE", "quick")
LINES = ["Alpha one.", "Bravo two.", "Cedar three."]
ROWS = [json.dumps({"id": f"r{i}", "text": text}) for i, text in enumerate(LINES)]
PASSING = {"seconds", "peak_rss_bytes", "sha256"}  # differ from one export to the next


@dataclass
class Job:
    """A command that makes `target` in a folder of its own."""

    args: list[str]
    target: str
    replaces: bool = False  # an earlier result is there


READ = ["say", "--stream", "-f", "../text", "--seed", "1", "-o"]
# One folder up lies what they read: a checkpoint, a bundle of it, a text and rows.
JOBS = {
    "convert": Job(["convert", "../source", "out", "--no-check"], "out"),
    "convert again": Job(["convert", "../source", "out", "--no-check", "--force"], "out", True),
    "quantize": Job(["quantize", "../bundle", "out", "--bits", "4", "--no-check"], "out"),
    "convert to 4 bits": Job(["convert", "../source", "out", "--bits", "4", "--no-check"], "out"),
    "export": Job(
        ["export-ios", "../bundle", "out", "--only", "mlxfn", "--no-check", "--check-frames", "4"],
        "out",
    ),
    "book.wav": Job([*READ, "book.wav"], "book.wav"),
    "book.mp3": Job([*READ, "book.mp3"], "book.mp3"),
    "batch": Job(["batch", "../rows", "out"], "out"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    synthetic.write_source(folder / "source")
    convert(folder / "source", folder / "bundle")
    (folder / "text").write_text("\n\n".join(LINES))
    (folder / "rows").write_text("\n".join(ROWS))
    return folder


class Bench:
    """Runs a job once in peace, and then with kills."""

    def __init__(self, name: str, home: Path) -> None:
        self._job, self._home, self._name = JOBS[name], home, name
        folder = self._fresh()
        started = time.perf_counter()
        self._run(folder)
        self.seconds = time.perf_counter() - started
        self._finished = contents(folder)
        self._old = contents(self._fresh())

    def kill(self, *, at_step: int = killing.NEVER, after_s: float | None = None) -> bool:
        """Kill the job there, look at what it left, and finish it. False if it was quicker."""
        folder = self._fresh()
        done = killing.run(self._job.args, folder, voice=VOICE, at_step=at_step, after_s=after_s)
        assert done.returncode in (0, killing.KILLED), done.stderr
        self._look(contents(folder))
        if (folder / "out" / "manifest.json").exists():  # an export
            check_hashes(folder / "out")
        target = folder / self._job.target
        if target.exists() and not self._job.replaces and self._job.args[0] != "batch":
            shutil.rmtree(target) if target.is_dir() else target.unlink()  # it was whole
        self._run(folder, *self._resuming(folder))
        assert contents(folder) == self._finished
        if self._job.args[0] == "export-ios":
            check_hashes(folder / "out")
        return done.returncode == killing.KILLED

    def _fresh(self) -> Path:
        folder = self._home / self._name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if self._job.replaces:
            shutil.copytree(self._home / "bundle", folder / self._job.target)
            (folder / self._job.target / "old").write_text("this one")
        return folder

    def _run(self, folder: Path, *more: str) -> None:
        done = killing.run([*self._job.args, *more], folder, voice=VOICE)
        assert done.returncode == 0, done.stderr

    def _resuming(self, folder: Path) -> list[str]:
        target = folder / self._job.target
        if self._job.args[0] == "batch":
            return ["--resume"]
        left = self._job.args[0] == "say" and journal_of(target).exists()
        return ["--resume"] if left and part_of(target).exists() else []

    def _look(self, there: dict[str, object]) -> None:
        """What has its final name is whole."""
        name = self._job.target
        if self._job.args[0] == "batch":
            for path, value in there.items():
                if path.endswith(".wav") and "/." not in path:
                    assert value == self._finished[path], path
            return
        own = {path: value for path, value in there.items() if path.partition("/")[0] == name}
        assert own in ({}, self._old, self._finished)


def check_hashes(export: Path) -> None:
    """The files of an export are those that its manifest lists."""
    assert damaged_files(export, read_manifest(export).all_files) == []


def contents(folder: Path) -> dict[str, object]:
    """Every file below a folder, hidden ones too, without what differs from run to run."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".mlxfn":  # MLX writes numbers into it that are addresses
            found[name] = path.stat().st_size
        elif path.name == "manifest.json":
            found[name] = lasting(json.loads(path.read_bytes()))
        else:
            found[name] = path.read_bytes()
    return found


def lasting(value: object) -> object:
    """A manifest without what was measured, and without hashes."""
    if isinstance(value, dict):
        return {name: lasting(inner) for name, inner in value.items() if name not in PASSING}
    return [lasting(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["convert again", "quantize", "book.wav", "batch"])
def test_killed_now_and_then(home: Path, name: str) -> None:
    bench = Bench(name, home)
    chance = random.Random(name)
    bench.kill(after_s=chance.random() * bench.seconds)
    assert bench.kill(at_step=chance.randrange(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_killed_before_changes_to_files(home: Path, name: str) -> None:
    bench = Bench(name, home)
    first = random.Random(name).randrange(STRIDE)
    steps = range(first, MOST_STEPS, STRIDE)
    quicker = next(step for step in steps if not bench.kill(at_step=step))
    print(f"{name}: the last change was before number {quicker}")
    assert quicker >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_killed_at_random_moments(home: Path, name: str) -> None:
    bench = Bench(name, home)
    chance = random.Random(name)
    moments = [(i + chance.random()) / MOMENTS * bench.seconds for i in range(MOMENTS)]
    killed = [bench.kill(after_s=moment) for moment in moments]
    print(f"{name}: {bench.seconds:.2f} s, killed {sum(killed)} times of {MOMENTS}")
    assert any(killed)
