"""Reports as JSON and text, their comparison, projections and charts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bench_data import made_up_report

from warble_mlx.bench import compare, format_report, read_report, write_report
from warble_mlx.bench.compare import ratios
from warble_mlx.bench.graph import Primitives
from warble_mlx.bench.report import project
from warble_mlx.errors import MissingExtraError, WarbleError

TOP_LEVEL = (
    "schema date command machine model slots generation speaking parts_ms host_ms primitives"
    " unfused reads macs stored_bytes hardware floors verdict projections"
)


def test_json_keeps_everything(tmp_path: Path) -> None:
    report = made_up_report()
    path = tmp_path / "report.json"
    write_report(report, path)
    assert read_report(path) == report
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert list(json.loads(path.read_text())) == TOP_LEVEL.split()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no report"),
        ("{}", "missing required field"),
        ('"text"', "is no report"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(WarbleError, match=words):
        read_report(path)


def test_other_schemas_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    write_report(made_up_report(schema="warble-bench/0"), path)
    with pytest.raises(WarbleError, match="warble-bench/0"):
        read_report(path)


def test_unwritable_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WarbleError, match=r"absent/a\.json cannot be written"):
        write_report(made_up_report(), tmp_path / "absent" / "a.json")
    with pytest.raises(WarbleError, match=r"absent\.json cannot be read"):
        read_report(tmp_path / "absent.json")


def test_comparison_gives_ratios_and_names_what_differs() -> None:
    a = made_up_report()
    faster = msgspec.structs.replace(a.generation, ms_per_step=2.0)
    machine = msgspec.structs.replace(a.machine, device="GPU, another")
    fewer = Primitives({"Compiled": 200, "QuantizedMatmul": 200})
    b = made_up_report(generation=faster, machine=machine, primitives=fewer)
    over = ratios(a, b)
    assert over["ms per step"] == 0.5
    assert over["primitives dispatched"] == 0.5
    assert over["bandwidth, GB/s"] == 1
    lines = [line.split("  ") for line in compare(a, b).splitlines()]
    assert lines[0][-1].strip() == "B / A"
    differing = {line[0].strip() for line in lines}
    assert "device" in differing
    assert "mlx" not in differing


def test_projection_is_bytes_times_rate_over_bandwidth() -> None:
    phone, other = project(583_000_000, 21.533, [60, 75])
    assert phone.rtf_floor == pytest.approx(0.583 * 21.533 / 60)
    assert (phone.device, other.device) == ("A18 Pro", "")


def test_text_says_what_was_found() -> None:
    report = made_up_report()
    text = format_report(report)
    for words in (
        "synthetic full, 4-bit (abababababab)",
        "4.00 ms (p50 3.90, p95 4.40)",
        "Compiled is 500 fused groups",
        "PROJECTION, not measured",
        report.verdict.sentence,
    ):
        assert words in text
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["views, not dispatched"][-2:] == ["300", "900"]
    assert lines["fast AR Linears"][-3:] == ["33.50", "9", "301.50"]
    assert lines["slow AR attention"][-1] == "20.0"
    assert "PROJECTION" not in format_report(made_up_report(projections=[]))


def test_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    from warble_mlx.bench.chart import draw

    path = tmp_path / "chart.svg"
    draw(made_up_report(), path)
    assert "<svg" in path.read_text()[:1000]
    assert [p.name for p in tmp_path.iterdir()] == ["chart.svg"]
    with pytest.raises(WarbleError, match="cannot be drawn"):
        draw(made_up_report(), tmp_path / "chart.tune")
    assert [p.name for p in tmp_path.iterdir()] == ["chart.svg"]


def test_chart_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warble_mlx.bench.chart import draw

    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"warble-mlx\[bench\]"):
        draw(made_up_report(), tmp_path / "chart.svg")
