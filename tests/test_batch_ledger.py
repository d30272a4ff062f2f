"""What a batch writes down, and what of it a later run believes."""

from __future__ import annotations

from pathlib import Path

import pytest

from warble_mlx.batch.ledger import Entry, Ledger, file_digest
from warble_mlx.errors import AudioError, WarbleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "out"


def opened(folder: Path, *, resume: bool = True) -> Ledger:
    ledger = Ledger(folder, 0)
    ledger.open(resume=resume)
    return ledger


def entry_of(folder: Path, name: str) -> Entry:
    """A row whose file is written."""
    path = folder / f"{name}.wav"
    path.write_bytes(name.encode() * 100)
    facts = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
    return {"id": name, "line": 1, "digest": "d", **facts}


def test_a_torn_line_takes_no_other_with_it(folder: Path) -> None:
    ledger = opened(folder)
    for name in ("a", "b"):
        ledger.add(entry_of(folder, name))
    (progress,) = folder.glob("progress-*")
    with progress.open("r+b") as file:
        file.truncate(progress.stat().st_size - 5)  # killed while b was put down
    ledger = opened(folder)
    assert set(ledger.earlier()) == {"a"}
    ledger.add(entry_of(folder, "c"))
    assert set(ledger.earlier()) == {"a", "c"}


def test_a_file_is_believed_byte_for_byte(folder: Path) -> None:
    ledger = opened(folder)
    entry = entry_of(folder, "a")
    assert ledger.holds(entry, "d", "a.wav")
    assert not ledger.holds(entry, "other inputs", "a.wav")
    assert not ledger.holds(entry, "d", "b.wav")
    path = folder / "a.wav"
    path.write_bytes(b"x" * path.stat().st_size)
    assert not ledger.holds(entry, "d", "a.wav")
    path.unlink()
    assert not ledger.holds(entry, "d", "a.wav")


def test_half_written_files_go_and_others_stay(folder: Path) -> None:
    opened(folder)
    for name in (".a.wav.0123abcd.part", ".manifest.jsonl.0123abcd.part", "a.part", ".notes"):
        (folder / name).write_bytes(b"x")
    opened(folder)
    assert {path.name for path in folder.iterdir()} == {"a.part", ".notes"}


def test_a_folder_with_something_in_it_is_only_resumed(folder: Path) -> None:
    opened(folder, resume=False)
    (folder / "x").write_bytes(b"")
    with pytest.raises(WarbleError, match="--resume"):
        opened(folder, resume=False)


def test_a_folder_that_is_none(folder: Path) -> None:
    folder.write_bytes(b"")
    with pytest.raises(WarbleError, match="is a file"):
        opened(folder)


def test_what_cannot_be_put_down_is_told(folder: Path) -> None:
    ledger = opened(folder)
    for name in ("progress-0.jsonl", "manifest.jsonl"):
        (folder / name).mkdir()
    with pytest.raises(AudioError, match=r"progress-0\.jsonl cannot be written: Is a directory"):
        ledger.add({"id": "a"})
    with pytest.raises(AudioError, match=r"manifest\.jsonl cannot be written: Is a directory"):
        ledger.close([], [])
    assert {path.name for path in folder.iterdir()} == {"progress-0.jsonl", "manifest.jsonl"}


def test_no_digest_of_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="absent cannot be read: No such file"):
        file_digest(tmp_path / "absent")
