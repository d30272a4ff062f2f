"""`warble batch`: rows checked, spoken, put down, gone on with, and shared between processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import warble_mlx
from warble_mlx import Warble, cli
from warble_mlx.audio import encode
from warble_mlx.batch import run
from warble_mlx.batch.ranks import Ranks
from warble_mlx.batch.rows import read_rows
from warble_mlx.batch.run import Outcome, run_batch
from warble_mlx.errors import WarbleError

CASES = Path(__file__).parent / "cases" / "batch"
WORDS = ["Hi", "Yes.", "Bye", "No.", "Good.", "Hello."]


@pytest.fixture(scope="module")
def warble() -> Warble:
    return warble_mlx.load()


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(words: list[str]) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "text": word, "seed": 100 + i} for i, word in enumerate(words)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def speak(warble: Warble, source: Path, out: Path, **options: Any) -> Outcome:
    return run_batch(warble, source, out, **{"tell": lambda _: None, **options})


def test_the_case_of_mixed_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], warble: Warble
) -> None:
    out = tmp_path / "out"
    assert cli.main(["batch", str(CASES / "mixed.jsonl"), str(out), "--seed", "1"]) == 5
    told = capfd.readouterr().err
    for line in ("line 2 (a2):", "line 3:", "line 5 (a1):", "line 8 (a8):"):
        assert line in told
    assert "5 of 9 rows are good" in told
    manifest, failures = lines(out / "manifest.jsonl"), lines(out / "failures.jsonl")
    assert [entry["id"] for entry in manifest] == ["a1", "line-6", "7", "a9", "a10"]
    assert [(f["line"], f["reason"]) for f in failures] == [
        (2, "text"), (3, "not-a-row"), (5, "row"), (8, "row")
    ]  # fmt: skip
    names = {entry["file"] for entry in manifest} | {"manifest.jsonl", "failures.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    for entry in manifest:
        samples, rate = soundfile.read(out / entry["file"], dtype="int16")
        assert (len(samples) / rate, rate) == (pytest.approx(entry["seconds"]), 44_100)
    if warble.dtype == "float32":  # a GPU's 16 bits round otherwise in company
        # Each is what is said alone, with the seed that the manifest names; the codec works in
        # larger chunks here, which moves the last bit.
        alone = warble.say("Last good line.", seed=manifest[-1]["seed"])
        wanted = np.frombuffer(encode(alone.samples, 44_100, "wav")[-2 * len(samples) :], "<i2")
        assert np.abs(samples.astype(int) - wanted).max() <= 1


def test_a_good_batch_and_its_resumption(warble: Warble, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", *rows_of(WORDS[:3])), tmp_path / "out"
    first = speak(warble, source, out, rows=2, kind="flac")
    assert (first.good, first.kept, first.failures) == (3, 0, ())
    with pytest.raises(WarbleError, match=r"not empty: name another folder.*--resume"):
        speak(warble, source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    whole = (out / "r1.flac").read_bytes()
    (out / "r1.flac").write_bytes(whole[:-1])  # torn
    damaged = bytearray((out / "r2.flac").read_bytes())
    damaged[-20] ^= 1  # as long as before
    (out / "r2.flac").write_bytes(damaged)
    again = speak(warble, source, out, kind="flac", resume=True)
    assert (again.good, again.kept) == (3, 1)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [{"text": "Bye"}, {"seed": 7}, {"voice": "Finch"}, {"temperature": 0.3}, {"max_seconds": 9}],
    ids=str,
)
def test_another_input_is_done_again(
    warble: Warble, tmp_path: Path, change: dict[str, Any]
) -> None:
    row = {"id": "a", "text": "Hi", "seed": 1}
    out = tmp_path / "out"
    speak(warble, write(tmp_path / "in.jsonl", row), out)
    (entry,) = lines(out / "manifest.jsonl")
    changed = write(tmp_path / "in.jsonl", {**row, **change})
    assert speak(warble, changed, out, resume=True).kept == 0
    (other,) = lines(out / "manifest.jsonl")
    assert other["digest"] != entry["digest"]
    assert speak(warble, changed, out, resume=True).kept == 1


def test_a_killed_run_goes_on_to_the_same_files(warble: Warble, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *rows_of(WORDS))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    speak(warble, source, whole, rows=2)
    command = [sys.executable, "-m", "warble_mlx", "batch", str(source), str(killed), "--rows", "2"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    progress = killed / "progress-0.jsonl"
    while not (progress.exists() and progress.stat().st_size) and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert not (killed / "manifest.jsonl").exists()
    done = speak(warble, source, killed, rows=3, resume=True)
    assert done.good == len(WORDS)
    assert 1 <= done.kept < len(WORDS)
    left = {path.name: path.read_bytes() for path in killed.iterdir() if path.suffix != ".part"}
    assert left == {path.name: path.read_bytes() for path in whole.iterdir()}


def test_a_full_disk_stops_the_batch_and_leaves_whole_files(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    texts = ["Hi", "Hi", "A pot of hot soup stood beside the open window."]
    source, out = write(tmp_path / "in.jsonl", *rows_of(texts)), tmp_path / "out"
    command = [sys.executable, "-m", "warble_mlx", "batch", str(source), str(out), "--rows", "2"]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "go on with --resume" in done.stderr
    assert "r2.wav" not in {path.name for path in out.iterdir()}
    for entry in lines(out / "progress-0.jsonl"):
        assert (out / entry["file"]).stat().st_size == entry["bytes"]
    assert not list(out.glob(".*"))
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "3 of 3 rows are good" in again.stderr


def test_two_processes_share_the_rows_over_a_ring(warble: Warble, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *rows_of(WORDS), {"id": "bad", "text": " "})
    alone, out = tmp_path / "alone", tmp_path / "out"
    speak(warble, source, alone, rows=2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    command = [sys.executable, "-m", "warble_mlx", "batch", str(source), str(out), "--rows", "2"]
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [5, 5], told
    assert "6 of 7 rows are good" in told[0]
    assert "line 7 (bad)" in told[0]
    assert not told[1]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in alone.iterdir()
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_shares_are_a_division(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gather({"a": [1]}) == [{"a": [1]}]
    weights = list(np.random.default_rng(0).integers(1, 200, 100))
    monkeypatch.setattr(ranks, "size", 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", rank)
        shares.append(ranks.share(range(100), weights))
    assert sorted(i for share in shares for i in share) == list(range(100))
    loads = [sum(weights[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 200


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "Hi", "id": "../up"}, "cannot name a file"),
        ({"text": "Hi", "id": ".hidden"}, "cannot name a file"),
        ({"text": "Hi", "id": "a" * 201}, "cannot name a file"),
        ({"text": "Hi", "colour": 1}, "colour"),
        ({"id": "a"}, "text"),
        ({"text": 7}, "Expected `str`"),
        ({"text": "Hi", "voice": "Vera", "reference_audio": "x", "reference_text": "y"}, "either"),
        ({"text": "Hi", "reference_audio": "x"}, "reference-text-required"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    rows, failures = read_rows(write(tmp_path / "in.jsonl", row, {"text": "Hi"}))
    assert [numbered.id for numbered in rows] == ["line-2"]
    assert said in failures[0].error
    assert failures[0].line == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"voice": "nobody"}, "no voice 'nobody'"),
        ({"reference_audio": "none.wav", "reference_text": "y"}, "none.wav"),
        ({"temperature": -1}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"retry": 9}, "retry"),
        ({"pause": 99}, "pause"),
    ],
)
def test_rows_that_no_model_can_speak(
    warble: Warble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], said: str
) -> None:
    def unreachable(*_: object) -> None:
        raise AssertionError("work began for a bad row")

    monkeypatch.setattr(run, "write_audio", unreachable)
    done = speak(warble, write(tmp_path / "in.jsonl", {"text": "Hi", **row}), tmp_path / "out")
    assert said in done.failures[0].error
    assert done.good == 0


def test_a_row_that_was_cut_is_no_good_unless_wanted(warble: Warble, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"id": "a", "text": "Where did you go?"})
    options = {"defaults": {"max_seconds": 0.3}}
    done = speak(warble, source, tmp_path / "out", **options)
    assert [failure.reason for failure in done.failures] == ["cut"]
    assert not (tmp_path / "out" / "a.wav").exists()
    kept = speak(warble, source, tmp_path / "out", resume=True, keep_cut=True, **options)
    assert kept.good == 1
    assert lines(tmp_path / "out" / "manifest.jsonl")[0]["finish_reason"] == "length"


def test_seeds_follow_from_ids_not_from_order(warble: Warble, tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "Hi"}, {"id": "b", "text": "Hi"}]
    speak(warble, write(tmp_path / "1.jsonl", *rows), tmp_path / "1")
    speak(warble, write(tmp_path / "2.jsonl", *rows[::-1]), tmp_path / "2")
    seeds = [
        {entry["id"]: entry["seed"] for entry in lines(tmp_path / name / "manifest.jsonl")}
        for name in "12"
    ]
    assert seeds[0] == seeds[1]
    assert seeds[0]["a"] != seeds[0]["b"]


def test_what_cannot_be_read_or_made(warble: Warble, tmp_path: Path) -> None:
    with pytest.raises(WarbleError, match="cannot be read"):
        speak(warble, tmp_path / "none.jsonl", tmp_path / "out")
    for text, found in (("", "no rows; a row"), ('{"txt": "Hi"}\nx\n', r"rows \(line 1 .*`txt`")):
        (tmp_path / "story.txt").write_text(text)
        with pytest.raises(WarbleError, match=found):
            speak(warble, tmp_path / "story.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(WarbleError, match="is a file: name the folder"):
        speak(warble, write(tmp_path / "in.jsonl", *rows_of(["Hi"])), tmp_path / "file")


def test_ids_that_differ_in_case_alone_name_one_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "intro", "text": "Hi."}\n' * 2 + '{"id": "Intro", "text": "Hi."}\n')
    again, other = (failure.error for failure in read_rows(path)[1])
    assert again == "line 1 has the id 'intro' already"
    assert other == "line 1 has the id 'intro' already, and case does not count"
