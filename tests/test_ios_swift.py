"""The Swift package's test vectors are the runtime's, and say something."""

from __future__ import annotations

import json
import re

import ios_vectors
import pytest

PACKAGE = ios_vectors.PATH.parents[2]


def test_the_vectors_in_the_tree_are_current() -> None:
    found = json.loads(ios_vectors.PATH.read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(ios_vectors.vectors()))


def test_the_vectors_reach_every_rule() -> None:
    found = ios_vectors.vectors()
    kept = [len(draw["kept"]) for draw in found["draws"]]
    assert min(kept) == 1
    assert max(kept) > 3
    assert any(draw["chosen"] != draw["kept"][0] for draw in found["draws"])
    chosen = found["semantic"]["chosen"]
    plain = [
        ios_vectors.race(
            ios_vectors.rank(ios_vectors.mx.array([scores])),
            ios_vectors.settings(50, 0.9, 0.7),
            ios_vectors.mx.array([uniforms[0]]),
        ).item()
        for scores, uniforms in zip(
            found["semantic"]["scores"], found["semantic"]["uniforms"], strict=True
        )
    ]
    assert chosen != plain, "no token was rescued"


@pytest.mark.parametrize("name", ["MLXSpeaker", "CoreMLSpeaker", "CoreMLCodec"])
def test_back_ends_are_guarded(name: str) -> None:
    """What needs an Apple framework is compiled only where it is."""
    source = (PACKAGE / "Sources" / "WarbleKit" / f"{name}.swift").read_text()
    assert source.startswith("#if canImport(")
    assert source.rstrip().endswith("#endif")


def test_the_rest_needs_foundation_alone() -> None:
    for path in (PACKAGE / "Sources").rglob("*.swift"):
        source = path.read_text()
        if source.startswith("#if canImport("):
            continue
        assert set(re.findall(r"^import (\w+)", source, re.MULTILINE)) == {"Foundation"}


@pytest.mark.parametrize(
    ("name", "call", "times"),
    [
        ("MLXSpeaker", r"let result = try (model|codec)\(", 3),
        ("CoreMLSpeaker", r".*\btry (advance|frame|codec\.samples)\(", 4),
    ],
)
def test_nothing_reaches_the_gpu_past_the_gate(name: str, call: str, times: int) -> None:
    """Before iOS 26 a process that uses the GPU in the background is ended."""
    source = (PACKAGE / "Sources" / "WarbleKit" / f"{name}.swift").read_text()
    lines = [line.strip() for line in source.splitlines()]
    begins = re.compile(call)
    work = [i for i, line in enumerate(lines) if begins.match(line)]
    assert len(work) == times
    assert all(lines[i - 1] == "try gate.pass()" for i in work)
