"""The manifest: its schema, what it refuses, and how checks are judged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from warble_mlx.errors import CheckpointError
from warble_mlx.ios_export.checks import (
    ExportError,
    at_least,
    at_most,
    decibels,
    equal,
    require,
    unverified,
)
from warble_mlx.ios_export.manifest import (
    MANIFEST,
    SCHEMA_FILE,
    Check,
    Manifest,
    json_schema,
    read_manifest,
)

EXAMPLE = Path(__file__).parent / "golden" / "ios_manifest.json"


def write(folder: Path, **changes: object) -> Path:
    found = json.loads(EXAMPLE.read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(found))
    return folder


def test_the_schema_in_the_tree_is_the_structures() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == json.loads(msgspec.json.encode(json_schema()))


def test_an_example_is_read_and_written_back(tmp_path: Path) -> None:
    found = read_manifest(write(tmp_path))
    assert isinstance(found, Manifest)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Manifest) == found
    assert [part.name for part in found.parts] == ["mlxfn", "mlx-swift"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schema": "warble-ios/2"}, "warble-ios/2"),
        ({"sampling": {}}, "top_k|order"),
        ({"surprise": 1}, "surprise"),
        ({"files": [{"path": "../x", "bytes": 1, "sha256": "", "role": ""}]}, "leads out"),
        ({"files": [{"path": "/x", "bytes": 1, "sha256": "", "role": ""}]}, "leads out"),
        ({"files": [{"path": "a", "bytes": 1, "sha256": "", "role": ""}] * 2}, "twice"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        read_manifest(write(tmp_path, **changes))


def test_a_folder_without_manifest_says_where_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="warble export-ios"):
        read_manifest(tmp_path)


def test_decibels_look_at_content_and_length() -> None:
    wave = np.sin(np.arange(1000.0))
    assert decibels(wave, wave) == math.inf
    assert decibels(wave * 1.01, wave) == pytest.approx(40, abs=0.01)
    assert decibels(np.roll(wave, 100), wave) < 4
    assert math.isnan(decibels(np.full(1000, np.nan), wave))
    assert decibels(np.zeros(1000), np.zeros(1000)) == math.inf
    assert decibels(wave + 1e-3, wave, least=1.0) == pytest.approx(60, abs=0.01)
    assert decibels(wave + 1e-3, wave, least=0.1) == decibels(wave + 1e-3, wave)
    with pytest.raises(ValueError, match="compared"):
        decibels(wave[:-1], wave)


def results(*checks: Check) -> list[str]:
    return [check.result for check in checks]


def test_checks_fail_on_the_wrong_side_and_on_nan() -> None:
    assert results(at_least("a", 55, 55), at_least("a", 54.9, 55)) == ["pass", "fail"]
    assert results(at_most("a", 5, 5), at_most("a", 5.1, 5)) == ["pass", "fail"]
    assert results(equal("a", 3, 3), equal("a", 2, 3)) == ["pass", "fail"]
    assert results(at_least("a", math.nan, 55), at_most("a", math.nan, 5)) == ["fail", "fail"]
    assert results(unverified("a", "on a phone")) == ["unverified"]


def test_a_failed_check_names_itself_and_unverified_ones_do_not_stop() -> None:
    require("coreml", [equal("good", 1, 1), unverified("speed", "no phone")])
    with pytest.raises(ExportError, match="codec audio is 20 dB, limit 55") as raised:
        require("coreml", [equal("good", 1, 1), at_least("codec audio", 20, 55, "dB")])
    assert "good" not in str(raised.value).partition("so it was dropped")[2]
    assert raised.value.exit_status == 1
