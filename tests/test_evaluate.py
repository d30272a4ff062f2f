"""samples/bundled_voice/evaluate.py: the similarity of two builds of the same voices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1]))

from samples.bundled_voice import evaluate


def row(voice: str, text: str, *vector: float) -> dict[str, Any]:
    return {"voice": voice, "text": text, "vector": np.array(vector) if vector else None}


def test_voices_are_compared_across_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    ours = [
        row("A", "one", 1, 0, 0),
        row("A", "two", 0.6, 0.8, 0),
        row("A", "too short"),
        row("B", "one", 0, 0, 1),
        row("B", "two", 0, 0, 1),
    ]
    theirs = [
        row("A", "one", 0, 1, 0),
        row("A", "two", 0, 1, 0),
        row("B", "one", 0, 0, 1),
        row("B", "two", 0.8, 0, 0.6),
    ]
    a, b = evaluate.beside(ours, theirs)
    assert a["voice"] == "A"
    assert a["within"] == pytest.approx(0.6)
    assert a["within_other"] == pytest.approx(1.0)
    assert a["to_itself"] == pytest.approx((0 + 0.8) / 2)  # A one, A two against the other's
    assert a["to_nearest"] == pytest.approx((0.8 + 0) / 2)
    assert b["to_itself"] == pytest.approx((0.6 + 1) / 2)
    assert "| A | 0.600 | 1.000 | 0.400 | 0.400 |" in capsys.readouterr().out


def test_without_an_encoder_there_is_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = evaluate.beside([row("A", "one")], [row("A", "two")])
    assert only["to_itself"] is None
    assert "| A | - | - | - | - |" in capsys.readouterr().out


def test_length_and_errors_are_set_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines of voice 1; a voice and a kind that are not compared stay out."""
    rate = evaluate.SOURCE_RATE
    (tmp_path / "lines.json").write_text(json.dumps(["one two", "three"]))
    meta = [[0, 1, rate], [1, 1, 2 * rate], [0, 2, rate]]
    np.save(tmp_path / "0_00000.meta.npy", np.array(meta))
    np.save(tmp_path / "0_00000.pcm.npy", np.repeat([1000, 2000, 3000], [rate, 2 * rate, rate]))

    class Hears:
        def read(self, samples: np.ndarray, rate_hz: int) -> str:  # type: ignore[type-arg]
            assert rate_hz == rate
            return "one" if len(samples) == rate else "three"

    monkeypatch.setattr(evaluate, "Recogniser", Hears)
    warble = SimpleNamespace(
        voices=[SimpleNamespace(id=1, name="A"), SimpleNamespace(id=2, name="B")]
    )
    rows = [
        {"voice": "A", "text": "one two", "kind": "held out", "seconds": 1.5},
        {"voice": "A", "text": "three", "kind": "held out", "seconds": 1.0},
        {"voice": "B", "text": "one two", "kind": "short", "seconds": 1.0},
    ]
    (only,) = evaluate.against_source(warble, rows, tmp_path)  # type: ignore[arg-type]
    assert only == {"voice": "A", "wer": pytest.approx(1 / 3), "length": 1.0, "lengths": [1.5, 0.5]}
    assert "| A | 33.3% | 1.00 |" in capsys.readouterr().out
