"""`warble export-ios` from the shell: its options, its table, its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic

from warble_mlx import cli
from warble_mlx.convert import convert
from warble_mlx.ios_export.manifest import read_manifest


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    convert(synthetic.write_source(folder / "source"), folder / "bundle")
    return folder / "bundle"


def test_parts_are_made_and_listed(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "assets"
    options = ["--no-check", "--check-frames", "2", "--dtype", "float32", "--device", "cpu"]
    assert cli.main(["export-ios", str(bundle), str(out), "--only", "mlx-swift", *options]) == 0
    assert cli.main(["export-ios", str(bundle), str(out), "--only", " mlxfn,", *options]) == 0
    printed, told = capfd.readouterr()
    head, *rows = [line.split() for line in printed.splitlines()[-3:]]
    assert head[0] == "part"
    assert [row[0] for row in rows] == ["mlxfn", "mlx-swift"]
    parts = read_manifest(out).parts
    for row, part in zip(rows, parts, strict=True):
        passed = sum(check.result == "pass" for check in part.checks)
        assert row[1] == f"{part.nbytes / 1e6:,.1f}"
        assert row[4:6] == [str(passed), "passed"]
    assert "mlxfn: building" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "mlxfn,phone"], "parts are mlxfn, mlx-swift, coreml, not phone"),
        (["--only", " , "], "not none"),
        (["--only", "mlx-swift", "--voices", "nobody", "--no-check"], "no voice 'nobody'"),
    ],
)
def test_what_cannot_be_exported(
    bundle: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    out = tmp_path / "assets"
    assert cli.main(["export-ios", str(bundle), str(out), *options]) == 2
    assert words in capfd.readouterr().err
    assert not out.exists()


def test_the_folder_of_voices_is_no_list_of_them(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["export-ios", str(bundle), str(tmp_path / "assets"), "--only", "mlx-swift"]
    monkeypatch.setenv("WARBLE_VOICES", str(tmp_path / "voices"))
    assert cli.main([*args, "--no-check"]) == 0
    monkeypatch.setenv("WARBLE_EXPORT_VOICES", "nobody")
    assert cli.main([*args, "--no-check"]) == 2
    assert "no voice 'nobody'" in capfd.readouterr().err
