"""samples/measure_wer.py: its figures, and one small run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ear.recogniser import Recogniser
from ear.scoring import words

SCRIPT = Path(__file__).parents[2] / "samples" / "measure_wer.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_wer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(voice: str, text: str, errors: int, seconds: float, reason: str = "stop") -> dict[str, Any]:
    return {
        "voice": voice,
        "seed": 1,
        "text": text,
        "heard": "",
        "errors": errors,
        "words": 10,
        "seconds": seconds,
        "finish_reason": reason,
    }


def cells(table: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_the_table_adds_up(script: ModuleType) -> None:
    rows = [
        row("Vera", "a" * 10, 1, 1.0),
        row("Vera", "a" * 20, 3, 2.0),
        row("Vera", "a" * 30, 2, 3.0, "length"),
        row("Corvin", "a" * 10, 0, 9.0),
    ]
    found = cells(script.table(rows, None))
    assert found["Vera"][:2] == ["6 / 30", "20.0%"]
    assert found["Vera"][3:] == ["2 of 3", "1.00 … 1.00"]  # lengths on a line
    assert found["Corvin"][:2] == ["0 / 10", "0.0%"]
    assert found["Corvin"][3:] == ["1 of 1", "-"]  # too few for a line
    assert found["all"][:2] == ["6 / 40", "15.0%"]


def test_a_run_that_is_too_long_shows_in_the_length_ratio(script: ModuleType) -> None:
    rows = [row("Vera", "a" * n, 0, n / 10 * (4 if n == 30 else 1)) for n in range(10, 60)]
    low, high = map(float, cells(script.table(rows, None))["Vera"][4].split(" … "))
    assert 0.8 < low < high < 1.1
    assert max(script.ratios(rows)) > 3


def test_differences_are_paired_by_voice_seed_and_sentence(script: ModuleType) -> None:
    before = [row("Vera", "one", 1, 1.0), row("Vera", "two", 5, 2.0), row("Corvin", "two", 9, 2.0)]
    after = [row("Vera", "two", 6, 3.0), row("Vera", "one", 2, 1.5), row("Marlow", "one", 0, 1.0)]
    found = cells(script.table(after, before))
    assert found["Vera"][5:] == ["+10.0 (+10.0 … +10.0)", "1.50 … 1.50"]
    assert found["Marlow"][5:] == ["-", "-"]


def test_the_sentences(script: ModuleType) -> None:
    """Twenty of 171 words are those that the voice pack's own table was made with."""
    assert sum(len(words(text)) for text in script.chosen("20")) == 171
    assert len(script.chosen("all")) == 108
    assert script.chosen("3") == script.chosen("all")[:3]


@pytest.mark.ear
def test_a_small_run(recogniser: Recogniser, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        SCRIPT,
        "--sentences",
        "2",
        "--voices",
        "3",
        "--greedy",
        "--json",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["utterances"]
    assert [r["voice"] for r in rows] == ["Vera", "Vera"]
    assert all(r["heard"] and r["finish_reason"] == "stop" for r in rows)
    total = sum(r["words"] for r in rows)
    assert cells(done.stdout)["Vera"][0] == f"{sum(r['errors'] for r in rows)} / {total}"
