"""The benchmark scripts among the samples run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "samples" / "benchmarks"


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_streams(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    quick = ("--synthetic", "tiny", "--rows", "1,2", "--frames", "4", "--runs", "1")
    out = run("streams.py", *quick, "--json", str(path))
    found = json.loads(path.read_text())
    assert [(s["rows"], s["frames"]) for s in found["streams"]] == [(1, 4), (2, 8)]
    assert out.count("\n| ") == 4


def test_comparison(tmp_path: Path) -> None:
    pytest.importorskip("mlx_audio", reason="mlx-audio is not installed")
    path = tmp_path / "compare.json"
    quick = ("--synthetic", "tiny", "--frames", "4", "--repeats", "1", "--dtype", "float32")
    out = run("compare_mlx_audio.py", *quick, "--no-kernels", "--json", str(path))
    found = json.loads(path.read_text())
    assert [case["bits"] for case in found["cases"]] == [16, 4, 4]
    assert [case["greedy_codes_equal"] for case in found["cases"][:2]] == ["80 of 80"] * 2
    assert all(case["ours"]["primitives"] < case["theirs"]["primitives"] for case in found["cases"])
    assert "ValueError" in out
