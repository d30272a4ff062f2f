"""The table of cases names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "cases.md").read_text()


def test_every_named_test_exists() -> None:
    file, missing, named = "", [], 0
    for found in re.finditer(r"`(test_\w+\.py)?::(test_\w+)`|`(test_\w+\.py)`", TABLE):
        file = found[1] or found[3] or file
        if found[2] is None:
            continue
        named += 1
        names = {
            node.name
            for node in ast.parse((HERE / file).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if found[2] not in names:
            missing.append(f"{file}::{found[2]}")
    assert not missing
    assert named > 60


def test_every_case_has_a_test_or_a_script() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| WB-")]
    assert len(rows) == len({row.split("|")[1] for row in rows}) == 52
    assert all(re.search(r"`(test_\w+\.py)::", row) for row in rows)
