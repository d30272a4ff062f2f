"""Folders appear whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from warble_mlx.errors import CheckpointError
from warble_mlx.staging import staged_folder


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


def test_a_leftover_of_the_same_process_id_is_replaced(tmp_path: Path, source: Path) -> None:
    with staged_folder(tmp_path / "out", source=source) as stage:
        leftover = stage
    leftover.mkdir()
    (leftover / "stale").write_text("x")
    shutil.rmtree(tmp_path / "out")
    with staged_folder(tmp_path / "out", source=source) as stage:
        assert names(stage) == []


def test_a_parent_that_cannot_be_made(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(CheckpointError, match="cannot be made"),
        staged_folder(tmp_path / "file" / "out", source=source),
    ):
        pytest.fail("must not run")
