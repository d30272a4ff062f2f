"""`warble bench` from end to end on a tiny model, with short chains and small arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_data import made_up_report

from warble_mlx import backend, cli
from warble_mlx.bench import hardware, measure, read_report, synthetic_subject, write_report
from warble_mlx.bench.report import SCHEMA
from warble_mlx.errors import BudgetError, WarbleError

QUICK = ("bench", "--synthetic", "tiny", "--frames", "4", "--runs", "1", "--warmup", "0")


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ROUNDS", 1)
    monkeypatch.setattr(hardware, "BYTES", {"cpu": 2**20, "gpu": 2**20})
    monkeypatch.setattr(hardware, "SIDE", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr(hardware, "CHAIN", (8, 64))


def test_everything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    arguments = [
        *QUICK,
        "--bits",
        "4",
        "--rows",
        "2",
        "--project",
        "60",
        "120",
        "--json",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", ["/somewhere/warble", *arguments])
    assert cli.main(arguments) == 0
    out, err = capfd.readouterr()
    report = read_report(path)
    assert report.schema == SCHEMA
    assert report.command == "warble " + " ".join(arguments)
    assert report.model.name == "synthetic tiny, 4-bit"
    assert (report.model.stored_bits, len(report.model.sha256)) == (4, 64)
    assert report.model.packed is report.model.compiled is backend.on_gpu()
    assert (report.generation.rows, report.generation.frames) == (2, 8)
    assert report.slots == 256
    assert 0 < report.primitives.dispatched <= report.unfused.dispatched
    assert [p.gbs for p in report.projections] == [60, 120]
    assert report.machine.device.startswith("GPU" if backend.on_gpu() else "CPU")
    assert report.floors.highest[0] == report.verdict.bound
    assert report.verdict.share == pytest.approx(
        report.floors.highest[1] / report.generation.ms_per_step
    )
    assert report.verdict.sentence in out
    assert "timing frames" in err
    assert len(report.parts_ms) == 5
    assert all(value > 0 for value in report.parts_ms.values())


def test_json_on_stdout_is_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["schema"] == SCHEMA


def test_bundle(
    tiny_bundle_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    arguments = ["bench", "-m", str(tiny_bundle_folder), "--frames", "6", "--runs", "1"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    report = read_report(path)
    assert report.model.stored_bits == 16
    assert report.model.sha256 == sha256(tiny_bundle_folder / "model.safetensors")
    assert report.speaking.rtf > 0
    assert "codec, streamed" in capfd.readouterr().out


def sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny_bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of random weights; it talks until its budget ends."""
    from synthetic import write_source

    from warble_mlx.convert import convert

    folder = tmp_path_factory.mktemp("bench")
    convert(write_source(folder / "source", max_seq_len=512), folder / "bundle")
    return folder / "bundle"


def test_comparing_measures_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write_report(made_up_report(), path)
    assert cli.main(["bench", "--compare", *map(str, paths)]) == 0
    out, err = capfd.readouterr()
    lines = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()}
    assert lines["ms per step"] == "1.000"
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bits", "4"], "--synthetic"),
        (["--prompt", "100"], "--synthetic"),
        (["-m", "x", "--synthetic", "tiny"], "exclude each other"),
        (["--project", "--frames", "4"], "--project"),
        (["--project", "60", "fast"], "unexpected extra argument"),
        (["--project", "0"], "more than 0"),
        (["--frames", "1"], "from 2 to"),
        (["--compare", "absent.json", "absent.json"], "does not exist"),
    ],
)
def test_wrong_usage(capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("command", [["bench"], ["fidelity", "x", "--sweep"], ["verify", "x"]])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert cli.main([*command, "--json", str(tmp_path / "absent" / "x.json")]) == 2
    assert capfd.readouterr().err.startswith(f"warble: there is no folder {tmp_path / 'absent'}")


@pytest.mark.parametrize("command", [["bench"], ["fidelity", "x", "--sweep"]])
def test_a_chart_that_cannot_be_drawn_is_told_likewise(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    line = [*command, "--chart", str(tmp_path / "x.tune")]
    assert cli.main(line) == 2
    assert capfd.readouterr().err.startswith(f"warble: {tmp_path / 'x.tune'} cannot be drawn")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(line) == 2
    assert capfd.readouterr().err.startswith("warble: Drawing a chart needs matplotlib")


@pytest.mark.parametrize("value", ["60,120", "60 120"])
def test_bandwidths_may_stand_in_one_word(
    value: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARBLE_PROJECT", value)
    assert cli.main([*QUICK, "--json", "-"]) == 0
    projections = json.loads(capfd.readouterr().out)["projections"]
    assert [p["gbs"] for p in projections] == [60, 120]


def test_a_model_in_the_environment_gives_way(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARBLE_MODEL", "somebody/something")
    assert cli.main([*QUICK, "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["model"]["name"] == "synthetic tiny, 16-bit"


def test_senseless_measurements_are_refused() -> None:
    subject = synthetic_subject("tiny")
    with pytest.raises(WarbleError, match="two frames"):
        measure(subject, frames=1)
    with pytest.raises(BudgetError, match="context"):
        measure(subject, frames=2000)
