"""Folders appear whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import killing
import pytest

from warble_mlx.errors import CheckpointError
from warble_mlx.staging import clear_leftovers, staged_folder, temporary_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bundle(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


def fill_and_fail(
    out: Path, source: Path, error: type[BaseException], *, force: bool = False
) -> None:
    with staged_folder(out, source=source, force=force) as stage:
        (stage / "config.json").write_text("new")
        raise error


def test_appears_at_the_end(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with staged_folder(out, source=source) as stage:
        (stage / "a").write_text("1")
        assert stage.parent == out.parent
        assert not out.exists()
    assert (out / "a").read_text() == "1"
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_exception(
    tmp_path: Path, source: Path, error: type[BaseException]
) -> None:
    out = tmp_path / "new" / "deep" / "out"
    with pytest.raises(error):
        fill_and_fail(out, source, error)
    assert names(tmp_path) == ["source"]


def test_a_failed_replacement_leaves_the_old_one(tmp_path: Path, source: Path) -> None:
    out = bundle(tmp_path / "out")
    with pytest.raises(RuntimeError):
        fill_and_fail(out, source, RuntimeError, force=True)
    assert (out / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out", "source"]


def test_a_failed_rename_puts_the_old_one_back(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = bundle(tmp_path / "out")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"), staged_folder(out, source=source, force=True):
        pass
    assert (out / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out", "source"]


def test_force_replaces_the_whole_folder(tmp_path: Path, source: Path) -> None:
    out = bundle(tmp_path / "out")
    (out / "stale").write_text("x")
    with staged_folder(out, source=source, force=True) as stage:
        (stage / "config.json").write_text("new")
    assert names(out) == ["config.json"]
    assert (out / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out", "source"]


def test_an_existing_folder_is_refused(tmp_path: Path, source: Path) -> None:
    out = bundle(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"), staged_folder(out, source=source):
        pytest.fail("must not run")
    assert names(tmp_path) == ["out", "source"]


def test_force_spares_what_is_no_model(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.jpg").write_text("x")
    for target in (out, out / "cat.jpg"):
        with (
            pytest.raises(CheckpointError, match="is not a model folder"),
            staged_folder(target, source=source, force=True),
        ):
            pytest.fail("must not run")
    assert names(out) == ["cat.jpg"]


@pytest.mark.parametrize("where", [".", "sub", "sub/deep", "../source", "..", "link"])
@pytest.mark.parametrize("force", [False, True])
def test_source_and_output_must_be_apart(
    tmp_path: Path, source: Path, where: str, force: bool
) -> None:
    (source / "link").symlink_to(source)
    with (
        pytest.raises(CheckpointError, match=r"source itself|inside each other"),
        staged_folder(source / where, source=source, force=force),
    ):
        pytest.fail("must not run")
    assert names(source) == ["config.json", "link"]


def test_what_a_dead_process_left_goes(tmp_path: Path, source: Path) -> None:
    for name in (".out.partial-1a2b3c4d", ".out.old-1a2b3c4d", ".out.partial-4321", ".other.old-1"):
        bundle(tmp_path / name)
    bundle(tmp_path / "out")
    with staged_folder(tmp_path / "out", source=source, force=True) as stage:
        assert names(tmp_path) == sorted([".other.old-1", stage.name, "out", "source"])


def test_what_was_about_to_be_replaced_returns(tmp_path: Path, source: Path) -> None:
    bundle(tmp_path / ".out.old-1a2b3c4d", "the old one")
    with (
        pytest.raises(CheckpointError, match="exists already"),
        staged_folder(tmp_path / "out", source=source),
    ):
        pytest.fail("must not run")
    assert (tmp_path / "out" / "config.json").read_text() == "the old one"
    assert names(tmp_path) == ["out", "source"]


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from warble_mlx.staging import temporary_folder\n"
        "with temporary_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "out"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    with temporary_folder(tmp_path / "out") as own:
        clear_leftovers(tmp_path / "out")
        assert names(tmp_path) == sorted([own.name, theirs.name])
    other.kill()
    other.communicate()
    assert names(tmp_path) == [theirs.name]
    clear_leftovers(tmp_path / "out")
    assert names(tmp_path) == []


REPLACING = """
import sys
from pathlib import Path
import killing
from warble_mlx.staging import staged_folder
step, home = int(sys.argv[1]), Path(sys.argv[2])
killing.kill_at(step, str(home))
with staged_folder(home / "out", source=home / "source", force=True) as stage:
    for name in ("config.json", "weights"):
        (stage / name).write_text("new")
"""


def test_killed_before_any_change(tmp_path: Path, source: Path) -> None:
    old, new = {"config.json": "old", "stale": "old"}, {"config.json": "new", "weights": "new"}
    home = tmp_path.resolve()
    tests = str(Path(__file__).parent)

    def replace(step: int) -> int:
        script = f"import sys; sys.path.append({tests!r})\n{REPLACING}"
        return subprocess.run([sys.executable, "-c", script, str(step), home]).returncode

    seen = []
    for step in range(100):
        (bundle(home / "out") / "stale").write_text("old")
        status = replace(step)
        there = home / "out"
        seen.append({p.name: p.read_text() for p in there.iterdir()} if there.exists() else None)
        assert seen[-1] in (None, old, new)
        assert replace(killing.NEVER) == 0
        assert {p.name: p.read_text() for p in there.iterdir()} == new
        assert names(home) == ["out", "source"]
        for path in there.iterdir():
            path.unlink()
        there.rmdir()
        if status == 0:
            break
        assert status == killing.KILLED
    assert seen.index(None) < seen.index(new)
    assert len(seen) >= 10


def test_a_parent_that_cannot_be_made(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(CheckpointError, match="cannot be made"),
        staged_folder(tmp_path / "file" / "out", source=source),
    ):
        pytest.fail("must not run")
