"""The generated checkpoints are the ones that the golden numbers were made with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

MANIFEST = json.loads((Path(__file__).parent / "golden" / "manifest.json").read_text("utf-8"))


def sums(folder: Path, preset: str) -> tuple[dict[str, str], dict[str, str]]:
    want = MANIFEST["checkpoints"][preset]["sha256"]
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in want}, want


def test_tiny(tiny_source: Path) -> None:
    got, want = sums(tiny_source, "tiny")
    assert got == want


@pytest.mark.slow
def test_full(full_source: Path) -> None:
    got, want = sums(full_source, "full")
    assert got == want


def test_full_without_weights(full_tokenizer: Path) -> None:
    want = MANIFEST["checkpoints"]["full"]["sha256"]
    for name in ("config.json", "tokenizer.json"):
        assert hashlib.sha256((full_tokenizer / name).read_bytes()).hexdigest() == want[name]
